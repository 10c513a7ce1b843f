"""The likeliest ids of each row, as Mosaic GPU kernels for Hopper.

A block reads its part of a row twice. The largest logits of its threads' columns say what its N-th largest logit reaches at
least; what lies there or above is few, and put into lists in shared memory, from which the N best are taken one after the
other. A block of fewer candidates finds the best of the blocks' best. Where logits are so equal that a list is full, they are
taken from all logits.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.own_buffer import own_rows
from pallas_kernels.sampling import lists
from pallas_kernels.sampling.keys import LEAST_KEY, float_of, ordered
from pallas_kernels.sampling.parts import LOAD_BYTES, WARPGROUP, Parts, resident_parts
from pallas_kernels.sampling.reference import Likeliest

# Vectors whose loads are in flight together.
AT_ONCE = 4
# Columns that a thread loads at once.
VEC_SIZE = 4
# Vectors of candidates that a block keeps in registers.
KEPT = 8
# Ids are kept as float32 beside candidates.
MOST_IDS = 2**24
MOST_KEY = 2**31 - 1

i32, f32 = jnp.int32, jnp.float32


@functools.partial(jax.jit, static_argnames=("count", "interpret"))
def likeliest(logits: jax.Array, count: int, wanted: jax.Array, *, interpret: Any = False) -> Likeliest:
    """See api.py. At most WARPGROUP."""
    R = logits.shape[0]
    values, ids = _best_of_parts(logits, count, wanted, interpret)
    while values.shape[1] > count:
        width = WARPGROUP * LOAD_BYTES // 4
        pad = ((0, 0), (0, -values.shape[1] % width))
        candidates = jnp.pad(values, pad, constant_values=-jnp.inf), jnp.pad(ids, pad)
        values, ids = _best_of_candidates(*candidates, count, wanted, interpret)
    # Rows that are not wanted are uninitialised.
    kept = jnp.broadcast_to(wanted[:, None], (R, count))
    return Likeliest(jnp.where(kept, ids, 0.0).astype(i32), jnp.where(kept, values, 0.0))


def _key(x: jax.Array) -> jax.Array:
    """-0.0 is as likely as 0.0."""
    return ordered(jnp.where(x == 0, jnp.zeros_like(x), x))


def _best_of_parts(logits: jax.Array, count: int, wanted: jax.Array, interpret: Any) -> tuple[jax.Array, jax.Array]:
    """The `count` best of each part of a row, -inf if it has fewer, and their ids: float32 [R, parts * count] each."""
    R, V = logits.shape
    parts = resident_parts(R, V, logits.dtype.itemsize, AT_ONCE, VEC_SIZE)

    def likeliest(logits, wanted, best_values, best_ids, *, buffer):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        def over_logits(use: Callable[..., Any], carry: Any) -> Any:
            """use(carry, keys, columns) for all vectors of the part."""

            def step(i, carry, masked):
                js = [part * parts.vectors + i * AT_ONCE + n for n in range(AT_ONCE)]
                values = [parts.load(logits, row, j) for j in js]
                for j, x in zip(js, values, strict=True):
                    keys = parts.new_only(_key(x), j) if masked else _key(x)
                    carry = use(carry, keys, parts.columns(j))
                return carry

            return parts.fold(part, AT_ONCE, step, carry)

        def put(lengths, keys, columns, *, low):
            return lists.append(
                buffer, lengths, keys, low, i32(MOST_KEY), columns, layout=parts.layout, emulated=bool(interpret)
            )

        def write(over: Callable[..., Any], fill: Callable[[int], jax.Array]) -> None:
            """Takes the best key and of equal ones the first column, of those that come after the last taken."""

            def take(i, last):
                last_key, last_column = last

                def free(keys, columns):
                    return (keys < last_key) | ((keys == last_key) & (columns > last_column))

                def larger(carry, keys, columns):
                    return jnp.maximum(carry, jnp.where(free(keys, columns), keys, fill(LEAST_KEY)))

                top = over(larger, fill(LEAST_KEY)).max()

                def earlier(carry, keys, columns):
                    chosen = free(keys, columns) & (keys == top)
                    return jnp.maximum(carry, jnp.where(chosen, -columns, fill(-MOST_IDS)))

                column = -over(earlier, fill(-MOST_IDS)).max()
                best_values[row, part, i] = jnp.where(top > LEAST_KEY, float_of(top), f32(-jnp.inf))
                best_ids[row, part, i] = column.astype(f32)
                return top, column

            lax.fori_loop(i32(0), i32(count), take, (i32(MOST_KEY), i32(-1)))

        @pl.when(wanted[row] != 0)
        def _():
            none = parts.fill(LEAST_KEY, i32)
            largest = over_logits(lambda carry, keys, _: jnp.maximum(carry, keys), none)

            def lower(state):
                left, taken, _ = state
                top = left.max()
                taken += jnp.where(left == top, jnp.ones_like(left), jnp.zeros_like(left)).sum()
                return jnp.where(left == top, none, left), taken, top

            # The count-th largest of these is no greater than the count-th largest logit. Fewer columns are all listed.
            _, _, low = lax.while_loop(
                lambda state: (state[1] < count) & (state[2] > LEAST_KEY), lower, (largest, i32(0), i32(0))
            )
            lengths = over_logits(functools.partial(put, low=lax.max(low, i32(LEAST_KEY + 1))), lists.lanes(0))
            longest = lengths.max()

            def over_lists(use: Callable[..., Any], carry: Any) -> Any:
                def step(n, carry):
                    return use(carry, lists.read(buffer, n, lengths), lists.read_names(buffer, n))

                return lax.fori_loop(i32(0), longest, step, carry)

            fits = longest < lists.NAMED_LENGTH
            pl.when(fits)(lambda: write(over_lists, lists.lanes))
            pl.when(jnp.logical_not(fits))(lambda: write(over_logits, lambda value: parts.fill(value, i32)))

    best = plgpu.kernel(
        likeliest,
        out_type=[jax.ShapeDtypeStruct((R, parts.count, count), f32)] * 2,
        scratch_types={"buffer": lists.BUFFER},
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )(own_rows(logits), wanted.astype(i32))
    values, ids = (each.reshape(R, -1) for each in best)
    return values, ids


def _best_of_candidates(
    values: jax.Array, ids: jax.Array, count: int, wanted: jax.Array, interpret: Any
) -> tuple[jax.Array, jax.Array]:
    """The `count` best of each part of a row of candidates, and their ids, float32 [R, parts * count] each.

    Args:
        values, ids: float32 [R, C]. Of equal values the lowest id comes first.
    """
    R, C = values.shape
    total = -(-C * values.dtype.itemsize // (WARPGROUP * LOAD_BYTES))
    parts = Parts(R, C, values.dtype.itemsize, 1, vectors=min(KEPT, total))

    def candidates(values, ids, wanted, best_values, best_ids):
        row, part = lax.axis_index("row"), lax.axis_index("part")

        @pl.when(wanted[row] != 0)
        def _():
            js = [part * parts.vectors + n for n in range(parts.vectors)]
            # In a vector that overlaps the one before, only new columns count.
            left = tuple(
                jnp.where(parts.columns(j) >= j * parts.width, parts.load(values, row, j), f32(-jnp.inf)) for j in js
            )
            names = [parts.load(ids, row, j) for j in js]

            def take(i, left):
                top = functools.reduce(jnp.maximum, left).max()
                equal = [jnp.where(x == top, -name, f32(-MOST_IDS)) for x, name in zip(left, names, strict=True)]
                first = -functools.reduce(jnp.maximum, equal).max()
                best_values[row, part, i], best_ids[row, part, i] = top, first
                return tuple(jnp.where(name == first, f32(-jnp.inf), x) for x, name in zip(left, names, strict=True))

            lax.fori_loop(i32(0), i32(count), take, left)

    best = plgpu.kernel(
        candidates,
        out_type=[jax.ShapeDtypeStruct((R, parts.count, count), f32)] * 2,
        grid=(R, parts.count),
        grid_names=("row", "part"),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=2048
        ),
    )(values, ids, wanted.astype(i32))
    values, ids = (each.reshape(R, -1) for each in best)
    return values, ids
