"""The least logit that min_p, top_k and top_p keep, as one Mosaic GPU kernel for Hopper.

A row's logits are read once, if all goes well: a small sample of them says between which two logits the answer lies, with a
margin; a pass adds up what lies above both and puts what lies between into lists in shared memory; and if the sums agree, the
answer is searched there. Else it is searched in passes over all logits. A search adds up what lies at or above eight
thresholds within the bracket where the answer is, and the sums say where the next eight are worth having. The sample decides
how long a search takes, never what it finds: all sums that decide are whole and exact.

The blocks of a row hand each other their sums through global memory and meet there after each pass. Blocks wait for the
other blocks of their row only, and start in order of their rows: those of a row that waits for its last blocks keep only
later ones out.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.meet import meet
from pallas_kernels.own_buffer import own_buffer, own_rows
from pallas_kernels.sampling import lists
from pallas_kernels.sampling.keys import LEAST_KEY, float_of, ordered, probability, weight
from pallas_kernels.sampling.parts import WARPGROUP, Parts, resident_parts
from pallas_kernels.sampling.reference import Bounds, border_of

THRESHOLDS = 8
# Vectors of two logits a thread whose loads are in flight together; twice as many in the pass that fills the lists. Each
# logit of a vector has sums of its own: with vectors of four they take 147 registers, and a fourth block does not fit.
AT_ONCE = 8
VEC_SIZE = 2
# Rows of lists and of samples that are read together.
TOGETHER = 4
# Where sums change is not known yet: so many temperatures below the largest logit.
FIRST_DISTANCES = (0.5, 1.5, 3.0, 5.0, 8.0, 12.0, 18.0)
# Later it is known about: these parts of a bracket around the place where a straight line through its ends says.
AROUND = (-0.2, -1 / 24, -1 / 96, -1 / 512, 1 / 512, 1 / 96, 1 / 24, 0.2)
# More than any search takes: every second pass leaves about a ninth of a bracket of at most 2**32 keys.
MOST_PASSES = 32
# Of all searches of a row: two, and the passes that fill the lists.
MOST_ROUNDS = 2 * (2 * MOST_PASSES + 1)
LEAST, MOST = -0x7F800001, 0x7F800000  # keys of the infinities
HUGE = 1e38
# A thread that has no more logits than this keeps them all, without a sample.
UNSAMPLED = 32
# So many ids are kept without a sample.
FEW = 1024
# A sample has so many logits a thread where a row has one block, and its lists little room; fewer where it has more.
SAMPLED_ROWS = 96
# Passes over a sample: by distance, then in equal parts.
SAMPLE_PASSES = 4
# The sample's margin, in standard deviations.
MARGIN = 2.5

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class _Block:
    """A block of the kernel: its part of a row, the row's rules, and what the blocks of the row share.

    Attributes:
        buffer: see `lists`.
        exchange, met: what blocks hand each other, and the counters where they meet.
        emulated: by the interpreter.
    """

    parts: Parts
    logits: Any
    row: Any
    part: Any
    bounds: Bounds
    buffer: Any
    exchange: Any
    met: Any
    emulated: bool

    def weights(self, keys: jax.Array, weighs: bool) -> jax.Array:
        """What each key counts."""
        if not weighs:
            return jnp.ones_like(keys)
        return weight(probability(float_of(keys), self.bounds.highest, self.bounds.temperature), self.bounds.scale)


@functools.partial(jax.jit, static_argnames=("interpret",))
def cutoffs(logits: jax.Array, bounds: Bounds, *, interpret: Any = False) -> jax.Array:
    """See api.py. The interpreter gives each row one block, because blocks cannot wait for each other there."""
    R, V = logits.shape
    itemsize, group = logits.dtype.itemsize, AT_ONCE * VEC_SIZE * WARPGROUP
    parts = resident_parts(R, V, itemsize, AT_ONCE, VEC_SIZE)
    if interpret:
        parts = Parts(R, V, itemsize, AT_ONCE, vectors=-(-V // group) * AT_ONCE, vec_size=VEC_SIZE)

    def cutoffs(logits, *refs, buffer):
        given, (met, cuts, exchange) = refs[: len(bounds)], refs[len(bounds) :]
        row, part = lax.axis_index("row"), lax.axis_index("part")
        rules = Bounds(*(ref[row] for ref in given))
        block = _Block(parts, logits, row, part, rules, buffer, exchange, met, bool(interpret))
        searches = (rules.top_k > 0) | (rules.top_p < 1)

        def write(cut):
            @pl.when(part == 0)
            def _():
                cuts[row] = cut

        # All blocks of a row do the same arithmetic, so that none has to tell the others.
        border = ordered(border_of(rules, rules.highest / rules.temperature))
        least = _least_reaching(
            lambda x: ordered(x / rules.temperature) >= border,
            i32(LEAST),
            jnp.where(border > LEAST, i32(MOST), i32(LEAST)),
        )

        @pl.when(searches)
        def _():
            nothing = least, i32(0)
            found = lax.cond(rules.top_k > 0, lambda: _search(block, *nothing, weighs=False), lambda: nothing)
            found = lax.cond(rules.top_p < 1, lambda: _search(block, *found, weighs=True), lambda: found)
            write(found[0])

        @pl.when(jnp.logical_not(searches))
        def _():
            write(least)

    # Counters that blocks meet at, one for each pass, must be 0 at the start.
    _, cuts, _ = run_in_place(
        cutoffs,
        (own_rows(logits), *own_buffer(bounds)),
        [jnp.zeros((R, MOST_ROUNDS), i32)],
        [jax.ShapeDtypeStruct((R,), i32), jax.ShapeDtypeStruct((R, 2, THRESHOLDS + 2, WARPGROUP), i32)],
        scratch_types={"buffer": lists.BUFFER},
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )
    return cuts


def _search(block: _Block, first: Any, rounds: Any, *, weighs: bool) -> tuple[Any, Any]:
    """The least key that top_p (if `weighs`) or top_k keeps of those from `first` on, and the rounds so far."""
    bounds = block.bounds
    low, high, narrow = _guess(block, first, weighs)
    total, at_low, beyond, lengths, longest = _fill(block, first, low, high, rounds, weighs)
    rounds = rounds + 1
    target, above, below = bounds.top_p * total, at_low, _unsigned(beyond)
    if not weighs:
        target = bounds.top_k.astype(f32)  # exact, as are counts of at most 2**24

    # The bracket [start, end) holds the last key that is kept: what lies at or above `start` is enough, above `end` it is not.
    higher, lower = below >= target, (above < target) & (low > first)
    start = jnp.where(higher, high, jnp.where(lower, first, low))
    end = jnp.where(higher, i32(MOST + 1), jnp.where(lower, low, high))
    listed = jnp.logical_not(higher | lower) & (longest < lists.LIST_LENGTH)
    above, below = (
        jnp.where(higher, below, jnp.where(lower, total, above)),
        jnp.where(higher, f32(0), jnp.where(lower, above, below)),
    )

    def step(state, tally):
        i, rounds, start, end, above, below = state
        thresholds = _thresholds(i, start, end, above, below, target, bounds)
        found, nearest = tally(start, end, thresholds, rounds)
        sums = [_unsigned(each) for each in found]
        for threshold, value in zip(thresholds, sums, strict=True):
            enough = value >= target
            above = jnp.where(enough & (threshold >= start), value, above)
            below = jnp.where(enough | (threshold > end), below, value)
            start = jnp.where(enough, lax.max(start, threshold), start)
            end = jnp.where(enough, end, lax.min(end, threshold))
        # No key lies between an end of the bracket and the key found next to it.
        before, after = (state[2] + i32(LEAST_KEY) - 1, state[3] + i32(LEAST_KEY))
        end = lax.max(end, start + 1)
        start = lax.max(start, lax.min(before - nearest[0], end - 1))
        end = lax.max(lax.min(after + nearest[1], end - 1), start) + 1
        return i + 1, rounds + 1, start, end, above, below

    def of_lists(start, end, thresholds, round_):
        sums, nearest = _tally_lists(block, lengths, longest, start, end, thresholds, weighs)
        sums, nearest = _joined(block, sums, nearest, round_)
        return [beyond + each for each in sums], nearest

    def of_logits(start, end, thresholds, round_):
        return _joined(block, *_tally(block, start, end, thresholds, weighs), round_)

    def unfinished(state):
        return state[3] != state[2] + 1

    # A narrow bracket is nearly straight.
    state = (jnp.where(narrow, i32(1), i32(0)), rounds, start, end, above, below)
    state = lax.while_loop(lambda state: listed & unfinished(state), functools.partial(step, tally=of_lists), state)
    state = lax.while_loop(unfinished, functools.partial(step, tally=of_logits), state)
    _, rounds, found, *_ = state

    def tempered(x: jax.Array) -> jax.Array:
        return ordered(x / bounds.temperature)

    def relative(x: jax.Array) -> jax.Array:
        return probability(x, bounds.highest, bounds.temperature)

    # Logits that differ may have one probability, or be one after the temperature.
    same = relative if weighs else tempered
    of_found = same(float_of(found))
    return _least_reaching(lambda x: same(x) >= of_found, first, found), rounds


def _guess(block: _Block, first: Any, weighs: bool) -> tuple[Any, Any, Any]:
    """Two keys that the last kept one lies between, very likely: [low, high). And whether they are near each other.

    All blocks of a row look at the same sample of it. Of top_p it is used for what is dropped, of which none weighs much,
    not for what is kept, which may be one id that the sample lacks.
    """
    parts, bounds = block.parts, block.bounds
    widest = first, i32(MOST + 1)
    if parts.vectors * parts.vec_size <= UNSAMPLED:
        return *widest, jnp.bool_(False)
    rows = SAMPLED_ROWS // min(parts.count, 4)
    share = rows * WARPGROUP / parts.V
    if weighs:  # Not of all ids but those from `first` on: where top_k leaves few, they are kept without a look.
        expected = (1 - bounds.top_p) * bounds.total * share
        sampled = (bounds.top_k == 0) | (bounds.top_k > FEW)
    else:
        expected = bounds.top_k.astype(f32) * share
        sampled = jnp.bool_(True)

    def take(i, nothing):
        columns = [(i * TOGETHER + n) * ((parts.V - WARPGROUP) // (rows - 1)) for n in range(TOGETHER)]
        found = [load(block.logits, (block.row, pl.ds(c, WARPGROUP)), layout=lists.LANES) for c in columns]
        for n, x in enumerate(found):
            block.buffer[i * TOGETHER + n] = ordered(x.astype(f32))
        return nothing

    lax.fori_loop(i32(0), jnp.where(sampled, i32(rows // TOGETHER), i32(0)), take, i32(0))

    def look(i, state):
        low, high, at_first = state
        lowest = lax.max(float_of(low), bounds.highest - 64 * bounds.temperature)
        width = lax.min(float_of(high - 1), bounds.highest) - lowest
        thresholds = [jnp.where(i == 0, first, low + 1)]
        for j in range(1, THRESHOLDS):
            distant = bounds.highest - bounds.temperature * FIRST_DISTANCES[j - 1]
            threshold = ordered(jnp.where(i == 0, distant, lowest + width * (j / THRESHOLDS)))
            thresholds.append(_within(threshold, low, high))
        lengths = lists.lanes(rows)
        sums, _ = _tally_lists(block, lengths, i32(rows), low, high, thresholds, weighs)
        at_first = jnp.where(i == 0, sums[0], at_first)
        for threshold, value in zip(thresholds, sums, strict=True):
            if weighs:
                largest = lax.min(probability(float_of(threshold), bounds.highest, bounds.temperature), f32(1))
                more = expected - _unsigned(at_first - value)
                variance = largest * bounds.scale * expected
            else:
                more = _unsigned(value) - expected
                variance = expected + 1
            sure = more * more >= MARGIN**2 * variance
            low = jnp.where(sure & (more > 0), lax.max(low, threshold), low)
            high = jnp.where(sure & (more < 0), lax.min(high, threshold), high)
        return low, lax.max(high, low + 1), at_first

    passes = jnp.where(sampled, i32(SAMPLE_PASSES), i32(0))
    low, high, _ = lax.fori_loop(i32(0), passes, look, (*widest, i32(0)))
    return low, high, (low > first) & (high <= MOST)


def _fill(block: _Block, first: Any, low: Any, high: Any, round_: Any, weighs: bool) -> tuple[Any, ...]:
    """Puts the keys of this block's part in [low, high) into its lists.

    Returns:
        Of the whole row the sums from `first`, `low` and `high` on, float32, float32 and int32; the
        lengths of this block's lists, int32 [WARPGROUP], and of the row's longest one.
    """
    parts = block.parts
    at_once = AT_ONCE if parts.vectors % (2 * AT_ONCE) else 2 * AT_ONCE
    nothing = parts.fill(0, i32)
    bars = (first, low, high)

    def step(i, carry, masked):
        *totals, lengths = carry
        js = [block.part * parts.vectors + i * at_once + n for n in range(at_once)]
        values = [parts.load(block.logits, block.row, j) for j in js]
        for j, x in zip(js, values, strict=True):
            keys = ordered(x)
            if masked:
                keys = parts.new_only(keys, j)
            each = block.weights(keys, weighs)
            totals = [total + jnp.where(keys >= bar, each, nothing) for total, bar in zip(totals, bars, strict=True)]
            lengths = lists.append(block.buffer, lengths, keys, low, high, layout=parts.layout, emulated=block.emulated)
        return *totals, lengths

    carry = parts.fold(block.part, at_once, step, (nothing, nothing, nothing, lists.lanes(0)))
    *totals, lengths = carry
    (total, at_low, beyond), (longest, _) = _joined(
        block, [each.sum() for each in totals], [lengths.max(), i32(0)], round_
    )
    return _unsigned(total), _unsigned(at_low), beyond, lengths, longest


def _thresholds(i: Any, start: Any, end: Any, above: Any, below: Any, target: Any, bounds: Bounds) -> list[Any]:
    """Where the i-th pass cuts the bracket [start, end), of more than one key, whose ends have sums `above` and `below`.

    The first pass looks below the largest logit; then passes that cut where the sums say, and passes that cut the keys evenly,
    take turns.
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


