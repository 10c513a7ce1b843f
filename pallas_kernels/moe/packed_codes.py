"""Weights with codes of four bits as operands of a wgmma: the order of their columns, and their values in registers.

A thread of a wgmma has two neighbouring columns of every eight, but codes come as words of eight neighbours. So the columns
of a product are taken in another order, which the tokens have to follow (`fragment_order`): of 64 columns of a row a thread
reads 8 neighbouring bytes and needs nothing from other threads. Column 16c + 8w + 4j + i of 64 is the one at
32w + 8i + 2c + j: in word w of thread c of a row, i counts nibbles and j halves. Rows may be taken in the same order; then
a product comes out in the order in which the next one wants its tokens.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from pallas_kernels.inline_code import address, as_words, load_shared, ptx, pure_ptx, word, words_layout, words_of
from pallas_kernels.quant.schemes import INT4_G32, MXFP4, NVFP4, Scheme

# Columns that are ordered among themselves, and rows of a tile.
UNIT = 64
# Bytes from the first of eight pairs of columns, see `pairs_of`.
PAIRS = tuple(32 * c + 8 * j for c in range(4) for j in range(2))
SCHEMES = (INT4_G32, NVFP4, MXFP4)


def fragment_order(x: jax.Array) -> jax.Array:
    """x [..., n * UNIT] with the columns of each UNIT in the order of the kernels."""
    parts = x.reshape(*x.shape[:-1], -1, 4, 2, 2, 4)
    return jnp.moveaxis(parts, (-3, -1), (-4, -3)).reshape(x.shape)


def pairs_of(sixteen: Any) -> Any:
    """Where the pairs of bfloat16 begin, in bytes, that make up 16 ordered columns from 16 * `sixteen` on.

    The lower halves of the eight pairs in `PAIRS` are the first eight columns in this order, their upper halves the others.
    """
    return sixteen // 4 * (2 * UNIT) + sixteen // 2 % 2 * 16 + sixteen % 2 * 4


def copied_in_order(row: Any, *, emulated: bool) -> Callable[[Any], None]:
    """Loads a row of tokens; what is returned stores it somewhere with its columns in `fragment_order`.

    Args:
        row: bfloat16 [n * UNIT] in global memory; so is what the result is given.
        emulated: for the interpreter, which takes no PTX.
    """
    if emulated:
        value = fragment_order(row[...])

        def put(to: Any) -> None:
            to[...] = value

        return put
    sixteens = row.shape[0] // 16
    each = -(-sixteens // 128)
    layout = words_layout(8 * each)

    def own(n: int) -> mgpu.FragmentedArray:
        """Past the last one threads do the last one's work again."""
        thread = mgpu.FragmentedArray.splat(mgpu.utils.thread_idx(), (), is_signed=False) % 128 + 128 * n
        return thread if 128 * (n + 1) <= sixteens else thread.min(sixteens - 1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((1024 * each,), jnp.int32, layout=layout)
    )
    def load(_: Any, row: ir.Value) -> mgpu.FragmentedArray:
        start, words = mgpu.utils.memref_ptr(row), []
        for n in range(each):
            (offset,) = pairs_of(own(n)).registers.flat
            first = mgpu.utils.getelementptr(start, [offset], word(8))
            words += [llvm.load(word(), mgpu.utils.getelementptr(first, [pair], word(8))) for pair in PAIRS]
        return as_words(words)

    value = load(row)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_: Any, to: ir.Value, value: mgpu.FragmentedArray) -> None:
        words = words_of(value)
        for n in range(each):
            (offset,) = (own(n) * 32).registers.flat
            place = arith.addi(address(to, 64), arith.extui(word(64), offset))
            for half, order in enumerate((0x5410, 0x7632)):
                pairs = (words[8 * n + i : 8 * n + i + 2] for i in range(0, 8, 2))
                eight = [pure_ptx(f"prmt.b32 $0, $1, $2, {order};", 1, *pair)[0] for pair in pairs]
                ptx(f"st.global.v4.b32 [$0 + {16 * half}], {{$1, $2, $3, $4}};", [place, *eight])

    return lambda to: store(to, value)


def group_of(scheme: Scheme) -> int:
    """Columns that share a scale."""
    assert scheme.columns is not None
    return scheme.columns


def tile_transforms(pitch: int) -> tuple[Any, ...]:
    """Of a tile [UNIT, pitch] of codes in shared memory; a row of it is 32, 64 or 128 bytes."""
    return plgpu.TilingTransform((8, pitch)), plgpu.SwizzleTransform(pitch)


