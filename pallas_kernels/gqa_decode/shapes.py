"""Sizes of grouped-query attention in published models, and the contexts that are measured."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Key heads, query heads for each of them, and columns of a head; keys that a sliding window has, and whether heads have
    sinks."""

    keys: int
    group: int
    columns: int
    window: int | None = None
    sinks: bool = False


HEADS = {
    "llama-3.1-8b": Heads(8, 4, 128),  # Qwen3-8B and the EAGLE3 draft of Llama-3.1-8B have these too
    "llama-3.2-1b": Heads(8, 4, 64),
    "qwen3-30b-a3b": Heads(4, 8, 128),
    "qwen3-235b-a22b": Heads(4, 16, 128),
    "glm-4.5-air": Heads(8, 12, 128),  # GLM-4.5, 4.6 and 4.7 too
    "minimax-m2": Heads(8, 6, 128),
    "qwen3.5-35b-a3b": Heads(2, 8, 256),
    "gpt-oss": Heads(8, 8, 64, sinks=True),
    "gpt-oss, sliding": Heads(8, 8, 64, window=128, sinks=True),
}
# Tokens a request: plain decoding, and verification of three drafts.
WINDOWS = (1, 4)
# Requests, and cached tokens of each.
CONTEXTS = ((1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (32, 4096), (128, 4096))
