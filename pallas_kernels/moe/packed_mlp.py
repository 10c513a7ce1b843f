"""MLPs with codes of four bits that every token visits, on the kernels of experts with such codes (see `quantised_mlp.py`).

An MLP is one expert, which all tokens visit with weight 1.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.moe.config import Config
from pallas_kernels.moe.packed_codes import fragment_order
from pallas_kernels.moe.packed_config import configure_packed_mlp
from pallas_kernels.moe.packed_matmul import packed_experts
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.values import Quantised


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def mlp_parts(
    x: jax.Array, gate_up: Quantised, down: Quantised, *, config: Config | None = None, interpret: Any = False
) -> jax.Array:
    """down(silu(gate x) * up x) in one part: bfloat16 [1, >= T, H].

    Jitted, so that the layers of a model share one lowering.

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I].
        config: default `configure_packed_mlp`'s.
        interpret: passed to Pallas.
    """
    T, H = x.shape
    config = config or configure_packed_mlp(T, H, down.shape[1])
    rows, slots = config.rows, config.slots
    tokens = jnp.pad(x, ((0, slots * rows - T), (0, 0))).reshape(slots, rows, H)
    nothing = jnp.zeros(0, jnp.int32)
    number, expert, used = (jnp.full(n, value, jnp.int32) for n, value in ((1, slots), (slots, 0), (slots, rows)))
    tables = SlotTables(number, expert, used, nothing, nothing)
    one = ExpertWeights(*(jax.tree.map(lambda array: array[None], weight) for weight in (gate_up, down)))
    return packed_experts(fragment_order(tokens), one, tables, config, interpret=interpret).reshape(1, -1, H)
