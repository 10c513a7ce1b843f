"""Heads of real models' linear attention, and calls of decode steps and of prompts."""

from typing import NamedTuple


class Heads(NamedTuple):
    """K key heads of dk columns, each with R value heads of dv; a state fades in `fades` numbers, 1 or dk."""

    K: int
    R: int
    dk: int
    dv: int
    fades: int


HEADS = {
    "Qwen3.5-35B-A3B": Heads(16, 2, 128, 128, 1),
    "Kimi-Linear-48B-A3B": Heads(32, 1, 128, 128, 128),
}
# Rows, and tokens of a window.
CALLS = ((1, 1), (1, 4), (32, 1), (32, 4), (128, 1), (128, 4))
# Prompts, and the tokens of each.
PROMPTS = ((1, 256), (1, 2048), (1, 8192), (8, 1024))
