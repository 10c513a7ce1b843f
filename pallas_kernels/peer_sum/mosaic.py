"""Mosaic GPU kernels in which every device writes rows to the others: `peer_sum`, `peer_scatter_sum`, `peer_gather` in traces.

A warpgroup has one row of each device's result. It writes its row into all mailboxes, then a flag; waits for the flags of all
devices in its own mailbox; and reads what came with them. Flags count calls, so that none is ever taken back, and rows of two
calls in turn lie apart: a device that is in its next call has been told by all others that they have ended the one before it.
So no barrier and no memory but the mailboxes is shared, and what a kernel reads and writes otherwise is its device's own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.peer_sum.mailbox import MOST_DEVICES, MOST_ROWS, ROW_BYTES, SIDES, Layout
from pallas_kernels.row import PARAMS, WARPGROUP, row_unsupported_reason

# Over more than two devices, larger sums write less in two phases: each device adds up a part of the rows, then gathers all.
MOST_BYTES_AT_ONCE = 1 << 19

_c = mgpu.utils.c
_SIGNAL = "{ .reg .pred p; setp.eq.s32 p, $0, $1; @p st.release.sys.global.u32 [$2], $3; }"
_WAIT = """{
.reg .pred p; .reg .s32 seen;
setp.ne.s32 p, $0, $1;
@p bra ready;
again:
ld.acquire.sys.global.u32 seen, [$2];
sub.s32 seen, seen, $3;
setp.lt.s32 p, seen, 0;
@p bra again;
ready:
}"""


def unsupported_reason(part: jax.Array, axis: str) -> str | None:
    """Why the kernels do not support this part, or None if they do."""
    if part.ndim != 2:
        return f"it needs rows, and the part has {part.ndim} axes"
    if (reason := row_unsupported_reason(part.shape[1])) is not None:
        return reason
    if part.shape[1] * part.dtype.itemsize > ROW_BYTES:
        return f"a row has at most {ROW_BYTES} bytes, not {part.shape[1] * part.dtype.itemsize}"
    if part.shape[0] > MOST_ROWS:
        return f"it supports at most {MOST_ROWS} rows, not {part.shape[0]}"
    if (devices := lax.axis_size(axis)) > MOST_DEVICES:
        return f"it writes to the memory of at most {MOST_DEVICES} devices, not of {devices}"
    return hopper_unsupported_reason(jnp.bfloat16)


@jax.jit
def total(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.total`, [T, H] in bfloat16. Jitted, so that the layers of a model share one lowering."""
    T, H = part.shape
    devices = _devices(mailboxes)
    if devices > 2 and T % devices == 0 and T * H * part.dtype.itemsize > MOST_BYTES_AT_ONCE:
        return gather(scatter_sum(part, mailboxes), mailboxes)

    def peer_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        _exchange(part, mailboxes, summed, _add, devices)

    return _by_rows(peer_sum, part, mailboxes, T, T)


