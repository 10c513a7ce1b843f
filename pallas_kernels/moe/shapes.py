"""Sizes of mixture layers in published models, and the token counts that are measured."""

from typing import NamedTuple


class Layer(NamedTuple):
    """A mixture layer.

    Attributes:
        hidden: of the model. experts: routed ones. top_k: of them for each token. inner: size of a routed expert.
        shared: joint inner size of the shared experts.
    """

    hidden: int
    experts: int
    top_k: int
    inner: int
    shared: int


LAYERS = {
    "demo": Layer(192, 8, 2, 64, 64),
    "moonlight": Layer(2048, 64, 6, 1408, 2816),
    "deepseek-v2": Layer(5120, 160, 6, 1536, 3072),
    "deepseek-v3": Layer(7168, 256, 8, 2048, 2048),
    "glm-4.7-flash": Layer(2048, 64, 4, 1536, 1536),
    "qwen3-30b-a3b": Layer(2048, 128, 8, 768, 0),
    "glm-4.5-air": Layer(4096, 128, 8, 1408, 1408),
    "minimax-m2": Layer(3072, 256, 8, 1536, 0),
    "gpt-oss-20b": Layer(2880, 32, 4, 2880, 0),
}
TOKENS = (1, 8, 32, 64, 128, 512, 2048)
