"""Sizes of a norm with what reads it in published models, and the token counts that are measured."""

from typing import NamedTuple


class Reader(NamedTuple):
    """A hidden size, and the projections that read the normed token: the outputs of each, and a router's experts."""

    hidden: int
    outputs: tuple[tuple[int, ...], ...] = ()
    experts: int = 0


READERS = {
    # Queries of 16 heads, and the latent with its rotated key.
    "moonlight, attention": Reader(2048, ((16, 192), (576,))),
    "moonlight, router": Reader(2048, experts=64),
    # The queries' and the keys' latents are one matrix.
    "deepseek-v3, both": Reader(7168, ((2112,),), experts=256),
}
TOKENS = (1, 2, 4, 8)