def row_of(thread: Any, half: int, *, ordered: bool) -> Any:
    """The row of a tile that a thread of 128 has in one half of its fragment; `ordered`: of rows in the kernels' order."""
    warp, lane = thread // 32, thread % 32
    if not ordered:
        return warp * 16 + lane // 4 + 8 * half
    return (lane // 8) * 16 + (warp // 2) * 8 + (lane // 4) % 2 * 4 + warp % 2 * 2 + half


def code_offset(row: Any, thread: Any, unit: int, pitch: int) -> Any:
    """Where a thread's 8 bytes of a row and a unit of columns begin in a tile."""
    c = thread % 4
    chunk = c // 2 + 2 * unit
    period, chunks = 128 // pitch, pitch // 16
    return row * pitch + (chunk ^ (row // period % chunks)) * 16 + c % 2 * 8


def scale_index(row: Any, thread: Any, unit: int, group: int) -> Any:
    """Which scale of [groups, UNIT] belongs to a thread's columns of a row and a unit."""
    return (thread % 4 * (UNIT // 4) // group + unit * (UNIT // group)) * UNIT + row


class Loaded(NamedTuple):
    """What a thread needs of a unit of columns: four words of codes, and two scales twice, as bfloat16."""

    words: Any
    scales: Any


_WORDS, _SCALES = words_layout(4), words_layout(2)


def loaded(codes: Any, scale: Any, scheme: Scheme, unit: int, *, ordered: bool) -> Loaded:
    """A unit of columns of a tile of weights, in registers.

    Args:
        codes: uint8 [UNIT, 32, 64 or 128] in shared memory with `tile_transforms`.
        scale: [groups, UNIT] in shared memory.
        unit: which UNIT columns.
        ordered: whether the rows are taken in the kernels' order.
    """
    pitch, group = codes.shape[-1], group_of(scheme)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tile_transforms(pitch)), plgpu.RefType()),
        return_type=Loaded(
            plgpu.ShapeDtypeStruct((512,), jnp.int32, layout=_WORDS),
            plgpu.ShapeDtypeStruct((256,), jnp.int32, layout=_SCALES),
        ),
    )
    def load(_: Any, codes: ir.Value, scale: ir.Value) -> Loaded:
        i32, start, scales_start = word(), mgpu.utils.memref_ptr(codes), mgpu.utils.memref_ptr(scale)
        thread = mgpu.FragmentedArray.splat(mgpu.utils.thread_idx(), (), is_signed=False) % 128
        words, scales = [], []
        for half in range(2):
            row = row_of(thread, half, ordered=ordered)
            (offset,) = code_offset(row, thread, unit, pitch).registers.flat
            eight = load_shared(start, offset, ir.VectorType.get((2,), i32))
            words += [llvm.extractelement(eight, mgpu.utils.c(w, i32)) for w in range(2)]
            width = scheme.scale.itemsize
            (offset,) = (scale_index(row, thread, unit, group) * width).registers.flat
            number = load_shared(scales_start, offset, word(8 * width))
            scales.append(_bf16_pair(arith.extui(i32, number), scheme))
        return Loaded(as_words(words), as_words(scales))

    return load(codes, scale)


def converted(unit: Loaded, scheme: Scheme) -> jax.Array:
    """A unit of columns as numbers: bfloat16 [UNIT, UNIT] in registers, as the A of a wgmma.

    Value of the code times scale, rounded once; a matrix's factor is left out.
    """

    @plgpu.inline_mgpu(
        arg_types=(_WORDS, _SCALES),
        return_type=plgpu.ShapeDtypeStruct((UNIT, UNIT), jnp.bfloat16, layout=plgpu.Layout.WGMMA),
    )
    def convert(_: Any, words: mgpu.FragmentedArray, scales: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        all_words, all_scales = words_of(words), words_of(scales)
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        layout = mgpu.WGMMA_LAYOUT
        registers = np.empty(layout.registers_shape((UNIT, UNIT)), dtype=object)
        # Eights of columns, halves of rows.
        flat = registers.reshape(UNIT // 8, 2)
        for half in range(2):
            scale = all_scales[half]
            for w in range(2):
                for i, value in enumerate(_values(all_words[2 * half + w], scale, scheme)):
                    flat[4 * w + i, half] = llvm.bitcast(pair, value)
        return mgpu.FragmentedArray(_registers=registers, _layout=layout, _is_signed=None)

    return convert(*unit)


def _bf16_pair(number: ir.Value, scheme: Scheme) -> ir.Value:
    """A scale twice, as bfloat16."""
    if scheme is INT4_G32:
        return pure_ptx("prmt.b32 $0, $1, 0, 0x1010;", 1, number)[0]
    if scheme is MXFP4:
        return pure_ptx("{ shl.b32 $0, $1, 7; prmt.b32 $0, $0, 0, 0x1010; }", 1, number)[0]
    # e4m3: its bits, moved, are those of a number 2^120 times as small. It has no negative scales.
    return pure_ptx(
        "{ and.b32 $0, $1, 0x7f; shl.b32 $0, $0, 4; prmt.b32 $0, $0, 0, 0x1010; mul.rn.bf16x2 $0, $0, $2; }",
        1, number, 0x7B807B80,
    )[0]  # fmt: skip


def _values(codes: ir.Value, scales: ir.Value, scheme: Scheme) -> list[ir.Value]:
    """The pairs (i, i + 4) of the eight codes of a word, as bfloat16 times their scales."""
    return _int4(codes, scales) if scheme is INT4_G32 else _e2m1(codes, scales)


def _int4(codes: ir.Value, scales: ir.Value) -> list[ir.Value]:
    """The lowest bits of 128 to 143 are those of the code plus 8, of which 136 are taken off: exact, and so is only the
    product with the scale rounded.
    """
    lines = []
    for i in range(4):
        source = "$4" if i == 0 else f"${i}"
        if i:
            lines.append(f"shr.u32 ${i}, $4, {4 * i};")
        lines.append(f"lop3.b32 ${i}, {source}, $5, $6, 0x6a;")  # and, then exclusive or: the sign becomes plus 8
        lines.append(f"sub.rn.bf16x2 ${i}, ${i}, $6;")
        lines.append(f"mul.rn.bf16x2 ${i}, ${i}, $7;")
    return pure_ptx("{ " + " ".join(lines) + " }", 4, codes, 0x000F000F, 0x43084308, scales)


def _e2m1(codes: ir.Value, scales: ir.Value) -> list[ir.Value]:
    """Sign, exponent and mantissa, moved to where bfloat16 has them, are a number 2^126 times as small."""
    lines = []
    for i in range(4):
        sign, size = 12 - 4 * i, 6 - 4 * i
        lines.append(f"shl.b32 t, $4, {sign};")
        lines.append("and.b32 t, t, 0x80008000;")
        lines.append(f"{'shl.b32' if size > 0 else 'shr.u32'} ${i}, $4, {abs(size)};")
        lines.append(f"lop3.b32 ${i}, ${i}, $5, t, 0xea;")  # and, then or
        lines.append(f"mul.rn.bf16x2 ${i}, ${i}, $6;")
        lines.append(f"mul.rn.bf16x2 ${i}, ${i}, $7;")
    return pure_ptx("{ .reg .b32 t; " + " ".join(lines) + " }", 4, codes, 0x01C001C0, 0x7E807E80, scales)


def interpreted(codes: Any, scale: Any, scheme: Scheme, unit: int, *, ordered: bool) -> jax.Array:
    """`converted` by plain operations: the interpreter has neither instructions nor operands in registers."""
    nibbles = codes[...].astype(jnp.int32)[:, unit * UNIT // 2 : (unit + 1) * UNIT // 2]
    nibbles = jnp.stack([nibbles & 15, nibbles >> 4], axis=-1).reshape(UNIT, UNIT)
    if scheme is INT4_G32:
        value = ((nibbles ^ 8) - 8).astype(jnp.float32)
    else:
        exponent, mantissa = nibbles >> 1 & 3, (nibbles & 1).astype(jnp.float32)
        power = jnp.maximum(exponent - 1, 0).astype(jnp.float32)
        size = jnp.where(exponent == 0, mantissa / 2, (1 + mantissa / 2) * jnp.exp2(power))
        value = jnp.where(nibbles & 8 != 0, -size, size)
    groups = UNIT // group_of(scheme)
    numbers = scale[...][unit * groups : (unit + 1) * groups]
    if scheme is MXFP4:
        numbers = jax.lax.bitcast_convert_type(numbers.astype(jnp.uint32) << 23, jnp.float32)
    value = value * jnp.repeat(numbers.astype(jnp.float32), group_of(scheme), axis=0).T
    value = fragment_order(value)
    return (fragment_order(value.T).T if ordered else value).astype(jnp.bfloat16)
