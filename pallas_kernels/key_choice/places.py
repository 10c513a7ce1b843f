"""Positions of the largest keys of each row, as one Mosaic GPU kernel for Hopper.

A block chooses for one row. The least chosen key is found digit by digit, from the top: the keys that agree in the digits
before are counted by their next one, in shared memory, and the counts say which digit the least one has. Then each
warpgroup counts what is chosen of a stretch of the row, and writes it to where the stretches before it end. Every count is
exact and no order of arrival matters.
"""

import functools
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.compat import load
from pallas_kernels.inline_code import address, elements, ptx, word
from pallas_kernels.mosaic_attention import WARPGROUP, params
from pallas_kernels.sampling.keys import LEAST_KEY, ordered

WARPGROUPS = 4
# Keys that a warpgroup looks at together: four loads of 16 bytes a thread in flight.
TOGETHER = 2048
# Digits of a key from the top: their lowest bit, and how many bits each has.
DIGITS = ((21, 11), (10, 11), (0, 10))
BINS = 1 << 11
assert BINS == TOGETHER  # counts are added up in the layout of keys

KEYS = plgpu.Layout.WG_STRIDED((TOGETHER,), vec_size=4)
_ONE = plgpu.Layout.WG_SPLAT(())
_LOADS, _WARPS = TOGETHER // (4 * WARPGROUP), WARPGROUP // 32
# A sum of each warp and load.
_SUMS = _LOADS * _WARPS

i32 = jnp.int32

# $0: the sum of $1 of this lane and all before it.
_SUM_OF_LANES = "\n".join(
    (
        "{ .reg .pred p; .reg .b32 x, y; mov.b32 x, $1;",
        *(f"shfl.sync.up.b32 y|p, x, {1 << i}, 0, -1; @p add.s32 x, x, y;" for i in range(5)),
        "mov.b32 $0, x; }",
    )
)
_STORE_LAST = "{ .reg .pred p; setp.eq.s32 p, $2, 31; @p st.shared.b32 [$0], $1; }"
_LOAD = "ld.shared.b32 $0, [$1];"
# Of element $1 of the int32 array at $0, unless $1 < 0: adds one, or stores $2.
_INCREMENT = """{ .reg .pred p; .reg .b32 a; setp.ge.s32 p, $1, 0; mad.lo.s32 a, $1, 4, $0;
@p red.shared.add.u32 [a], 1; }"""
_STORE_SHARED = (
    "{ .reg .pred p; .reg .b32 a; setp.ge.s32 p, $1, 0; mad.lo.s32 a, $1, 4, $0; @p st.shared.b32 [a], $2; }"
)
_STORE_GLOBAL = (
    "{ .reg .pred p; .reg .b64 a; setp.ge.s32 p, $1, 0; mad.wide.s32 a, $1, 4, $0; @p st.global.b32 [a], $2; }"
)


