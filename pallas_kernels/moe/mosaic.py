"""Routed and shared experts of several tokens on Hopper, as Mosaic GPU kernels around slots (see `slots.py`).

Route (`routing.py`), make the slot tables (`dispatch.py`), gather the slots' tokens (`gather.py`), multiply
(`grouped_matmul.py`), and sum each token's weighted rows in XLA. Up to 8 tokens, routing and tables are one kernel
(`dispatch_fused.py`) and nothing is gathered, because every slot has all tokens; for more they may be one too
(`dispatch_meet.py`).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe import gather, quantised_mlp
from pallas_kernels.moe.combine import combine_and_norm
from pallas_kernels.moe.config import GRANULE, Config, M, configure
from pallas_kernels.moe.dispatch import (
    MOST_CHUNKS,
    assigned_blocks,
    copies_tokens,
    dispatch,
    dispatch_and_copy,
    dispatch_assigned,
)
from pallas_kernels.moe.dispatch_fused import route_and_dispatch
from pallas_kernels.moe.dispatch_meet import chunks_of, route_and_place
from pallas_kernels.moe.dispatch_small import Copied, Plan
from pallas_kernels.moe.fp8_config import MULTIPLE, configure_fp8, is_fp8, padded_rows, pieces_beside
from pallas_kernels.moe.fp8_matmul import fp8_experts
from pallas_kernels.moe.grouped_matmul import down_matmul, up_matmul
from pallas_kernels.moe.packed_codes import fragment_order
from pallas_kernels.moe.packed_config import configure_packed, is_packed
from pallas_kernels.moe.packed_matmul import packed_experts
from pallas_kernels.moe.reference import swiglu
from pallas_kernels.moe.routing import assign
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.slots import SlotTables
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.activations import Codes
from pallas_kernels.quant.tokens import quantise_tokens
from pallas_kernels.quant.values import unquantised_reason


def unsupported_reason(x: jax.Array | jax.ShapeDtypeStruct, parameters: ExpertWeights) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    inner, H = parameters.gate_up.shape[2:]
    fp8, shared = is_fp8(parameters), parameters.shared or ()
    if unquantised_reason(*shared):
        if reason := quantised_mlp.obstacle(*shared):
            return reason
        shared = ()
    matrices = (*(() if fp8 or is_packed(parameters) else (parameters.gate_up, parameters.down)), *shared)
    if reason := unquantised_reason(*matrices):
        return reason
    if parameters.special and parameters.shared is not None:
        return "it has no biases and no clamped SwiGLU beside shared experts"
    if parameters.special and fp8:
        return "it has no biases and no clamped SwiGLU with experts in FP8"
    multiple = MULTIPLE if fp8 else M
    if H % multiple or inner % multiple:
        return f"it needs a hidden size and an expert size of multiples of {multiple}, not {H} and {inner}"
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
    E, mine = parameters.gate_up.shape[0], None
    if parameters.first is not None:
        ids = ids - parameters.first
        mine = (ids >= 0) & (ids < E)
        ids = jnp.where(mine, ids, E)
    k, width = ids.shape[1], -(-ids.shape[1] // 8) * 8
    if not config.all_tokens and tuning.current().copying_tokens >= x.shape[0] and not is_fp8(parameters):
        assigned = assigned_blocks(jnp.pad(ids, ((0, 0), (0, width - k)), constant_values=E), live, E)
        if copies_tokens(assigned.shape[0], width, x.shape[1]):
            sizes = width, E, config.rows, config.slots
            tables, copied = _dispatched_and_copied(assigned, x, parameters, sizes, interpret)
            rows = _expert_rows(x, copied, parameters, weights, tables, config, interpret)
            return combine(rows, live, k, mine).astype(x.dtype)
    tables = dispatch(ids, live, E, config.rows, config.slots, all_tokens=config.all_tokens, interpret=interpret)
    slots_x = _slot_inputs(x, parameters, tables, config, interpret)
    rows = _expert_rows(x, slots_x, parameters, weights, tables, config, interpret)
    return combine(rows, live, k, mine).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("routing", "config", "interpret"))
def routed_experts(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    zero: jax.Array | None = None,
    *,
    routing: Routing,
    config: Config | None = None,
    interpret: Any = False,
) -> jax.Array:
    """As `api.routed_experts` without the residual, in bfloat16, where `routing.unsupported_reason` is None too.

    Between the router's matmul and the experts' a step of up to 8 tokens has one kernel, a larger decode step one to
    three, a prefill four.
    """
    rows = _routed_rows(x, parameters, logits, bias, live, zero, routing, config, interpret)
    return combine(rows, live, routing.top_k).astype(x.dtype)


@functools.partial(jax.jit, static_argnames=("routing", "eps", "config", "interpret"))
def add_and_norm(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    residual: jax.Array,
    norm_weight: jax.Array,
    zero: jax.Array | None = None,
    *,
    routing: Routing,
    eps: float,
    config: Config | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
    """residual + `routed_experts`, and the norm of that, where `combine.unsupported_reason` is None too."""
    rows = _routed_rows(x, parameters, logits, bias, live, zero, routing, config, interpret)
    return combine_and_norm(
        rows.y, rows.addends, rows.weights, rows.place, live, residual, norm_weight,
        k=routing.top_k, eps=eps, beside=rows.beside, interpret=interpret,
    )  # fmt: skip


class ExpertRows(NamedTuple):
    """What is left to be summed.

    Attributes:
        y: [>= slots, rows, H], of the slots first.
        addends: each [parts, >= T, H], of the shared experts.
        weights: float32 [>= T, >= k].
        place: see `SlotTables`.
        beside: how many of y's slots, the last ones, are addends too, with a row for each token.
    """

    y: jax.Array
    addends: tuple[jax.Array, ...]
    weights: jax.Array
    place: jax.Array
    beside: int = 0


def _routed_rows(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    zero: jax.Array | None,
    routing: Routing,
    config: Config | None,
    interpret: Any,
) -> ExpertRows:
    (T, H), E, width, choices = x.shape, logits.shape[-1], routing.width, tuning.current()
    config = config or _configured(x, parameters, routing.top_k)
    sizes = width, E, config.rows, config.slots
    copied = None
    if config.all_tokens:
        weights, tables = route_and_dispatch(
            logits, bias, live, config.rows, config.slots, routing=routing, interpret=interpret
        )
    else:
        chunks = chunks_of(T, width)
        copies = choices.copying_tokens >= T and not is_fp8(parameters) and copies_tokens(chunks, width, H)
        if zero is not None and choices.route_plan_tokens >= T and chunks <= MOST_CHUNKS:
            copy = Copied(H, x.dtype, is_packed(parameters)) if copies else None
            plan = Plan(chunks, E, width, config.rows, config.slots, copied=copy)
            weights, tables, copied = route_and_place(
                logits, bias, live, x, zero, plan, routing=routing, interpret=interpret
            )
        else:
            weights, assigned = assign(logits, bias, live, routing=routing, interpret=interpret)
            if copies:
                tables, copied = _dispatched_and_copied(assigned, x, parameters, sizes, interpret)
            else:
                tables = dispatch_assigned(assigned, *sizes, all_tokens=False, interpret=interpret)
    slots_x = _slot_inputs(x, parameters, tables, config, interpret) if copied is None else copied
    return _expert_rows(x, slots_x, parameters, weights, tables, config, interpret)


def _configured(x: jax.Array, parameters: ExpertWeights, k: int) -> Config:
    T, H = x.shape
    E, _, inner, _ = parameters.gate_up.shape
    if is_packed(parameters):
        return configure_packed(T, E, k, H, inner)
    if is_fp8(parameters):
        return configure_fp8(T, E, k, H, inner)
    return configure(
        T, E, k, H, inner, 0 if unquantised_reason(*(parameters.shared or ())) else parameters.shared_inner
    )


def _slot_inputs(
    x: jax.Array, parameters: ExpertWeights, tables: SlotTables, config: Config, interpret: Any
) -> jax.Array | Codes:
    """The slots' rows as the experts' matmuls take them."""
    if is_fp8(parameters):
        return slot_codes(x, tables, config, interpret=interpret)
    return slot_rows(_ordered(x, parameters), tables, config, interpret=interpret)


def _dispatched_and_copied(
    assigned: jax.Array, x: jax.Array, parameters: ExpertWeights, sizes: tuple[int, int, int, int], interpret: Any
) -> tuple[SlotTables, jax.Array]:
    """`dispatch_and_copy` of the tokens as the experts' matmuls take them."""
    return dispatch_and_copy(assigned, x, *sizes, ordered=is_packed(parameters), interpret=interpret)


