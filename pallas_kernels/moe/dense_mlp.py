"""The MLP of a dense layer in bfloat16, for a decode step's tokens, as one expert that all tokens visit.

XLA makes three kernels of it, whose matmuls read the weights at 83 and 62 % of the memory's rate (GLM-4.5-Air's, 32
tokens, in a trace on an H200).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe.config import GRANULE, Config, M, blocks_of_a_kernel, tiles
from pallas_kernels.moe.grouped_matmul import down_matmul, up_matmul
from pallas_kernels.moe.slots import SlotTables

MOST_TOKENS = 128


def unsupported_reason(x: jax.Array, gate_up: jax.Array, down: jax.Array) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    T, (H, inner) = x.shape[0], down.shape
    if H % M or inner % M:
        return f"it needs MLPs of sizes that are multiples of {M}, not {H} and {inner}"
    if T > MOST_TOKENS or (T > GRANULE and T % GRANULE):
        return f"it supports up to {MOST_TOKENS} tokens, from {GRANULE} on in multiples of {GRANULE}, not {T}"
    return hopper_unsupported_reason(x.dtype, gate_up.dtype, down.dtype)


def worthwhile(H: int, inner: int) -> bool:
    """Whether there are tiles for blocks enough to read the weights as fast as memory gives them."""
    up_tiles, down_tiles, blocks = inner // M, H // M, blocks_of_a_kernel()
    return up_tiles >= blocks // 2 and down_tiles >= blocks // 4 - 1


def configure_mlp(T: int, H: int, inner: int) -> Config:
    """How the call is cut: one slot with all tokens."""
    rows = -(-T // GRANULE) * GRANULE
    up, down = tiles(rows, H, inner, gated=True, small=True), tiles(rows, inner, H, gated=False, small=True)
    return Config(rows, 1, True, up, down, blocks_of_a_kernel())


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def mlp(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, *, config: Config | None = None, interpret: Any = False
) -> jax.Array:
    """down(silu(gate x) * up x): [T, H]. Jitted, so that the layers of a model share one lowering.

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I].
        config: default `configure_mlp`'s.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    config = config or configure_mlp(T, H, down.shape[1])
    nothing = jnp.zeros(0, jnp.int32)
    tables = SlotTables(jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32), *[nothing] * 4)
    h = up_matmul([x[None]], [gate_up[None]], tables, config, interpret=interpret)
    (y,) = down_matmul(h, [down[None]], tables, config, interpret=interpret)
    return y[0, :T]
