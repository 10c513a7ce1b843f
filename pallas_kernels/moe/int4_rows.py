"""Rows of `int4_g32` codes in shared memory as numbers in registers, each warp one row (`one_token_int4.py`)."""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.inline_code import load_shared, pure_ptx, word
from pallas_kernels.matvec import WARPS, warp_per_row
from pallas_kernels.moe.one_token_config import ROWS

GROUP = 32  # columns that share a scale
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def numbers(codes: Any, scale: Any, half: int, part: int) -> jax.Array:
    """float32 [WARPS, columns] in `warp_per_row`: what the codes of a load stand for, of this warpgroup's rows.

    A lane has 8 or 4 neighbouring columns of its warp's row.

    Args:
        codes: uint8 [2, ROWS, parts, columns / 2], or without halves, in shared memory.
        scale: bfloat16 [2, groups, rows], or without halves; of the rows the first are those of the codes.
    """
    *_, parts, width = codes.shape
    groups, pitch = scale.shape[-2:]
    columns, each = 2 * width, 2 * width // 32
    layout = warp_per_row(columns)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((WARPS, columns), f32, layout=layout),
    )
    def read(_: Any, codes: ir.Value, scale: ir.Value) -> mgpu.FragmentedArray:
        def c(value: int) -> ir.Value:
            return mgpu.utils.c(value, word())

        thread = mgpu.utils.thread_idx()
        row, lane = arith.shrui(thread, c(5)), arith.andi(thread, c(31))
        offset = arith.addi(arith.muli(row, c(parts * width)), arith.muli(lane, c(each // 2)))
        fixed = (half * ROWS * parts + part) * width
        loaded = load_shared(mgpu.utils.memref_ptr(codes), offset, word(4 * each), fixed)
        group = arith.shrui(lane, c((GROUP // each).bit_length() - 1))
        place = arith.addi(arith.muli(group, c(2 * pitch)), arith.muli(row, c(2)))
        fixed = 2 * pitch * (half * groups + part * columns // GROUP)
        number = load_shared(mgpu.utils.memref_ptr(scale), place, word(16), fixed)
        (scales,) = pure_ptx("prmt.b32 $0, $1, 0, 0x1010;", 1, arith.extui(word(), number))
        found = _eight(loaded, scales) if each == 8 else _four(arith.extui(word(), loaded), scales)
        whole = llvm.mlir_undef(ir.VectorType.get((each,), ir.F32Type.get()))
        for i, bits in enumerate(found):
            whole = llvm.insertelement(whole, llvm.bitcast(ir.F32Type.get(), bits), c(i))
        fragment = layout.to_mgpu()
        registers = np.array([whole], dtype=object).reshape(fragment.registers_shape((WARPS, columns)))
        return mgpu.FragmentedArray(_registers=registers, _layout=fragment, _is_signed=None)

    return read(codes, scale)


def _pairs(word_: Any, scales: Any, shifts: tuple[int, ...]) -> list[tuple[Any, Any]]:
    """Of each shift the codes at bits 0 and 16 times their scales, rounded as in `packed_codes.py`, as float32 bits."""
    out = []
    for shift in shifts:
        lines = "lop3.b32 $0, $0, $2, $3, 0x6a;", "sub.rn.bf16x2 $0, $0, $3;", "mul.rn.bf16x2 $0, $0, $4;"
        code = f"{{ shr.u32 $0, $1, {shift}; {' '.join(lines)} }}"
        (pair,) = pure_ptx(code, 1, word_, 0x000F000F, 0x43084308, scales)
        low = arith.shli(pair, mgpu.utils.c(16, word()))
        high = arith.andi(pair, mgpu.utils.c(0xFFFF0000 - (1 << 32), word()))
        out.append((low, high))
    return out


def _eight(codes: Any, scales: Any) -> list[Any]:
    """Eight codes of a word, the first one low, in order."""
    pairs = _pairs(codes, scales, (0, 4, 8, 12))
    return [low for low, _ in pairs] + [high for _, high in pairs]


def _four(codes: Any, scales: Any) -> list[Any]:
    """Four codes in the lower half of a word."""
    (spread,) = pure_ptx("{ shl.b32 $0, $1, 12; or.b32 $0, $0, $1; }", 1, codes)
    return [number for pair in _pairs(spread, scales, (0, 8)) for number in pair]


def interpreted(codes: Any, scale: Any, half: int, part: int, first_row: Any) -> jax.Array:
    """`numbers` by plain operations, for the interpreter."""
    bytes_, scales = codes[...], scale[...].astype(f32)
    if bytes_.ndim == 4:
        bytes_, scales = bytes_[half], scales[half]
    bytes_ = lax.dynamic_slice_in_dim(bytes_, first_row, WARPS, axis=0)[:, part].astype(i32)
    columns = 2 * bytes_.shape[1]
    values = (jnp.stack([bytes_ & 15, bytes_ >> 4], axis=-1).reshape(WARPS, columns) ^ 8) - 8
    groups = columns // GROUP
    scales = lax.dynamic_slice_in_dim(scales[part * groups : (part + 1) * groups], first_row, WARPS, axis=1)
    return (values.astype(f32) * jnp.repeat(scales.T, GROUP, axis=1)).astype(bf16).astype(f32)