def _ordered(x: jax.Array, parameters: ExpertWeights) -> jax.Array:
    """The tokens as the experts' matmuls take them."""
    return fragment_order(x) if is_packed(parameters) else x


def _expert_rows(
    x: jax.Array,
    slots_x: jax.Array | Codes,
    parameters: ExpertWeights,
    weights: jax.Array,
    tables: SlotTables,
    config: Config,
    interpret: Any,
) -> ExpertRows:
    if isinstance(slots_x, Codes) or is_packed(parameters):
        if isinstance(slots_x, Codes):
            y = fp8_experts(slots_x, parameters, tables, config, interpret=interpret)
            if pieces := pieces_beside(parameters, config):
                return ExpertRows(y, (), weights, tables.place, pieces)
        else:
            y = packed_experts(slots_x, parameters, tables, config, interpret=interpret)
        return ExpertRows(y, _beside(x, parameters, interpret), weights, tables.place)
    up_bias, down_bias = parameters.biases or (None, None)
    in_kernels = parameters if config.pieces else dataclasses.replace(parameters, shared=None)
    gate_up, down, shared = in_kernels.arrays()
    x_parts, gate_up_parts, down_parts = [slots_x], [gate_up], [down]
    if shared is not None:
        x_parts.append(_pad_tokens(x)[None])
        gate_up_parts.append(shared[0])
        down_parts.append(shared[1])
    h_parts = up_matmul(x_parts, gate_up_parts, tables, config, up_bias, parameters.clamp, interpret=interpret)
    y, *addends = down_matmul(h_parts, down_parts, tables, config, down_bias, interpret=interpret)
    beside = () if shared is not None else _beside(x, parameters, interpret)
    return ExpertRows(y, (*addends, *beside), weights, tables.place)


