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


@functools.cache
def layer(shape: str) -> tuple[jax.Array, jax.Array]:
    H, E, _, inner = SHAPES[shape]
    a, b = jax.random.split(jax.random.key(0))
    gate_up = jax.random.normal(a, (E, 2, inner, H), jnp.bfloat16) * H**-0.5
    return gate_up, jax.random.normal(b, (E, H, inner), jnp.bfloat16) * inner**-0.5


@functools.cache
def shared_experts(shape: str, inner: int) -> tuple[jax.Array, jax.Array]:
    H = SHAPES[shape][0]
    a, b = jax.random.split(jax.random.key(1))
    gate_up = jax.random.normal(a, (2, inner, H), jnp.bfloat16) * H**-0.5
    return gate_up, jax.random.normal(b, (H, inner), jnp.bfloat16) * inner**-0.5
