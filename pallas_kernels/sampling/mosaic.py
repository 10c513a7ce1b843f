"""A sampler's passes over the vocabulary as Mosaic GPU kernels for Hopper.

XLA reads the logits once for each statistic, and draws noise for greedy rows too: at 512 rows of 163840 logits that is a
millisecond. Here a thread block reads a part of a row once. Every thread keeps the statistics of its own columns, threads
combine theirs once, at the end, and XLA joins the parts, which are a few numbers a row.

With `Tuning.bounded_draws` a draw looks at columns only where the random bits of their noise's block say that one of them may
win: see `noise`. Each warp decides for itself, from the best score that it has seen or that the row's likeliest column has.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.own_buffer import own_buffer, own_rows
from pallas_kernels.sampling.keys import LEAST_KEY, LOG2_E, float_of, ordered
from pallas_kernels.sampling.noise import QUAD, SPAN, VECTOR, Bar, BlockBits, bar_of, block_bits, block_of, depth
from pallas_kernels.sampling.parts import LOAD_BYTES, WARPGROUP, Parts, resident_parts, widened
from pallas_kernels.sampling.reference import Best, Drawn, LogitsStats, Residual
from pallas_kernels.sampling.warps import any_in_warp, largest_in_warp

# Vectors of the statistics whose loads are in flight together, and columns of each that a thread loads. With 8 columns its
# registers leave room for two blocks of a multiprocessor, with 4 for five.
AT_ONCE, VEC_SIZE = 4, 4
STATS_PER_SM = 5
# Below all logits, so that the first maximum is finite: the difference of two infinities is NaN.
LOWEST = -1e30
# Ids are kept as float32 beside the logits.
MOST_IDS = 2**24
# Vectors of a draw whose loads are in flight together: those that the blocks of noise of a span lie in.
DRAWN_AT_ONCE = SPAN // VECTOR
# Where something is left of a draft, mostly one of so many draws is wanted, that of a window: the GPU is to be full of these.
OF_WINDOW = 4
# The logarithm of a probability that is less, with the largest noise, may be one of few bits. Such scores stop no column.
LEAST_SURE = -64.0

i32, f32 = jnp.int32, jnp.float32


def unsupported_reason(logits: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    V = logits.shape[1]
    if V > MOST_IDS:
        return f"it supports up to {MOST_IDS} ids, not {V}"
    width = WARPGROUP * LOAD_BYTES // logits.dtype.itemsize
    if width > V or V * logits.dtype.itemsize % LOAD_BYTES:
        return f"it needs a vocabulary of at least {width} and rows of multiples of {LOAD_BYTES} bytes, not {V} ids"
    # Logits that a full bucket has masked are float32.
    return hopper_unsupported_reason(*[logits.dtype] * (logits.dtype != f32))


def _first_of_best(best: jax.Array, column: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest value and the lowest column with it."""
    top = best.max()
    return top, -jnp.where(best == top, -column, f32(-MOST_IDS)).max()