@jax.jit
def scatter_sum(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.scatter_sum`: [T, H] of parts [devices * T, H]."""
    devices = _devices(mailboxes)
    T = part.shape[0] // devices

    def peer_scatter_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        _exchange(part, mailboxes, summed, _add, devices, apart=T)

    return _by_rows(peer_scatter_sum, part, mailboxes, T, T)


@jax.jit
def gather(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.gather`: [devices * T, H] of parts [T, H], of any dtype of 2 or 4 bytes."""
    T = part.shape[0]
    devices = _devices(mailboxes)

    def peer_gather(part: Any, mailboxes: Any, whole: Any) -> None:
        _exchange(part, mailboxes, whole, None, devices)

    return _by_rows(peer_gather, part, mailboxes, T, devices * T)


def _devices(mailboxes: jax.Array) -> int:
    return (mailboxes.shape[-1] - 1) // 2


def _by_rows(kernel: Callable[..., None], part: jax.Array, mailboxes: jax.Array, rows: int, results: int) -> jax.Array:
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((results, part.shape[1]), part.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=PARAMS,
    )(part, mailboxes.reshape(-1))


def _exchange(
    part: Any,
    mailboxes: Any,
    out: Any,
    add: Callable[[Sequence[Any]], Any] | None,
    devices: int,
    *,
    apart: int = 0,
) -> None:
    """One row's warpgroup, of as many as `out` has rows (or, without `add`, rows of each device).

    Args:
        add: makes row t of `out` of what all devices sent; None: each is a row of its own.
        apart: rows of `part` between those that one warpgroup sends to one device and to the next.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def body(_: Any, part: ir.Value, mailboxes: ir.Value, out: ir.Value) -> None:
        i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
        layout = Layout(devices)
        (rows, H), dtype = ir.MemRefType(out.type).shape, ir.MemRefType(out.type).element_type
        T = rows if add is not None else rows // devices
        row_bytes = H * mgpu.utils.bitwidth(dtype) // 8
        vec_size = math.gcd(H // WARPGROUP, 16 * 8 // mgpu.utils.bitwidth(dtype))

        def number(i: int) -> ir.Value:
            return memref.load(mailboxes, [_c(i, ir.IndexType.get())])

        def wide(x: ir.Value) -> ir.Value:
            return arith.extui(i64, x)

        def times(x: ir.Value, factor: int) -> ir.Value:
            return arith.muli(wide(x), _c(factor, i64))

        def row_at(address: ir.Value) -> ir.Value:
            pointer = llvm.inttoptr(llvm.PointerType.get(), address)
            return mgpu.utils.ptr_as_memref(pointer, ir.MemRefType.get((H,), dtype))

        def load(address: ir.Value) -> Any:
            signed = True if isinstance(dtype, ir.IntegerType) else None
            return mgpu.FragmentedArray.load_strided(row_at(address), is_signed=signed, vec_size=vec_size)

        def address_of(ref: ir.Value) -> ir.Value:
            return llvm.ptrtoint(i64, mgpu.utils.memref_ptr(ref))

        bases = [
            arith.ori(wide(number(2 * d)), arith.shli(wide(number(2 * d + 1)), _c(32, i64))) for d in range(devices)
        ]
        rank, own = number(2 * devices), bases[0]
        for d in range(1, devices):
            mine = arith.cmpi(arith.CmpIPredicate.eq, rank, _c(d, i32))
            own = arith.select(mine, bases[d], own)
        t = arith.index_cast(i32, gpu.block_id(gpu.Dimension.x))
        thread = arith.index_cast(i32, gpu.thread_id(gpu.Dimension.x))

        def calls_at(base: ir.Value) -> ir.Value:
            return arith.addi(base, times(t, 4))

        def flag_at(base: ir.Value, sender: ir.Value) -> ir.Value:
            place = arith.addi(times(sender, MOST_ROWS), wide(t))
            offset = arith.muli(place, _c(4, i64))
            return arith.addi(arith.addi(base, offset), _c(layout.flags, i64))

        calls: Any = llvm.inline_asm(i32, [calls_at(own)], "ld.global.u32 $0, [$1];", "=r,l,~{memory}", has_side_effects=True)
        call = arith.addi(calls, _c(1, i32))
        side = arith.andi(call, _c(SIDES - 1, i32))

        def slot_at(base: ir.Value, sender: ir.Value) -> ir.Value:
            place = arith.addi(times(side, devices), wide(sender))
            place = arith.addi(arith.muli(place, _c(MOST_ROWS, i64)), wide(t))
            offset = arith.muli(place, _c(ROW_BYTES, i64))
            return arith.addi(arith.addi(base, offset), _c(layout.rows, i64))

        def number_of(d: int) -> ir.Value:
            return _c(d, i32)

        given: dict[ir.Value, Any] = {}
        for d, base in enumerate(bases):
            row = _plus(t, d * apart)
            if row not in given:
                given[row] = load(arith.addi(address_of(part), times(row, row_bytes)))
            given[row].store_untiled(row_at(slot_at(base, rank)), optimized=False)
        mgpu.utils.warpgroup_barrier()  # all threads have written, and read the number of calls
        for d, base in enumerate(bases):
            args = [thread, number_of(d), flag_at(base, rank), call]
            llvm.inline_asm(None, args, _SIGNAL, "r,r,l,r,~{memory}", has_side_effects=True)
        for d in range(devices):
            args = [thread, number_of(d), flag_at(own, number_of(d)), call]
            llvm.inline_asm(None, args, _WAIT, "r,r,l,r,~{memory}", has_side_effects=True)
        mgpu.utils.warpgroup_barrier()
        came = [load(slot_at(own, number_of(d))) for d in range(devices)]
        if add is None:
            for d, row in enumerate(came):
                place = times(_plus(t, d * T), row_bytes)
                row.store_untiled(row_at(arith.addi(address_of(out), place)), optimized=False)
        else:
            place = times(t, row_bytes)
            add(came).store_untiled(row_at(arith.addi(address_of(out), place)), optimized=False)
        args = [thread, number_of(0), calls_at(own), call]
        ended = "{ .reg .pred p; setp.eq.s32 p, $0, $1; @p st.global.u32 [$2], $3; }"
        llvm.inline_asm(None, args, ended, "r,r,l,r,~{memory}", has_side_effects=True)

    body(part, mailboxes, out)


def _plus(x: ir.Value, number: int) -> ir.Value:
    return arith.addi(x, _c(number, x.type)) if number else x


def _add(rows: Sequence[Any]) -> Any:
    """Rows of all devices, added in float32 in the order of the devices, and rounded once."""
    f32 = ir.F32Type.get()
    first, *others = (row.astype(f32) for row in rows)
    for other in others:
        first = first + other
    return first.astype(rows[0].mlir_dtype)
