"""Keys of logits in shared memory, one list a thread: none waits for another, and no order of arrival matters."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.compat import load
from pallas_kernels.sampling.keys import LEAST_KEY
from pallas_kernels.sampling.parts import WARPGROUP

# Keys in a list; one that is full may have lost some.
LIST_LENGTH = 100
# The lists of a block: row n has the n-th key of each.
BUFFER = plgpu.SMEM((LIST_LENGTH, WARPGROUP), jnp.int32)
LANES = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
_ONE = plgpu.Layout.WG_SPLAT(())

i32 = jnp.int32

# Appends key $2 if $3 <= key < $4 and the list ends, at $1, before $5: then the list ends a row further on, else as before.
_APPEND = f"""{{
.reg .pred p;
.reg .b32 at;
mov.b32 at, $1;
setp.ge.s32 p, $2, $3;
setp.lt.and.s32 p, $2, $4, p;
setp.lt.and.u32 p, at, $5, p;
@p st.shared.b32 [at], $2;
@p add.s32 at, at, {4 * WARPGROUP};
mov.b32 $0, at;
}}"""


def lanes(value: Any) -> jax.Array:
    """A number for each thread, int32 [WARPGROUP]."""
    return plgpu.layout_cast(jnp.full((WARPGROUP,), value, i32), LANES)


def read(buffer: Any, n: Any, lengths: jax.Array) -> jax.Array:
    """The n-th key of each list, int32 [WARPGROUP]; LEAST_KEY where a list of `lengths` [WARPGROUP] has fewer."""
    keys = load(buffer, (n, pl.ds(0, WARPGROUP)), layout=LANES)
    return jnp.where(lengths > n, keys, lanes(LEAST_KEY))


def append(
    buffer: Any, lengths: jax.Array, keys: jax.Array, low: Any, high: Any, *, layout: Any, emulated: bool
) -> jax.Array:
    """Lengths int32 [WARPGROUP] after each thread has appended its keys from `low` on and below `high` to its list.

    Args:
        keys: int32 [a multiple of WARPGROUP] in `layout`.
        emulated: for the interpreter, which has no such stores.
    """
    if emulated:
        return _append_emulated(buffer, lengths, keys, low, high)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES, layout, _ONE, _ONE),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP,), i32, layout=LANES),
    )
    def store(_: Any, buffer: Any, ends: Any, keys: Any, low: Any, high: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        base = llvm.ptrtoint(word, mgpu.utils.memref_ptr(buffer))
        limit = mgpu.FragmentedArray.splat(base, (), is_signed=True) + 4 * WARPGROUP * LIST_LENGTH
        ends = ends + mgpu.FragmentedArray.splat(base, ends.shape, ends.layout, is_signed=True)
        low, high, limit = (each.registers.item() for each in (low, high, limit))
        one = ends.registers.item()
        end: Any = vector.extract(one, [], [0])
        for several in keys.registers.flat:
            for i in range(ir.VectorType(several.type).shape[0]):
                args = [end, vector.extract(several, [], [i]), low, high, limit]
                end = llvm.inline_asm(word, args, _APPEND, "=r,r,r,r,r,r", has_side_effects=True)
        registers = ends.registers.copy()
        registers.flat[0] = vector.broadcast(one.type, end)
        ends = mgpu.FragmentedArray(_registers=registers, _layout=ends.layout, _is_signed=True)
        return ends - mgpu.FragmentedArray.splat(base, ends.shape, ends.layout, is_signed=True)

    lane = plgpu.broadcasted_iota(i32, (WARPGROUP,), 0, layout=LANES)
    ends = store(buffer, (lengths * WARPGROUP + lane) * 4, keys, i32(low), i32(high))
    return jax.lax.shift_right_logical(ends, lanes((4 * WARPGROUP).bit_length() - 1))


def _append_emulated(buffer: Any, lengths: jax.Array, keys: jax.Array, low: Any, high: Any) -> jax.Array:
    row = jax.lax.broadcasted_iota(i32, (LIST_LENGTH, WARPGROUP), 0)
    for mine in keys.reshape(-1, WARPGROUP):
        inside = (mine >= low) & (mine < high) & (lengths < LIST_LENGTH)
        buffer[...] = jnp.where((row == lengths) & inside, mine, buffer[...])
        lengths = lengths + inside.astype(i32)
    return lengths
