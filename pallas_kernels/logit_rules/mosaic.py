"""The rules of requests for their logits as a Mosaic GPU kernel for Hopper (`logit_rules` in traces).

A thread block has a part of the columns of a window's rows. Rows that are not wanted are not written, and where none of a
window is they are not read, so a step pays for the rules that there are; counts are read only where something is penalised,
once for all rows of a window, and masks only where a row is constrained. The few columns that have a bias are worked out apart,
in XLA, and put in place: to ask of every column which of hundreds of biases is its own would take longer than all else.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load
from pallas_kernels.inline_code import elements, store, word
from pallas_kernels.logit_rules.reference import PROMPT_BIT, LogitRules, biased_columns, no_stop_yet
from pallas_kernels.own_buffer import own_buffer, own_rows
from pallas_kernels.sampling.parts import BLOCKS_PER_SM, LOAD_BYTES, WARPGROUP, Parts, multiprocessors

i32, f32 = jnp.int32, jnp.float32

# Rows of a window whose logits are on their way at once; registers hold them.
ROWS_AT_ONCE = 4


def unsupported_reason(logits_WnV: jax.Array, vocab: int) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    V = logits_WnV.shape[-1]
    if V % WARPGROUP or vocab % V:
        return f"it needs as many columns on each device, a multiple of {WARPGROUP}, not {V} of {vocab}"
    return hopper_unsupported_reason(*[logits_WnV.dtype] * (logits_WnV.dtype != f32))


def _vec_size(V: int, itemsize: int) -> int:
    """Columns that a thread loads at once: no vector may overlap another, because both would be written."""
    return next(size for size in (8, 4, 2, 1) if size * itemsize <= LOAD_BYTES and V % (WARPGROUP * size) == 0)


@functools.partial(jax.jit, static_argnames=("vocab", "interpret"))
def adjust(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    wanted_Wn: jax.Array,
    *,
    vocab: int,
    first_column: jax.Array | None = None,
    interpret: Any = False,
) -> jax.Array:
    """See api.py. Rows that are not wanted are anything."""
    W, n, V = logits_WnV.shape
    k, M = n - 1, rules.stop_ids.shape[1]
    vec_size = _vec_size(V, logits_WnV.dtype.itemsize)
    total = V // (WARPGROUP * vec_size)
    # No more than run in two turns of four a multiprocessor, which is what registers allow: a third turn would be nearly empty.
    blocks = min(max(BLOCKS_PER_SM * multiprocessors() // W, 1), total)
    parts = Parts(W, V, logits_WnV.dtype.itemsize, 1, vectors=-(-total // blocks), vec_size=vec_size)
    early_Wn = no_stop_yet(rules, positions_W, n, vocab)

    def logit_rules(
        logits, counts, stop_ids, masks, wanted, early, slots, repetition, frequency, presence, constrained, *refs,
    ):  # fmt: skip
        *others, out = refs
        drafts: Any = others.pop(0) if k else None
        first = others.pop(0) if first_column is not None else None
        window, part = lax.axis_index("window"), lax.axis_index("part")
        rows = [window * n + place for place in range(n)]

        def work():
            slot = slots[window]
            repeats, often, present = repetition[window], frequency[window], presence[window]
            penalises = (repeats != 1) | (often != 0) | (present != 0)
            # Read once: the compiler moves no load across a store.
            own_drafts = [drafts[window, d] for d in range(k)]
            num_stops = [jnp.where(early[row] != 0, i32(M), i32(0)) for row in rows]
            is_constrained = constrained[window] != 0

            def penalties(count):
                """By what a column's logit is multiplied or divided, and what is taken off then, and then."""
                output = count & (PROMPT_BIT - 1)
                was_output = output > 0
                factor = jnp.where(was_output | (count >= PROMPT_BIT), repeats, f32(1))
                return factor, often * output.astype(f32), jnp.where(was_output, present, f32(0))

            def penalised(x, factor, often, present):
                return jnp.where(x > 0, x / factor, x * factor) - often - present

            def stopless(i, ids, x):
                return jnp.where(ids == stop_ids[slot, i], f32(-jnp.inf), x)

            @pl.loop(0, lax.min(i32(parts.vectors), total - part * parts.vectors))
            def _(i):
                j = part * parts.vectors + i
                columns = parts.columns(j)
                first_id = parts.column(j) if first is None else parts.column(j) + first[0]
                ids = columns if first is None else columns + first[0]

                def with_draft(draft, count):
                    count = jnp.where(ids == draft, count + 1, count)
                    return count, *penalties(count)

                def read():
                    count = load(counts, (slot, pl.ds(parts.column(j), parts.width)), layout=parts.layout)
                    return count, *penalties(count)

                def nothing():
                    return parts.fill(0, i32), parts.fill(1.0), parts.fill(0.0), parts.fill(0.0)

                for start in range(0, n, ROWS_AT_ONCE):
                    places = range(start, min(start + ROWS_AT_ONCE, n))
                    values = {place: parts.load(logits, rows[place], j) for place in places}
                    if start == 0:
                        penalty = lax.cond(penalises, read, nothing)
                    for place in places:
                        if place:
                            draft = own_drafts[place - 1]
                            is_here = penalises & (draft >= first_id) & (draft < first_id + parts.width)
                            penalty = lax.cond(
                                is_here,
                                lambda count, *_, draft=draft: with_draft(draft, count),
                                lambda *same: same,
                                *penalty,
                            )

                        x, amounts = values[place], penalty[1:]
                        x = lax.cond(penalises, lambda x=x, amounts=amounts: penalised(x, *amounts), lambda x=x: x)
                        x = lax.fori_loop(i32(0), num_stops[place], lambda i, x: stopless(i, ids, x), x)

                        def masked(place=place, x=x):
                            allowed = _bits(masks.at[slot, place], ids, parts.layout, emulated=bool(interpret))
                            return jnp.where(allowed != 0, x, f32(-jnp.inf))

                        x = lax.cond(is_constrained, masked, lambda x=x: x)

                        # Only this is left out: the compiler would move the load here too, behind all that comes before.
                        @pl.when(is_wanted[place])
                        def _(place=place, x=x):
                            to = out.at[rows[place], pl.ds(parts.column(j), parts.width)]
                            store(to, x, parts.layout, emulated=bool(interpret))

        is_wanted = [wanted[row] != 0 for row in rows]
        pl.when(functools.reduce(jnp.logical_or, is_wanted))(work)

    small = own_buffer(
        (
            wanted_Wn.reshape(-1).astype(i32), early_Wn.reshape(-1).astype(i32), rules.slots, rules.repetition,
            rules.frequency, rules.presence, rules.constrained.astype(i32), *([drafts_Wk] if k else []),
            *([] if first_column is None else [first_column[None]]),
        )
    )  # fmt: skip
    large = rules.counts, rules.stop_ids, rules.masks
    adjusted = plgpu.kernel(
        logit_rules,
        out_type=jax.ShapeDtypeStruct((W * n, V), f32),
        grid=(W, parts.count),
        grid_names=("window", "part"),
        interpret=interpret,
        # Exact division, so that a penalty gives what the reference gives.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )(own_rows(logits_WnV.reshape(W * n, V)), *large, *small)
    columns_WB, values_WnB = biased_columns(logits_WnV, drafts_Wk, rules, positions_W, vocab, first_column)
    rows_R1, columns_RB = jnp.arange(W * n)[:, None], jnp.repeat(columns_WB, n, axis=0)
    return adjusted.at[rows_R1, columns_RB].set(values_WnB.reshape(W * n, -1), mode="drop").reshape(W, n, V)


def _bits(words: Any, ids: jax.Array, layout: Any, *, emulated: bool) -> jax.Array:
    """Each id's bit, int32 like `ids`, of words int32 [M] in global memory. A thread's neighbouring ids are in one word."""
    if emulated:
        return jnp.take(words[...], ids >> 5) >> (ids & 31) & 1

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), layout), return_type=plgpu.ShapeDtypeStruct(ids.shape, i32, layout=layout)
    )
    def read(_: Any, words: ir.Value, ids: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        def number(value: int) -> ir.Value:
            return mgpu.utils.c(value, word())

        start, found = mgpu.utils.memref_ptr(words), np.empty_like(ids.registers)
        for at, register in np.ndenumerate(ids.registers):
            each = elements(register)
            offset = arith.shli(arith.shrui(each[0], number(5)), number(2))
            bits = llvm.load(word(), mgpu.utils.getelementptr(start, [offset], word(8)))
            vector = llvm.mlir_undef(register.type)
            for i, one in enumerate(each):
                bit = arith.andi(arith.shrui(bits, arith.andi(one, number(31))), number(1))
                vector = llvm.insertelement(vector, bit, number(i))
            found[at] = vector
        return mgpu.FragmentedArray(_registers=found, _layout=ids.layout, _is_signed=True)

    return read(words, ids)
