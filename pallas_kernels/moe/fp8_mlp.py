"""MLPs in FP8 that every token visits, on the kernels of experts in FP8 (see `quantised_mlp.py`).

An MLP is one to a few pieces along its inner size, each of which is an expert that all tokens visit with weight 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.moe.config import Config
from pallas_kernels.moe.fp8_config import configure_mlp, padded_rows
from pallas_kernels.moe.fp8_matmul import down_matmul, up_matmul
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.quant.activations import Codes
from pallas_kernels.quant.tokens import quantise_tokens
from pallas_kernels.quant.values import Quantised


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def mlp_parts(
    x: jax.Array, gate_up: Quantised, down: Quantised, *, config: Config | None = None, interpret: Any = False
) -> jax.Array:
    """down(silu(gate x) * up x) in parts that have still to be added up: bfloat16 [pieces, >= T, H].

    Jitted, so that the layers of a model share one lowering.

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I].
        config: default `configure_mlp`'s.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    config = config or configure_mlp(T, H, down.shape[1])
    rows, slots = config.rows, config.slots // config.pieces
    # Before the padding: routed experts quantise the same tokens, and XLA does it once for both.
    whole, missing = quantise_tokens(x, interpret=interpret), slots * rows - T
    codes = jnp.pad(whole.codes, ((0, missing), (0, 0))).reshape(slots, rows, H)
    scale = jnp.pad(whole.scale, ((0, 0), (0, missing))).reshape(-1, slots, rows).swapaxes(0, 1)
    tokens = Codes(codes, jnp.pad(scale, ((0, 0), (0, 0), (0, padded_rows(rows) - rows))))
    # The kernels know whose piece a slot is.
    every, nothing = jnp.full(1, config.slots, jnp.int32), jnp.zeros(0, jnp.int32)
    tables = SlotTables(every, every, nothing, nothing, nothing)
    as_experts = (jax.tree.map(lambda array: array[None], weight) for weight in (gate_up, down))
    h = up_matmul(tokens, next(as_experts), tables, config, interpret=interpret)
    y = down_matmul(h, next(as_experts), tables, config, interpret=interpret)
    return y.reshape(config.pieces, slots * rows, H)
