"""Sizes of grouped-query attention in published models, and the contexts that are measured."""

from typing import NamedTuple


class Heads(NamedTuple):
    """Key heads, query heads for each of them, and columns of a head."""

    keys: int
    group: int
    columns: int


# Qwen3-8B and the EAGLE3 draft of Llama-3.1-8B have its heads too.
HEADS = {"llama-3.1-8b": Heads(8, 4, 128), "llama-3.2-1b": Heads(8, 4, 64)}
# Tokens a request: plain decoding, and verification of three drafts.
WINDOWS = (1, 4)
# Requests, and cached tokens of each.
CONTEXTS = ((1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (32, 4096), (128, 4096))
