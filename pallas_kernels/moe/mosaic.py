"""Routed and shared experts of several tokens on Hopper, as Mosaic GPU kernels around slots (see `slots.py`).

Route (`routing.py`), make the slot tables (`dispatch.py`), gather the slots' tokens (`gather.py`), multiply
(`grouped_matmul.py`), and sum each token's weighted rows in XLA. Up to 8 tokens, routing and tables are one kernel
(`dispatch_fused.py`) and nothing is gathered, because every slot has all tokens.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe import gather
from pallas_kernels.moe.config import GRANULE, Config, M, configure
from pallas_kernels.moe.dispatch import dispatch, dispatch_assigned
from pallas_kernels.moe.dispatch_fused import route_and_dispatch
from pallas_kernels.moe.grouped_matmul import down_matmul, up_matmul
from pallas_kernels.moe.reference import swiglu
from pallas_kernels.moe.routing import assign
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.values import unquantised_reason


def unsupported_reason(x: jax.Array, parameters: ExpertWeights) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    inner, H = parameters.gate_up.shape[2:]
    matrices = (parameters.gate_up, parameters.down, *(parameters.shared or ()))
    if reason := unquantised_reason(*matrices):
        return reason
    if parameters.special and parameters.shared is not None:
        return "it has no biases and no clamped SwiGLU beside shared experts"
    if H % M or inner % M:
        return f"it needs a hidden size and an expert size of multiples of {M}, not {H} and {inner}"
    return hopper_unsupported_reason(x.dtype, *(array.dtype for array in jax.tree.leaves(matrices)))


@functools.partial(jax.jit, static_argnames=("config", "interpret"))
def experts(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    *,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.experts` without the residual, in bfloat16. Jitted, so that the layers of a model share one lowering.

    Args:
        config: default `configure`'s.
        interpret: passed to Pallas.
    """
    config = config or _configured(x, parameters, ids.shape[1])
    E = parameters.gate_up.shape[0]
    tables = dispatch(ids, live, E, config.rows, config.slots, all_tokens=config.all_tokens, interpret=interpret)
    return _apply(x, parameters, weights, tables, live, config, interpret)


@functools.partial(jax.jit, static_argnames=("routing", "config", "interpret"))
def routed_experts(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    *,
    routing: Routing,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.routed_experts` without the residual, in bfloat16, where `routing.unsupported_reason` is None too.

    Between the router's matmul and the experts' a step of up to 8 tokens has one kernel, a larger decode step two, a
    prefill three.
    """
    T, E = logits.shape
    k = routing.top_k
    config = config or _configured(x, parameters, k)
    if config.all_tokens:
        weights, tables = route_and_dispatch(
            logits, bias, live, config.rows, config.slots, routing=routing, interpret=interpret
        )
    else:
        weights, assigned = assign(logits, bias, live, routing=routing, interpret=interpret)
        tables = dispatch_assigned(
            assigned, T, routing.width, E, config.rows, config.slots, all_tokens=False, interpret=interpret
        )
        tables = tables._replace(place=tables.place[:, :k])
    return _apply(x, parameters, weights, tables, live, config, interpret)


def _configured(x: jax.Array, parameters: ExpertWeights, k: int) -> Config:
    T, H = x.shape
    E, _, inner, _ = parameters.gate_up.shape
    return configure(T, E, k, H, inner, parameters.shared_inner)


def _apply(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    tables: SlotTables,
    live: jax.Array,
    config: Config,
    interpret: Any,
) -> jax.Array:
    T = x.shape[0]
    gate_up, down, shared = parameters.arrays()
    x_parts, gate_up_parts, down_parts = [slot_rows(x, tables, config, interpret=interpret)], [gate_up], [down]
    if shared is not None and config.pieces:
        x_parts.append(_pad_tokens(x)[None])
        gate_up_parts.append(shared[0])
        down_parts.append(shared[1])
    up_bias, down_bias = parameters.biases or (None, None)
    h_parts = up_matmul(x_parts, gate_up_parts, tables, config, up_bias, parameters.clamp, interpret=interpret)
    y, *y_pieces = down_matmul(h_parts, down_parts, tables, config, down_bias, interpret=interpret)
    addends = [y_piece[i, :T] for y_piece in y_pieces for i in range(config.pieces)]
    if shared is not None and not config.pieces:
        addends = [swiglu(x, *shared)]
    return combine(y, weights, tables, live, addends).astype(x.dtype)


def slot_rows(x: jax.Array, tables: SlotTables, config: Config, *, interpret: Any = False) -> jax.Array:
    """The slots' rows of x [T, H]: [slots, rows, H], or [1, T, H] if every slot has all tokens."""
    if config.all_tokens:
        return _pad_tokens(x)[None]
    if not gather.supports(x.shape[1]):
        return x.at[tables.token].get(mode="clip").reshape(-1, config.rows, x.shape[1])
    return gather.gather_slots(x, tables.token, tables.num_slots, rows=config.rows, interpret=interpret)


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads x to whole granules of rows. Fewer rows than one stay: past the last one TMA reads zeros."""
    T = x.shape[0]
    return x if T < GRANULE or T % GRANULE == 0 else jnp.pad(x, ((0, -T % GRANULE), (0, 0)))


def combine(
    y: jax.Array, weights: jax.Array, tables: SlotTables, live: jax.Array, addends: Sequence[jax.Array] = ()
) -> jax.Array:
    """The weighted sum of each live token's rows in y [slots, rows, H], plus the addends [T, H]: float32 [T, H]."""
    picked_TkH = y.reshape(-1, y.shape[-1]).at[tables.place].get(mode="promise_in_bounds").astype(jnp.float32)
    out = (picked_TkH * weights[:, :, None]).sum(axis=1)
    for part in addends:
        out += part.astype(jnp.float32)
    # Not by a weight of 0: the place of a token that is not live is another's row or was never written, and may be NaN.
    return jnp.where(live[:, None], out, 0.0)