def _joined(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Of two parts of a row: the lowest column with the largest logit; this, and the sum of exponentials over it, plain and
    tempered; the least."""
    column, *sums, lowest = one
    other_column, *others, other_lowest = other
    later = (others[0] > sums[0]) | (others[0] == sums[0]) & (other_column < column)
    out = [jnp.where(later, other_column, column)]
    for top, total, other_top, other_total in zip(sums[::2], sums[1::2], others[::2], others[1::2], strict=True):
        highest = jnp.maximum(top, other_top)
        out += [highest, total * jnp.exp(top - highest) + other_total * jnp.exp(other_top - highest)]
    return *out, jnp.minimum(lowest, other_lowest)


@functools.partial(jax.jit, static_argnames=("interpret",))
def logits_stats(
    logits: jax.Array, temperature: jax.Array, cuts: jax.Array | None = None, *, interpret: Any = False
) -> LogitsStats:
    """See api.py."""
    R, V = logits.shape
    parts = resident_parts(R, V, logits.dtype.itemsize, AT_ONCE, VEC_SIZE, STATS_PER_SM)
    logits, (temperature, cuts) = own_rows(logits), own_buffer((temperature, cuts))

    def logits_stats(logits, temperature, *refs):
        cut_of, (column, top, total, tempered_total, lowest) = refs[:-5], refs[-5:]
        row, part = lax.axis_index("row"), lax.axis_index("part")
        inverse = LOG2_E / temperature[row]
        keeps_all = cut_of[0][row] == LEAST_KEY + 1 if cut_of else True

        def kept(*values):
            return [jnp.where(ordered(x) >= cut_of[0][row], x, f32(-jnp.inf)) for x in values]

        def work(tempered):
            def step(i, carry, masked):
                vector, top, total, tempered_total, lowest = carry
                js = [part * parts.vectors + i * AT_ONCE + n for n in range(AT_ONCE)]
                values = [parts.load(logits, row, j) for j in js]
                if cut_of:  # A row that keeps all needs no keys: a fifth of the instructions.
                    values = lax.cond(keeps_all, lambda *values: [*values], kept, *values)
                lowest = functools.reduce(jnp.minimum, values, lowest)
                if masked:  # In a vector that overlaps the one before, only new columns count.
                    values = [
                        jnp.where(parts.columns(j) >= j * parts.width, x, f32(-jnp.inf))
                        for j, x in zip(js, values, strict=True)
                    ]
                new_top = top
                for j, x in zip(js, values, strict=True):
                    better = x > new_top
                    new_top, vector = jnp.where(better, x, new_top), jnp.where(better, j.astype(f32), vector)
                total = total * jnp.exp2((top - new_top) * LOG2_E)
                if tempered:
                    tempered_total = tempered_total * jnp.exp2((top - new_top) * inverse)
                for x in values:
                    total = total + jnp.exp2((x - new_top) * LOG2_E)
                    if tempered:
                        tempered_total = tempered_total + jnp.exp2((x - new_top) * inverse)
                return vector, new_top, total, tempered_total, lowest

            zero = parts.fill(0.0)
            return parts.fold(part, AT_ONCE, step, (zero, parts.fill(LOWEST), zero, zero, parts.fill(jnp.inf)))

        def finish(mine, tempered):
            vector, top_x, total_x, tempered_x, lowest_x = mine
            start = jnp.minimum(vector * parts.width, f32(V - parts.width))
            highest, column[row, part] = _first_of_best(top_x, start + parts.columns(i32(0)).astype(f32))
            top[row, part] = highest
            joined = (total_x * jnp.exp2((top_x - highest) * LOG2_E)).sum()
            total[row, part] = joined
            if tempered:
                joined = (tempered_x * jnp.exp2((top_x - highest) * inverse)).sum()
            tempered_total[row, part] = joined
            lowest[row, part] = -(-lowest_x).max()

        for tempered in (False, True):
            read = (temperature[row] != 1.0) == tempered
            if cut_of:
                read = read & (cut_of[0][row] > LEAST_KEY)

            @pl.when(read)
            def _(tempered=tempered):
                finish(work(tempered), tempered)

    column, top, total, tempered_total, lowest = plgpu.kernel(
        logits_stats,
        out_type=[jax.ShapeDtypeStruct((R, parts.count), f32)] * 5,
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )(logits, temperature, *(() if cuts is None else (cuts,)))
    # One reduction, which is one kernel of XLA's, across threads where warps can be filled.
    found = column.astype(i32), top, total, top / temperature[:, None], tempered_total, lowest
    nothing = i32(MOST_IDS), f32(LOWEST), f32(0), f32(LOWEST), f32(0), f32(jnp.inf)
    padded = tuple(widened(array, value) for array, value in zip(found, nothing, strict=True))
    column, top, total, tempered_top, tempered_total, lowest = lax.reduce(padded, nothing, _joined, (1,))
    log_z = top + jnp.log(total)
    finite = jnp.isfinite(log_z) & (lowest > -jnp.inf)
    return LogitsStats(column, log_z, tempered_top + jnp.log(tempered_total), finite)


@functools.partial(jax.jit, static_argnames=("interpret",))
def gumbel_argmax(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None = None,
    cuts: jax.Array | None = None,
    *,
    interpret: Any = False,
) -> jax.Array:
    """See api.py. An excluded id is never drawn: it is masked, not subtracted in floating point."""
    drawn = _best_of_row(logits, rows, temperature, keys, wanted, likely, residual, cuts, None, interpret)
    if residual is None or drawn.left is None:
        return drawn.whole.ids
    return jnp.where(residual.dense & (drawn.left.scores > -jnp.inf), drawn.left.ids, drawn.whole.ids)


@functools.partial(jax.jit, static_argnames=("interpret",))
def gumbel_best(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None,
    cuts: jax.Array | None,
    first_column: jax.Array,
    *,
    interpret: Any = False,
) -> Drawn:
    """See api.py."""
    return _best_of_row(logits, rows, temperature, keys, wanted, likely, residual, cuts, first_column, interpret)


def _best_of_row(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None,
    cuts: jax.Array | None,
    first_column: jax.Array | None,
    interpret: Any,
) -> Drawn:
    """`gumbel_best`; with `first_column` None the columns are counted from 0."""
    R, V = temperature.shape[0], logits.shape[1]
    adjusts, bounded = residual is not None, tuning.current().bounded_draws
    parts = Parts(-(-R // OF_WINDOW) if adjusts else R, V, 4, DRAWN_AT_ONCE, vec_size=QUAD)
    outputs = 4 if adjusts else 2
    logits = own_rows(logits)
    rows, temperature, keys, likely, cuts = own_buffer((rows, temperature, keys, likely, cuts))
    extra: tuple[jax.Array, ...] = ()
    if residual is not None:
        small = residual.log_z, residual.excluded, residual.q_log_z, residual.q_rows
        log_z, excluded, q_log_z, q_rows = own_buffer(small)
        extra = Residual(log_z, excluded, residual.dense.astype(i32), residual.q_logits, q_log_z, q_rows)

    def gumbel_argmax(logits, temperature, keys, wanted, likely, *refs):
        given = Residual(*refs[: len(extra)]) if adjusts else None
        others, outs = list(refs[len(extra) : -outputs]), refs[-outputs:]
        cut_of = None if cuts is None else others.pop(0)
        row_of = None if rows is None else others.pop(0)
        first = None if first_column is None else others.pop(0)
        row, part = lax.axis_index("row"), lax.axis_index("part")
        warp: Any = {"layout": parts.layout, "emulated": bool(interpret)}

        def work(dense):
            """Best values and their columns: of p and, if `dense`, of max(0, p - q)."""
            source = row if row_of is None else row_of[row]
            divisor, key = temperature[row], (keys[row, 0], keys[row, 1])
            log_z = given.log_z[row] if given and dense else None
            q_log_z = given.q_log_z[row] if given and dense else None
            cut = None if cut_of is None else cut_of[source]

            def ids_of(columns):
                return columns if first is None else columns + first[0]

            def scores_of(x, columns, q_logits, bits):
                tempered = x / divisor
                if cut is not None:
                    tempered = jnp.where(ordered(x) >= cut, tempered, -jnp.inf)
                noise = bits.noise_of(key, ids_of(columns))
                if given and not dense:
                    return [jnp.where(columns == given.excluded[row], -jnp.inf, tempered + noise)]
                if given and dense:
                    return [tempered + noise, log_left(tempered, q_logits) + noise]
                return [tempered + noise]

            def log_left(tempered, q_logits):
                """Of p - q."""
                return jnp.log(jnp.maximum(jnp.exp(tempered - log_z) - jnp.exp(q_logits / divisor - q_log_z), 0.0))

            def bar(score):
                """Where p - q is above 0 somewhere, that decides alone; and it is no greater than p."""
                if dense:
                    score = jnp.where(score > LEAST_SURE, score, -jnp.inf)
                return bar_of(score, divisor, log_z)

            def bits_of(columns):
                return block_bits(key, block_of(ids_of(columns)))

            def likely_score():
                column = lax.min(lax.max(likely[source], i32(0)), i32(V - 1))
                q_logits = given.q_logits[given.q_rows[row], column].astype(f32) if given and dense else None
                *_, score = scores_of(logits[source, column].astype(f32), column, q_logits, bits_of(column))
                return jnp.where(column == likely[source], score, -jnp.inf)

            def look(j, bits, found):
                columns = parts.columns(j)
                q_logits = parts.load(given.q_logits, given.q_rows[row], j) if given and dense else None
                scores = scores_of(parts.load(logits, source, j), columns, q_logits, bits)
                kept = []
                for (best, column), score in zip(found, scores, strict=True):
                    better = (columns >= j * parts.width) & (score > best)
                    kept.append((jnp.where(better, score, best), jnp.where(better, columns.astype(f32), column)))
                return tuple(kept)

            nothing = ((parts.fill(-jnp.inf), parts.fill(0.0)),) * (2 if dense else 1)
            first_vector = part * parts.vectors
            if not bounded:

                def every(j, found):
                    return look(j, bits_of(parts.columns(j)), found)

                return lax.fori_loop(first_vector, first_vector + parts.vectors, every, nothing)

            def kept_only(x):
                return x if cut is None else jnp.where(ordered(x) >= cut, x, f32(-jnp.inf))

            # Whole spans, each block of which one thread has; the vectors after them are looked at one by one.
            spans = lax.div(i32(V // SPAN * DRAWN_AT_ONCE) - first_vector, i32(DRAWN_AT_ONCE))
            spans = lax.max(lax.min(spans, i32(parts.vectors // DRAWN_AT_ONCE)), i32(0))
            if first is not None:
                spans = jnp.where(first[0] & (SPAN - 1) == 0, spans, 0)
            lane = plgpu.broadcasted_iota(i32, (parts.width,), 0, layout=parts.layout)

            def span_at(i):
                """Its vectors' logits, and its blocks' bits."""
                j = first_vector + i * DRAWN_AT_ONCE
                xs = [kept_only(parts.load(logits, source, j + n)) for n in range(DRAWN_AT_ONCE)]
                span = ids_of(j * parts.width) >> SPAN.bit_length() - 1
                return j, xs, block_bits(key, span * (VECTOR // QUAD) + (lane >> 2))

            def with_most_noise(i, carry):
                """Of each block the id with the most noise, and of these, of each thread's, about the best."""
                most, x, of_least = carry
                j, xs, bits = span_at(i)
                new = parts.fill(-jnp.inf)
                for n, each in enumerate(xs):
                    chosen = bits.have(n * QUAD + (lane & (QUAD - 1)))
                    if given:
                        chosen = chosen & (parts.columns(j + n) != given.excluded[row])
                    new = jnp.where(chosen, each, new)
                about = new * slope - depth(bits.of_least)
                better = about > most
                return tuple(jnp.where(better, *pair) for pair in ((about, most), (new, x), (bits.of_least, of_least)))

            def most_left(i, best):
                """The best score of p - q, of the ids with the most noise of their blocks."""
                assert given is not None
                j, xs, bits = span_at(i)
                x, q_logits = parts.fill(-jnp.inf), parts.fill(0.0)
                for n, each in enumerate(xs):
                    chosen = bits.have(n * QUAD + (lane & (QUAD - 1)))
                    own_q = parts.load(given.q_logits, given.q_rows[row], j + n)
                    x, q_logits = jnp.where(chosen, each, x), jnp.where(chosen, own_q, q_logits)
                return jnp.maximum(best, log_left(x / divisor, q_logits) + bits.noise())

            slope = bar(f32(-jnp.inf)).slope
            if dense:
                found = lax.fori_loop(i32(0), spans, most_left, parts.fill(-jnp.inf))
                least = lax.max(likely_score(), found.max())
            else:
                none = (parts.fill(-jnp.inf), parts.fill(-jnp.inf), parts.fill(0, i32))
                _, x, of_least = lax.fori_loop(i32(0), spans, with_most_noise, none)
                least = (x / divisor + BlockBits(of_least, of_least).noise()).max()

            def raised(found):
                best, _ = found[-1]
                return bar(lax.max(least, float_of(largest_in_warp(ordered(best), **warp)))).offset

            def may_win(x, bits, offset):
                """Any of columns with logits x, or of those of which these are the largest, with this block's noise."""
                return any_in_warp(jnp.logical_not(Bar(slope, offset).at(x) < depth(bits.of_least)), **warp)

            def group(i, carry):
                found, offset = carry
                j, xs, bits = span_at(i)

                def look_at_all():
                    # Hardly ever, so that it may load them again.
                    new = lax.fori_loop(j, j + DRAWN_AT_ONCE, lambda j, found: look(j, bits, found), found)
                    return new, raised(new)

                return lax.cond(may_win(functools.reduce(jnp.maximum, xs), bits, offset), look_at_all, lambda: carry)

            def vector(i, carry):
                found, offset = carry
                j = first_vector + i
                bits = bits_of(parts.columns(j))

                def look_at_it():
                    new = look(j, bits, found)
                    return new, raised(new)

                return lax.cond(
                    may_win(kept_only(parts.load(logits, source, j)), bits, offset), look_at_it, lambda: carry
                )

            carry = lax.fori_loop(i32(0), spans, group, (nothing, bar(least).offset))
            return lax.fori_loop(spans * DRAWN_AT_ONCE, i32(parts.vectors), vector, carry)[0]

        def finish(found):
            for i, (best, column) in enumerate(found):
                outs[2 * i][row, part], outs[2 * i + 1][row, part] = _first_of_best(best, column)

        if given is None:
            pl.when(wanted[row] != 0)(lambda: finish(work(False)))
            return
        is_dense = given.dense[row] != 0
        pl.when((wanted[row] != 0) & is_dense)(lambda: finish(work(True)))
        pl.when((wanted[row] != 0) & jnp.logical_not(is_dense))(lambda: finish(work(False)))

    found = plgpu.kernel(
        gumbel_argmax,
        out_type=[jax.ShapeDtypeStruct((R, parts.count), f32)] * outputs,
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        # Exact logarithms: approximate ones are far off for large noise, which decides the draw.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )(
        logits,
        temperature,
        lax.bitcast_convert_type(keys, i32),
        wanted.astype(i32),
        likely,
        *extra,
        *(() if cuts is None else (cuts,)),
        *(() if rows is None else (rows,)),
        *(() if first_column is None else (first_column[None],)),
    )

    def joined(best: jax.Array, column: jax.Array) -> Best:
        best, column = widened(best, f32(-jnp.inf)), widened(column, f32(0))
        winner = jnp.argmax(best, axis=1)[:, None]
        # Rows that do not draw are uninitialised.
        ids = jnp.where(wanted, jnp.take_along_axis(column, winner, axis=1)[:, 0], 0.0)
        return Best(ids.astype(i32), best.max(axis=1))

    return Drawn(joined(*found[:2]), joined(*found[2:]) if adjusts else None)
