"""The least logit that min_p, top_k and top_p keep, as one Mosaic GPU kernel for Hopper.

A row is searched in passes over its logits: each adds up what lies at or above eight thresholds within the bracket where the
answer is, and the sums say where the next eight are worth having. A few passes are enough where sums fall smoothly, and no
row needs more than `MOST_PASSES`. One kernel makes all of them: the blocks of a row hand each other their sums through global
memory and meet there after each pass, so a row costs the passes that it needs, and a row without a rule none. Blocks of few
rows at a time are on the device, and what they read stays in its L2 cache.

Blocks wait for the other blocks of their row only, and start in order of their rows: those of a row that waits for its last
blocks keep only later ones out.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.meet import meet
from pallas_kernels.sampling.keys import LEAST_KEY, float_of, ordered, probability, weight
from pallas_kernels.sampling.parts import WARPGROUP, Parts, multiprocessors
from pallas_kernels.sampling.reference import Bounds, border_of

THRESHOLDS = 8
# Vectors of four logits a thread whose loads are in flight together.
AT_ONCE = 4
# Blocks that fit onto a multiprocessor together: all of up to 528 rows start at once on an H200.
BLOCKS_PER_SM = 4
# Where sums change is not known yet: so many temperatures below the largest logit.
FIRST_DISTANCES = (0.5, 1.5, 3.0, 5.0, 8.0, 12.0, 18.0)
# Later it is known about: these parts of a bracket around the place where a straight line through its ends says.
AROUND = (-0.2, -1 / 24, -1 / 96, -1 / 512, 1 / 512, 1 / 96, 1 / 24, 0.2)
# More than any search takes: every second pass leaves about a ninth of a bracket of at most 2**32 keys.
MOST_PASSES = 32
LEAST, MOST = -0x7F800001, 0x7F800000  # keys of the infinities
HUGE = 1e38

i32, f32 = jnp.int32, jnp.float32


def row_parts(R: int, V: int, itemsize: int) -> Parts:
    """How rows are cut: so that all blocks fit onto the device at once, if rows are few enough."""
    vec_size = 4
    groups = -(-V // (WARPGROUP * vec_size * AT_ONCE))
    blocks = min(max(1, BLOCKS_PER_SM * multiprocessors() // R), groups, WARPGROUP)
    return Parts(R, V, itemsize, AT_ONCE, vectors=-(-groups // blocks) * AT_ONCE, vec_size=vec_size)


@functools.partial(jax.jit, static_argnames=("interpret",))
def cutoffs(logits: jax.Array, bounds: Bounds, *, interpret: Any = False) -> jax.Array:
    """See api.py. The interpreter gives each row one block, because blocks cannot wait for each other there."""
    R, V = logits.shape
    parts = row_parts(R, V, logits.dtype.itemsize)
    if interpret:
        parts = Parts(R, V, logits.dtype.itemsize, AT_ONCE, vectors=-(-V // (AT_ONCE * 512)) * AT_ONCE, vec_size=4)

    def cutoffs(logits, *refs):
        given, (met, cuts, exchange) = Bounds(*refs[:6]), refs[6:]
        row, part = lax.axis_index("row"), lax.axis_index("part")
        bounds = Bounds(*(ref[row] for ref in given))
        searches = (bounds.top_k > 0) | (bounds.top_p < 1)

        def tally(start, end, thresholds, round_, weighs):
            found = _tally(parts, logits, row, part, bounds, start, end, thresholds, weighs)
            return found if parts.count == 1 else _joined(found, exchange, met, row, part, round_, parts.count)

        def write(cut):
            @pl.when(part == 0)
            def _():
                cuts[row] = cut

        # All blocks of a row do the same arithmetic, so that none has to tell the others.
        border = ordered(border_of(bounds, bounds.highest / bounds.temperature))
        least = _least_reaching(
            lambda x: ordered(x / bounds.temperature) >= border,
            i32(LEAST),
            jnp.where(border > LEAST, i32(MOST), i32(LEAST)),
        )

        @pl.when(searches)
        def _():
            least_k, rounds = _search(tally, bounds, least, i32(0), weighs=False)
            write(_search(tally, bounds, least_k, rounds, weighs=True)[0])

        @pl.when(jnp.logical_not(searches))
        def _():
            write(least)

    # Counters that blocks meet at, one for each pass, must be 0 at the start.
    _, cuts, _ = run_in_place(
        cutoffs,
        (logits, *bounds),
        [jnp.zeros((R, 2 * MOST_PASSES), i32)],
        [jax.ShapeDtypeStruct((R,), i32), jax.ShapeDtypeStruct((R, 2, THRESHOLDS + 2, WARPGROUP), i32)],
        scratch_types={},
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )
    return cuts


def _search(tally: Any, bounds: Bounds, first: Any, rounds: Any, *, weighs: bool) -> tuple[Any, Any]:
    """The least key that top_p (if `weighs`) or top_k keeps of those from `first` on, and the rounds so far.

    The bracket [start, end) holds the last key that is kept: what lies at or above `start` is enough, above `end` it is not.
    """
    wanted = bounds.top_p < 1 if weighs else bounds.top_k > 0

    def step(state):
        i, start, end, above, below, target = state
        thresholds = _thresholds(i, start, end, above, below, target, bounds)
        found = tally(start, end, thresholds, rounds + i, weighs)
        low, high = start + i32(LEAST_KEY) - 1 - found[-2], end + i32(LEAST_KEY) + found[-1]
        sums = [_unsigned(each) for each in found[:-2]]
        if weighs:  # The first threshold is the first key.
            target = jnp.where(i == 0, bounds.top_p * sums[0], target)
        for threshold, value in zip(thresholds, sums, strict=True):
            enough = value >= target
            above = jnp.where(enough & (threshold >= start), value, above)
            below = jnp.where(enough | (threshold > end), below, value)
            start = jnp.where(enough, lax.max(start, threshold), start)
            end = jnp.where(enough, end, lax.min(end, threshold))
        # No key lies between an end of the bracket and the key found next to it.
        end = lax.max(end, start + 1)
        start = lax.max(start, lax.min(low, end - 1))
        end = lax.max(lax.min(high, end - 1), start) + 1
        return i + 1, start, end, above, below, target

    def unfinished(state):
        _, start, end, *_ = state
        return end != start + 1

    count = bounds.top_k.astype(f32)  # exact, as are counts of at most 2**24
    end = jnp.where(wanted, i32(MOST + 1), first + 1)
    state = (i32(0), first, end, f32(0), f32(0), f32(0) if weighs else count)
    passes, found, *_ = lax.while_loop(unfinished, step, state)

    def tempered(x: jax.Array) -> jax.Array:
        return ordered(x / bounds.temperature)

    def relative(x: jax.Array) -> jax.Array:
        return probability(x, bounds.highest, bounds.temperature)

    # Logits that differ may have one probability, or be one after the temperature.
    same = relative if weighs else tempered
    of_found = same(float_of(found))
    least = _least_reaching(lambda x: same(x) >= of_found, jnp.where(wanted, first, found), found)
    return least, rounds + passes


def _thresholds(i: Any, start: Any, end: Any, above: Any, below: Any, target: Any, bounds: Bounds) -> list[Any]:
    """Where the i-th pass cuts the bracket [start, end), of more than one key, whose ends have sums `above` and `below`.

    The first pass also takes its start, and looks below the largest logit; then passes that cut where the sums say, and
    passes that cut the keys evenly, take turns.
    """
    low, high = (lax.min(lax.max(float_of(key), f32(-HUGE)), f32(HUGE)) for key in (start, end - 1))
    place = (above - target) / (above - below)
    # Of up to 2**32 keys.
    ninth = lax.max(lax.div(lax.shift_right_logical(end - start, i32(1)), i32(9)) * 2, i32(1))
    thresholds = []
    for j in range(THRESHOLDS):
        distant = start
        if j:
            distant = _within(ordered(bounds.highest - bounds.temperature * FIRST_DISTANCES[j - 1]), start, end)
        near = _within(ordered(low + (high - low) * (place + AROUND[j])), start, end)
        even = _within(start + (j + 1) * ninth, start, end)
        thresholds.append(jnp.where(i == 0, distant, jnp.where((i & 1) == 1, near, even)))
    return thresholds


def _within(key: jax.Array, start: jax.Array, end: jax.Array) -> jax.Array:
    """In a bracket, but not at its start."""
    return lax.min(lax.max(key, start + 1), end - 1)


def _unsigned(total: jax.Array) -> jax.Array:
    """float32 of 32 bits without a sign, rounded once."""
    halved = (lax.shift_right_logical(total, i32(1)) | (total & 1)).astype(f32) * 2
    return jnp.where(total < 0, halved, total.astype(f32))


def _least_reaching(reaches: Any, low: jax.Array, high: jax.Array) -> jax.Array:
    """The least key from `low` to `high` whose float reaches something, as `high` does and all above the least."""

    def step(state):
        low, high = state
        middle = low + lax.shift_right_logical(high - low, i32(1))
        enough = reaches(float_of(middle))
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    return lax.while_loop(lambda state: state[0] != state[1], step, (low, high))[1]


def _tally(
    parts: Parts,
    logits: Any,
    row: Any,
    part: Any,
    bounds: Bounds,
    start: jax.Array,
    end: jax.Array,
    thresholds: list[Any],
    weighs: bool,
) -> list[Any]:
    """Of a part of a row: how many logits, or what weight, lie at or above each threshold, and which keys are in a bracket.

    Sums are int32 without a sign. Then the distance of the least key from `start` on, and that of the greatest below `end`,
    each so that the largest is the nearest, wherever keys wrap round.
    """
    before, after = start + i32(LEAST_KEY) - 1, end + i32(LEAST_KEY)
    nothing = parts.fill(0, i32)

    def step(i, carry, masked):
        totals, low, high = carry
        js = [part * parts.vectors + i * AT_ONCE + n for n in range(AT_ONCE)]
        values = [parts.load(logits, row, j) for j in js]
        for j, x in zip(js, values, strict=True):
            keys = ordered(x)
            each = parts.fill(1, i32)
            if weighs:
                each = weight(probability(x, bounds.highest, bounds.temperature), bounds.scale)
            if masked:  # In a vector that overlaps the one before, only new columns count.
                each = jnp.where(parts.columns(j) >= j * parts.width, each, nothing)
            totals = tuple(
                total + jnp.where(keys >= threshold, each, nothing)
                for total, threshold in zip(totals, thresholds, strict=True)
            )
            low, high = jnp.maximum(low, before - keys), jnp.maximum(high, keys - after)
        return totals, low, high

    none = parts.fill(LEAST_KEY, i32)
    carry = ((nothing,) * THRESHOLDS, none, none)
    groups = parts.vectors // AT_ONCE
    whole = lax.div(i32(parts.V // parts.width) - part * parts.vectors, i32(AT_ONCE))
    whole = lax.max(lax.min(whole, i32(groups)), i32(0))
    carry = lax.fori_loop(i32(0), whole, functools.partial(step, masked=False), carry)
    totals, low, high = lax.fori_loop(whole, i32(groups), functools.partial(step, masked=True), carry)
    return [*(total.sum() for total in totals), low.max(), high.max()]


def _joined(found: list[Any], exchange: Any, met: Any, row: Any, part: Any, round_: Any, count: int) -> list[Any]:
    """What the blocks of a row found together.

    A block writes where the others read two rounds before: in between it has met them, so they have read.
    """
    side = round_ & 1
    for i, each in enumerate(found):
        exchange[row, side, i, part] = each
    meet(met.at[row, round_], count)
    layout = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
    there = plgpu.broadcasted_iota(i32, (WARPGROUP,), 0, layout=layout) < count

    def read(i, nothing):
        values = load(exchange, (row, side, i, pl.ds(0, WARPGROUP)), layout=layout)
        return jnp.where(there, values, plgpu.layout_cast(jnp.full((WARPGROUP,), nothing, i32), layout))

    sums = [read(i, 0).sum() for i in range(THRESHOLDS)]
    return [*sums, *(read(i, LEAST_KEY).max() for i in (THRESHOLDS, THRESHOLDS + 1))]