def _add(carry: Any, keys: jax.Array, each: jax.Array, thresholds: list[Any], start: Any, end: Any) -> Any:
    """Sums at or above each threshold; then the distance of the least key from `start` on, and that of the greatest below
    `end`, each so that the largest is the nearest, wherever keys wrap round."""
    totals, low, high = carry
    nothing = jnp.zeros_like(keys)
    totals = tuple(
        total + jnp.where(keys >= threshold, each, nothing) for total, threshold in zip(totals, thresholds, strict=True)
    )
    before, after = start + i32(LEAST_KEY) - 1, end + i32(LEAST_KEY)
    return totals, jnp.maximum(low, before - keys), jnp.maximum(high, keys - after)


def _reduced(carry: Any) -> tuple[list[Any], list[Any]]:
    totals, *nearest = carry
    return [total.sum() for total in totals], [each.max() for each in nearest]


def _tally(block: _Block, start: Any, end: Any, thresholds: list[Any], weighs: bool) -> tuple[list[Any], list[Any]]:
    """Of a part of a row: how many logits, or what weight, lie at or above each threshold, and which keys are in a bracket.

    Sums are int32 without a sign. For the distances see `_add`.
    """
    parts = block.parts

    def step(i, carry, masked):
        js = [block.part * parts.vectors + i * AT_ONCE + n for n in range(AT_ONCE)]
        values = [parts.load(block.logits, block.row, j) for j in js]
        for j, x in zip(js, values, strict=True):
            keys = ordered(x)
            if masked:
                keys = parts.new_only(keys, j)
            carry = _add(carry, keys, block.weights(keys, weighs), thresholds, start, end)
        return carry

    nothing, none = parts.fill(0, i32), parts.fill(LEAST_KEY, i32)
    return _reduced(parts.fold(block.part, AT_ONCE, step, ((nothing,) * THRESHOLDS, none, none)))