def _beside(x: jax.Array, parameters: ExpertWeights, interpret: Any) -> tuple[jax.Array, ...]:
    """The addends of shared experts that the routed ones' kernels leave out."""
    if parameters.shared is None:
        return ()
    if unquantised_reason(*parameters.shared):
        return (quantised_mlp.mlp_parts(x, *parameters.shared, interpret=interpret),)
    return (swiglu(x, *parameters.shared)[None],)


def slot_rows(x: jax.Array, tables: SlotTables, config: Config, *, interpret: Any = False) -> jax.Array:
    """The slots' rows of x [T, H]: [slots, rows, H], or [1, T, H] if every slot has all tokens."""
    if config.all_tokens:
        return _pad_tokens(x)[None]
    if not gather.supports(x.shape[1]):
        return x.at[tables.token].get(mode="clip").reshape(-1, config.rows, x.shape[1])
    return gather.gather_slots(x, tables.token, tables.num_slots, rows=config.rows, interpret=interpret)


def slot_codes(x: jax.Array, tables: SlotTables, config: Config, *, interpret: Any = False) -> Codes:
    """The slots' rows of x [T, H] in FP8, as `fp8_matmul.up_matmul` takes them. Each token is quantised once."""
    whole, padding = quantise_tokens(x, interpret=interpret), padded_rows(config.rows)
    codes = slot_rows(whole.codes, tables, config, interpret=interpret)
    if config.all_tokens:
        return Codes(codes, jnp.pad(whole.scale, ((0, 0), (0, padding - x.shape[0])))[None])
    token = tables.token.reshape(-1, config.rows)
    scale = whole.scale.T.at[token].get(mode="clip").swapaxes(1, 2)
    return Codes(codes, jnp.pad(scale, ((0, 0), (0, 0), (0, padding - config.rows))))


def _pad_tokens(x: jax.Array) -> jax.Array:
    """Pads x to whole granules of rows. Fewer rows than one stay: past the last one TMA reads zeros."""
    T = x.shape[0]
    return x if T < GRANULE or T % GRANULE == 0 else jnp.pad(x, ((0, -T % GRANULE), (0, 0)))


def combine(rows: ExpertRows, live: jax.Array, k: int, mine: jax.Array | None = None) -> jax.Array:
    """The weighted sum of each live token's rows, plus the addends: float32 [T, H].

    Args:
        mine: bool [T, k], of which experts this device has the rows; None for all.
    """
    T, flat = live.shape[0], rows.y.reshape(-1, rows.y.shape[-1])
    place_Tk = rows.place[:T, :k] if mine is None else jnp.where(mine, rows.place[:T, :k], 0)
    picked_TkH = flat.at[place_Tk].get(mode="promise_in_bounds").astype(jnp.float32)
    weighted_TkH = picked_TkH * rows.weights[:T, :k, None]
    if mine is not None:  # as below
        weighted_TkH = jnp.where(mine[:, :, None], weighted_TkH, 0.0)
    out = weighted_TkH.sum(axis=1)
    beside = rows.y[rows.y.shape[0] - rows.beside :]
    for part in (addend[i, :T] for addend in (beside, *rows.addends) for i in range(addend.shape[0])):
        out += part.astype(jnp.float32)
    # Not by a weight of 0: the place of a token that is not live is another's row or was never written, and may be NaN.
    return jnp.where(live[:, None], out, 0.0)