def padded(columns: int) -> int:
    """The columns that rows of keys must have for the kernel, at least `columns`."""
    return -(-columns // TOGETHER) * TOGETHER


def key_of(scores: jax.Array) -> jax.Array:
    """float32 to int32 in the same order. What is not a number counts as the largest; 0.0 and -0.0 are equal."""
    # 0.0 is the score of a key that no head looks for, and -0.0 with a negative weight.
    return ordered(jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores)))


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def places(keys: jax.Array, bounds: jax.Array, count: int, *, interpret: Any = False) -> jax.Array:
    """Positions of the `count` largest keys of each row, or of all; of equal ones the lowest positions.

    Jitted, so that the parts of a step share one lowering. The interpreter gives each row one warpgroup, as what threads add
    up in shared memory is one update of it there.

    Args:
        keys: int32 [R, S] in the order of scores (`key_of`), S as `padded` says.
        bounds: int32 [R]: a row has its keys at positions < bounds[r], up to S; what is elsewhere is not looked at.

    Returns:
        int32 [R, count], ascending, and -1 after the last.
    """
    R, S = keys.shape
    assert padded(S) == S
    warpgroups = 1 if interpret else WARPGROUPS
    emulated = bool(interpret)

    def key_places(keys, bounds, out, *, counts_s, sums_s, found_s, totals_s, met):
        row, me = lax.axis_index("row"), lax.axis_index("warpgroup")
        n = lax.min(bounds[row], i32(S))
        wanted = lax.min(n, i32(count))
        steps = lax.div(n + (TOGETHER - 1), i32(TOGETHER))
        each = lax.div(steps + (warpgroups - 1), i32(warpgroups))
        first, last = lax.min(me * each, steps), lax.min((me + 1) * each, steps)

        def wait_for_all():
            plgpu.barrier_arrive(met)
            plgpu.barrier_wait(met)

        def over_stretch(use, carry):
            """use(carry, keys, positions) for each step of this warpgroup's stretch of the row."""

            def step(i, carry, masked):
                some = load(keys, (row, pl.ds(i * TOGETHER, TOGETHER)), layout=KEYS)
                positions = _iota() + i * TOGETHER
                if masked:
                    some = jnp.where(positions < n, some, _all(LEAST_KEY))
                return use(carry, some, positions)

            whole = lax.max(lax.min(last, lax.div(n, i32(TOGETHER))), first)
            carry = lax.fori_loop(first, whole, functools.partial(step, masked=False), carry)
            return lax.fori_loop(whole, last, functools.partial(step, masked=True), carry)

        def search():
            """The least chosen key, and how many of those that equal it are chosen."""
            least, left = i32(0), wanted
            for d in range(len(DIGITS)):

                @pl.when(me == d % warpgroups)
                def _(d=d):
                    counts_s[d] = _all(0)

            wait_for_all()
            for d, (lowest, bits) in enumerate(DIGITS):

                def count_digits(nothing, some, positions, d=d, lowest=lowest, bits=bits, before=least):
                    del positions
                    digits = _digits(some, lowest) & ((1 << bits) - 1)
                    if d:
                        digits = jnp.where(_digits(some, lowest + bits) == before, digits, _all(-1))
                    _increment(counts_s.at[d], digits, emulated)
                    return nothing

                over_stretch(count_digits, i32(0))
                wait_for_all()
                counts = load(counts_s, (d, pl.ds(0, BINS)), layout=KEYS)
                before, total = _sums_before(counts, sums_s.at[me], emulated)
                above = total - before - counts
                here = (above < left) & (above + counts >= left)
                for place, found in enumerate((_iota(), left - above)):
                    _store_shared(found_s.at[me], jnp.where(here, _all(place), _all(-1)), found, emulated)
                _meet_warps(emulated)
                least, left = least << bits | found_s[me, 0], found_s[me, 1]
                _meet_warps(emulated)
            return least ^ i32(LEAST_KEY), left

        # Of a row with no more keys than are chosen, all lie above the least.
        least, left = lax.cond(n > count, search, lambda: (i32(LEAST_KEY), i32(0)))

        def tally(totals, some, positions):
            del positions
            above, equal = totals
            return above + _ones(some > least), equal + _ones(some == least)

        for side, sums in enumerate(over_stretch(tally, (_all(0), _all(0)))):
            totals_s[side, me] = _sums_before(sums, sums_s.at[me], emulated)[1]
        wait_for_all()
        above_before, equal_before = i32(0), i32(0)
        for other in range(warpgroups - 1):
            above_before += jnp.where(me > other, totals_s[0, other], 0)
            equal_before += jnp.where(me > other, totals_s[1, other], 0)

        def write(state, some, positions):
            above_before, equal_before = state
            above, equal = some > least, some == least
            # Both sums in one word: neither is above TOGETHER.
            before, total = _sums_before(_ones(above) + (_ones(equal) << 16), sums_s.at[me], emulated)
            equal_rank = equal_before + (before >> 16)
            chosen = above | (equal & (equal_rank < left))
            place = above_before + (before & 0xFFFF) + jnp.minimum(equal_rank, _all(0) + left)
            _store_global(out.at[row], jnp.where(chosen, place, _all(-1)), positions, emulated)
            return above_before + (total & 0xFFFF), equal_before + (total >> 16)

        over_stretch(write, (above_before, equal_before))

        def end(i, nothing):
            rest = _iota() + i * TOGETHER
            rest = jnp.where((rest >= wanted) & (rest < count), rest, _all(-1))
            _store_global(out.at[row], rest, _all(-1), emulated)
            return nothing

        @pl.when((me == 0) & (wanted < count))
        def _():
            lax.fori_loop(lax.div(wanted, i32(TOGETHER)), i32(-(-count // TOGETHER)), end, i32(0))

    return plgpu.kernel(
        key_places,
        out_type=jax.ShapeDtypeStruct((R, count), i32),
        scratch_types={
            "counts_s": plgpu.SMEM((len(DIGITS), BINS), i32),
            "sums_s": plgpu.SMEM((warpgroups, _SUMS), i32),
            "found_s": plgpu.SMEM((warpgroups, 2), i32),
            "totals_s": plgpu.SMEM((2, warpgroups), i32),
            "met": plgpu.Barrier(num_arrivals=warpgroups),
        },
        grid=(R,),
        grid_names=("row",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        interpret=interpret,
        compiler_params=params(),
    )(keys, bounds)


def _all(value: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full((TOGETHER,), value, i32), KEYS)


def _iota() -> jax.Array:
    return plgpu.broadcasted_iota(i32, (TOGETHER,), 0, layout=KEYS)


def _ones(flags: jax.Array) -> jax.Array:
    return jnp.where(flags, _all(1), _all(0))


def _digits(keys: jax.Array, lowest: int) -> jax.Array:
    """The bits of keys from the lowest on, as numbers whose order is the keys'."""
    return lax.shift_right_logical(keys ^ i32(LEAST_KEY), _all(lowest))


def _meet_warps(emulated: bool) -> None:
    """What the threads of a warpgroup stored before is visible to all of them after."""
    if emulated:
        return

    @plgpu.inline_mgpu()
    def meet(_: Any) -> None:
        mgpu.utils.warpgroup_barrier()

    meet()


def _for_each(code: str, bits: int, ref: Any, *arrays: jax.Array) -> None:
    """Runs `code` with the address of `ref` and the elements of `arrays`, [TOGETHER] each."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *[KEYS] * len(arrays)))
    def run(_: Any, ref: Any, *arrays: Any) -> None:
        base = address(ref, bits)
        for registers in zip(*(array.registers.flat for array in arrays), strict=True):
            for several in zip(*map(elements, registers), strict=True):
                ptx(code, [base, *several])

    run(ref, *arrays)


def _increment(counts: Any, bins: jax.Array, emulated: bool) -> None:
    """Adds one to counts [BINS] at each of `bins` [TOGETHER] that is not -1."""
    if emulated:
        counts[...] = counts[...].at[jnp.where(bins < 0, BINS, bins)].add(1, mode="drop")
    else:
        _for_each(_INCREMENT, 32, counts, bins)


def _store_shared(ref: Any, at: jax.Array, values: jax.Array, emulated: bool) -> None:
    """ref[at] = values, int32 [TOGETHER], but nothing where `at` is -1."""
    if emulated:
        _scatter(ref, at, values)
    else:
        _for_each(_STORE_SHARED, 32, ref, at, values)


def _store_global(ref: Any, at: jax.Array, values: jax.Array, emulated: bool) -> None:
    """See `_store_shared`."""
    if emulated:
        _scatter(ref, at, values)
    else:
        _for_each(_STORE_GLOBAL, 64, ref, at, values)


def _scatter(ref: Any, at: jax.Array, values: jax.Array) -> None:
    old = ref[...]
    ref[...] = old.at[jnp.where(at < 0, old.shape[0], at)].set(values, mode="drop")


def _sums_before(values: jax.Array, sums: Any, emulated: bool) -> tuple[jax.Array, jax.Array]:
    """The sum of all values before each, int32 [TOGETHER], and of all, int32 [].

    Args:
        values: int32 [TOGETHER].
        sums: shared memory of this warpgroup, int32 [_SUMS].
    """
    if emulated:
        to = jnp.cumsum(values)
        return to - values, to[-1]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), KEYS),
        return_type=(
            plgpu.ShapeDtypeStruct((TOGETHER,), i32, layout=KEYS),
            plgpu.ShapeDtypeStruct((), i32, layout=_ONE),
        ),
    )
    def run(_: Any, sums: Any, values: Any) -> Any:
        def constant(value: int) -> Any:
            return mgpu.c(value, word())

        def number(value: Any) -> Any:
            return mgpu.FragmentedArray.splat(value, (), is_signed=True)

        thread = number(mgpu.utils.thread_idx()) & 127
        lane, warp = thread & 31, thread >> 5
        base = number(address(sums, 32))
        mine, upto = [], []
        for register in values.registers.flat:
            so_far = [number(constant(0))]
            for element in elements(register):
                so_far.append(so_far[-1] + number(element))
            mine.append(so_far)
            upto.append(number(ptx(_SUM_OF_LANES, [so_far[-1].registers.item()], word())))
        for r, value in enumerate(upto):
            at = base + (warp + r * _WARPS) * 4
            ptx(_STORE_LAST, [each.registers.item() for each in (at, value, lane)])
        mgpu.utils.warpgroup_barrier()
        before = number(constant(0))
        registers = values.registers.copy()
        for r, (so_far, value) in enumerate(zip(mine, upto, strict=True)):
            start = before
            for w in range(_WARPS):
                of_warp = number(ptx(_LOAD, [(base + 4 * (r * _WARPS + w)).registers.item()], word()))
                earlier = warp > w
                start = start + earlier.select(of_warp, number(constant(0)))
                before = before + of_warp
            start = start + value - so_far[-1]
            type_ = values.registers.flat[r].type
            several = llvm.mlir_undef(type_)
            for i, offset in enumerate(so_far[:-1]):
                several = vector.insert((start + offset).registers.item(), several, [], [i])
            registers.flat[r] = several
        mgpu.utils.warpgroup_barrier()
        return mgpu.FragmentedArray(_registers=registers, _layout=values.layout, _is_signed=True), before

    return run(sums, values)