def _tally_lists(
    block: _Block, lengths: jax.Array, longest: Any, start: Any, end: Any, thresholds: list[Any], weighs: bool
) -> tuple[list[Any], list[Any]]:
    """The same of what a block has in its lists, of which none is longer than `longest`."""

    def step(i, carry):
        for n in range(TOGETHER):
            keys = lists.read(block.buffer, i * TOGETHER + n, lengths)
            carry = _add(carry, keys, block.weights(keys, weighs), thresholds, start, end)
        return carry

    nothing, none = lists.lanes(0), lists.lanes(LEAST_KEY)
    groups = lax.div(longest + (TOGETHER - 1), i32(TOGETHER))
    return _reduced(lax.fori_loop(i32(0), groups, step, ((nothing,) * THRESHOLDS, none, none)))


def _joined(block: _Block, sums: list[Any], nearest: list[Any], round_: Any) -> tuple[list[Any], list[Any]]:
    """Sums and largest values of what the blocks of a row found.

    A block writes where the others read two rounds before: in between it has met them, so they have read.
    """
    count = block.parts.count
    if count == 1:
        return sums, nearest
    side = round_ & 1
    for i, each in enumerate((*sums, *nearest)):
        block.exchange[block.row, side, i, block.part] = each
    meet(block.met.at[block.row, round_], count)
    there = plgpu.broadcasted_iota(i32, (WARPGROUP,), 0, layout=lists.LANES) < count

    def read(i, nothing):
        values = load(block.exchange, (block.row, side, i, pl.ds(0, WARPGROUP)), layout=lists.LANES)
        return jnp.where(there, values, lists.lanes(nothing))

    return (
        [read(i, 0).sum() for i in range(len(sums))],
        [read(len(sums) + i, LEAST_KEY).max() for i in range(len(nearest))],
    )
