"""Keys of logits in shared memory, one list a thread: none waits for another, and no order of arrival matters."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.compat import load
from pallas_kernels.inline_code import address, elements, word
from pallas_kernels.sampling.keys import LEAST_KEY
from pallas_kernels.sampling.parts import WARPGROUP

# Keys in a list; one that is full may have lost some.
LIST_LENGTH = 100
# The lists of a block: row n has the n-th key of each.
BUFFER = plgpu.SMEM((LIST_LENGTH, WARPGROUP), jnp.int32)
LANES = plgpu.Layout.WG_STRIDED((WARPGROUP,), vec_size=1)
_ONE = plgpu.Layout.WG_SPLAT(())

i32 = jnp.int32

# With names beside the keys, half as many, which take the buffer's other half.
NAMED_LENGTH = LIST_LENGTH // 2

# Appends key $2 if $3 <= key < $4 and the list ends, at $1, before $5: then the list ends a row further on, else as before.
_APPEND = """{{
.reg .pred p;
.reg .b32 at;
mov.b32 at, $1;
setp.ge.s32 p, $2, $3;
setp.lt.and.s32 p, $2, $4, p;
setp.lt.and.u32 p, at, $5, p;
@p st.shared.b32 [at], $2;
{name}
@p add.s32 at, at, {row};
mov.b32 $0, at;
}}"""
_ROW = 4 * WARPGROUP


def lanes(value: Any) -> jax.Array:
    """A number for each thread, int32 [WARPGROUP]."""
    return plgpu.layout_cast(jnp.full((WARPGROUP,), value, i32), LANES)


def read(buffer: Any, n: Any, lengths: jax.Array) -> jax.Array:
    """The n-th key of each list, int32 [WARPGROUP]; LEAST_KEY where a list of `lengths` [WARPGROUP] has fewer."""
    keys = load(buffer, (n, pl.ds(0, WARPGROUP)), layout=LANES)
    return jnp.where(lengths > n, keys, lanes(LEAST_KEY))


def read_names(buffer: Any, n: Any) -> jax.Array:
    """The names of the n-th keys, int32 [WARPGROUP]; anything where a list has fewer."""
    return load(buffer, (NAMED_LENGTH + n, pl.ds(0, WARPGROUP)), layout=LANES)


def append(
    buffer: Any,
    lengths: jax.Array,
    keys: jax.Array,
    low: Any,
    high: Any,
    names: jax.Array | None = None,
    *,
    layout: Any,
    emulated: bool,
) -> jax.Array:
    """Lengths int32 [WARPGROUP] after each thread has appended its keys from `low` on and below `high` to its list.

    Args:
        keys: int32 [a multiple of WARPGROUP] in `layout`.
        names: int32 like the keys, kept beside them. Then a list has room for NAMED_LENGTH keys.
        emulated: for the interpreter, which has no such stores.
    """
    room = LIST_LENGTH if names is None else NAMED_LENGTH
    if emulated:
        return _append_emulated(buffer, lengths, keys, low, high, names, room)
    name = "" if names is None else f"@p st.shared.b32 [at+{_ROW * NAMED_LENGTH}], $6;"
    ptx = _APPEND.format(name=name, row=_ROW)
    arrays = (keys,) if names is None else (keys, names)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), LANES, _ONE, _ONE, *[layout] * len(arrays)),
        return_type=plgpu.ShapeDtypeStruct((WARPGROUP,), i32, layout=LANES),
    )
    def store(_: Any, buffer: Any, ends: Any, low: Any, high: Any, *arrays: Any) -> Any:
        base = address(buffer, 32)
        limit = mgpu.FragmentedArray.splat(base, (), is_signed=True) + _ROW * room
        ends = ends + mgpu.FragmentedArray.splat(base, ends.shape, ends.layout, is_signed=True)
        low, high, limit = (each.registers.item() for each in (low, high, limit))
        one = ends.registers.item()
        end: Any = vector.extract(one, [], [0])
        for registers in zip(*(each.registers.flat for each in arrays), strict=True):
            for key, *others in zip(*map(elements, registers), strict=True):
                args = [end, key, low, high, limit, *others]
                # Loads that follow may come first: they read no list.
                end = llvm.inline_asm(word(), args, ptx, ",".join(["=r", *"r" * len(args)]), has_side_effects=True)
        registers = ends.registers.copy()
        registers.flat[0] = vector.broadcast(one.type, end)
        ends = mgpu.FragmentedArray(_registers=registers, _layout=ends.layout, _is_signed=True)
        return ends - mgpu.FragmentedArray.splat(base, ends.shape, ends.layout, is_signed=True)

    lane = plgpu.broadcasted_iota(i32, (WARPGROUP,), 0, layout=LANES)
    ends = store(buffer, (lengths * WARPGROUP + lane) * 4, i32(low), i32(high), *arrays)
    return jax.lax.shift_right_logical(ends, lanes(_ROW.bit_length() - 1))


def _append_emulated(
    buffer: Any, lengths: jax.Array, keys: jax.Array, low: Any, high: Any, names: jax.Array | None, room: int
) -> jax.Array:
    row = jax.lax.broadcasted_iota(i32, (LIST_LENGTH, WARPGROUP), 0)
    columns = jnp.zeros_like(keys) if names is None else names
    for mine, name in zip(keys.reshape(-1, WARPGROUP), columns.reshape(-1, WARPGROUP), strict=True):
        inside = (mine >= low) & (mine < high) & (lengths < room)
        buffer[...] = jnp.where((row == lengths) & inside, mine, buffer[...])
        if names is not None:
            buffer[...] = jnp.where((row == lengths + NAMED_LENGTH) & inside, name, buffer[...])
        lengths = lengths + inside.astype(i32)
    return lengths
