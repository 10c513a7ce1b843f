"""Experts of published sizes with random weights."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.moe.shapes import LAYERS

# Hidden, experts, top-k, inner: the large one with an eighth of its experts, so that workers share a GPU.
SHAPES = {
    "moonlight": LAYERS["moonlight"][:4], "qwen3-30b-a3b": LAYERS["qwen3-30b-a3b"][:4], "minimax-m2": (3072, 32, 8, 1536),
    "odd": (320, 8, 2, 448),
}  # fmt: skip


@functools.partial(jax.jit, static_argnums=(1, 2))
def drawn(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
    """Normal bfloat16 numbers, drawn and scaled in one pass: nothing else of their size is ever in memory."""
    return (scale * jax.random.normal(key, shape)).astype(jnp.bfloat16)


@functools.lru_cache(maxsize=1)  # a gigabyte each
def layer(shape: str) -> tuple[jax.Array, jax.Array]:
    H, E, _, inner = SHAPES[shape]
    a, b = jax.random.split(jax.random.key(0))
    return drawn(a, (E, 2, inner, H), H**-0.5), drawn(b, (E, H, inner), inner**-0.5)


@functools.cache
def shared_experts(shape: str, inner: int) -> tuple[jax.Array, jax.Array]:
    H = SHAPES[shape][0]
    a, b = jax.random.split(jax.random.key(1))
    return drawn(a, (2, inner, H), H**-0.5), drawn(b, (H, inner), inner**-0.5)
