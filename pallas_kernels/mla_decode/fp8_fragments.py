"""Latents in FP8 as operands of a wgmma in registers: keys of a page, and its values with rows and columns exchanged.

A page's codes [64 tokens, 512] lie in shared memory as TMA has swizzled them. A thread of a warpgroup reads those that a wgmma
wants from it, and makes bfloat16 of two at a time in four instructions. A byte is put into the lower half of 16 bits and its
sign into the upper half (`prmt` repeats it); moved left by four bits and masked, these are the bits of a bfloat16 number 2^120
times as small as the code. The product with the scale times 2^120 is exact, as scales are powers of two: below 2^8, that is for
latents below 57344, of which larger ones give NaN.

- Keys: of each of its two tokens and of eight columns a thread has two neighbours, a load of 16 bits.
- Values: a row of the operand is a column of the latents. Which one it is is free, as long as the output is stored
  accordingly: a thread takes 8 neighbouring columns of a token, one load, as its two rows of four products (`store_rows`).
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
from pallas_kernels.latents import GROUP

# Columns of a fragment of keys; rows of a fragment of values, and how many of them a half of the columns has.
UNIT, BLOCKS = 64, 4
GROUPS = 4
HALF = BLOCKS * UNIT
# A tile of 8 tokens and 128 columns, each row of 128 bytes swizzled.
TILE_BYTES, ROW_BYTES = 1024, 128
_SPLAT = plgpu.Layout.WG_SPLAT(())
bf16 = jnp.bfloat16


class Codes(NamedTuple):
    """What a thread needs of a part of a page: its codes, and its scales as pairs of bfloat16, times 2^120."""

    words: Any
    scales: Any


def tile_transforms() -> tuple[Any, ...]:
    """Of a page of codes in shared memory."""
    return plgpu.TilingTransform((8, GROUP)), plgpu.SwizzleTransform(128)


class _Thread:
    """Where a thread is: its warp among four, row and column of eight rows and four columns."""

    def __init__(self) -> None:
        thread = mgpu.utils.thread_idx()
        self.warp = arith.andi(arith.shrui(thread, _c(5)), _c(3))
        self.row = arith.andi(arith.shrui(thread, _c(2)), _c(7))
        self.column = arith.andi(thread, _c(3))

    def group(self, half: ir.Value) -> ir.Value:
        """Of columns with one scale: a half has two, each of which two warps share."""
        return _sum(_times(half, 2), arith.shrui(self.warp, _c(1)))


def _c(value: int) -> ir.Value:
    return mgpu.utils.c(value, word())


def _sum(*values: ir.Value) -> ir.Value:
    total = values[0]
    for value in values[1:]:
        total = arith.addi(total, value)
    return total


def _times(value: ir.Value, factor: int) -> ir.Value:
    return arith.muli(value, _c(factor))


def _swizzled(chunk: ir.Value, row: ir.Value) -> ir.Value:
    """Byte of a row at which a chunk of 16 bytes lies."""
    return _times(arith.xori(chunk, row), 16)


def load_keys(codes: Any, scale: Any, group: Any, unit: int) -> Codes:
    """The codes of 64 columns of a page, for `keys`: one half, `unit`, of a group that shares scales.

    Args:
        codes: float8_e4m3fn [PAGE, 512] in shared memory with `tile_transforms`.
        scale: float32 [PAGE, 4] in shared memory.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tile_transforms()), plgpu.RefType(), _SPLAT), return_type=_types(words=16, scales=2)
    )
    def load(_: Any, codes: ir.Value, scale: ir.Value, group: mgpu.FragmentedArray) -> Codes:
        (of_group,) = group.registers.flat
        at, start, numbers = _Thread(), mgpu.utils.memref_ptr(codes), mgpu.utils.memref_ptr(scale)
        tile = _sum(_times(at.warp, 2 * GROUPS), of_group)
        row = _sum(_times(tile, TILE_BYTES), _times(at.row, ROW_BYTES), _times(at.column, 2))
        words, scales = {}, []
        for sixteen in range(4):
            chunk = _sum(row, _swizzled(_c(unit * 4 + sixteen), at.row))
            for half in range(2):
                for eight in range(2):
                    fixed = half * GROUPS * TILE_BYTES + 8 * eight
                    pair = load_shared(start, chunk, word(16), fixed)
                    words[2 * sixteen + eight, half] = arith.extui(word(), pair)
        token = _times(_sum(_times(_sum(_times(at.warp, 16), at.row), GROUPS), of_group), 4)
        for half in range(2):
            number = load_shared(numbers, token, word(), half * 8 * 4 * GROUPS)
            scales += pure_ptx("{ prmt.b32 $0, $1, $1, 0x3232; mul.rn.bf16x2 $0, $0, $2; }", 1, number, 0x7B807B80)
        return Codes(as_words([words[place] for place in np.ndindex(8, 2)]), as_words(scales))

    return load(codes, scale, group)


def keys(part: Codes) -> jax.Array:
    """bfloat16 [PAGE, UNIT] in registers, as the A of a wgmma, of what `load_keys` gave."""

    def pair(words: list[Any], scales: list[Any], eight: int, half: int) -> ir.Value:
        return _numbers("prmt.b32 $0, $1, 0, 0x9180;", words[2 * eight + half], 0, scales[half])

    return _fragment(part, pair)


def value_scales(scale: Any, half: Any, owned: Any | None) -> Any:
    """The scales of a page for this warp's columns of a half of the latents', for `values`.

    Args:
        scale: as in `load_keys`.
        half: int32, 0 or 1.
        owned: int32, how many tokens of the page count: others' values are zeros. None for all of them.
    """
    numbers = [half] if owned is None else [half, owned]

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *[_SPLAT] * len(numbers)), return_type=_types(words=0, scales=8).scales
    )
    def load(_: Any, scale: ir.Value, half: Any, *owned: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        at, start = _Thread(), mgpu.utils.memref_ptr(scale)
        group = at.group(*half.registers.flat)
        tokens = [_sum(_times(at.column, 2), _c(one)) for one in range(2)]
        places = [_times(_sum(_times(token, GROUPS), group), 4) for token in tokens]
        scales = []
        for eight in range(8):
            pair = []
            for token, place in zip(tokens, places, strict=True):
                number = load_shared(start, place, word(), eight * 8 * 4 * GROUPS)
                if owned:
                    (count,) = owned[0].registers.flat
                    counts = arith.cmpi(arith.CmpIPredicate.slt, _sum(token, _c(8 * eight)), count)
                    number = arith.select(counts, number, _c(0))
                pair.append(number)
            scales += pure_ptx("{ prmt.b32 $0, $1, $2, 0x7632; mul.rn.bf16x2 $0, $0, $3; }", 1, *pair, 0x7B807B80)
        return as_words(scales)

    return load(scale, *numbers)


def load_values(codes: Any, half: Any, first: int, blocks: int) -> Any:
    """The codes of `blocks` blocks of a half of a page's columns, two or four, for `values`.

    Args:
        codes: as in `load_keys`.
        half: int32, 0 or 1.
        first: the first of the blocks, an even one.
    """
    size = blocks // 2

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(tile_transforms()), _SPLAT), return_type=_types(words=16 * size, scales=0).words
    )
    def load(_: Any, codes: ir.Value, half: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        at, start = _Thread(), mgpu.utils.memref_ptr(codes)
        chunk = _sum(_times(arith.andi(at.warp, _c(1)), 4), arith.shrui(at.row, _c(1)))
        tile = _sum(_times(at.group(*half.registers.flat), TILE_BYTES), _times(arith.andi(at.row, _c(1)), 8))
        tokens = [_sum(_times(at.column, 2), _c(one)) for one in range(2)]
        rows = [_sum(tile, _times(token, ROW_BYTES), _swizzled(chunk, token)) for token in tokens]
        words = []
        for eight in range(8):
            for row in rows:
                fixed = eight * GROUPS * TILE_BYTES + 2 * first
                loaded = load_shared(start, row, ir.VectorType.get((size,), word()), fixed)
                words += [llvm.extractelement(loaded, _c(i)) for i in range(size)]
        return as_words(words)

    return load(codes, half)


def values(part: Codes, block: int) -> jax.Array:
    """bfloat16 [UNIT, PAGE] in registers, as the A of a wgmma, of what `load_values` and `value_scales` gave.

    Row 16w + 8h + r of a block is column 64w + 8r + 2 * block + h of the half's.

    Args:
        block: counted from the first one loaded.
    """

    def pair(words: list[Any], scales: list[Any], eight: int, half: int) -> ir.Value:
        column = 2 * block + half
        byte = column % 4
        size = len(words) // 16
        first, second = (words[(2 * eight + one) * size + column // 4] for one in range(2))
        order = byte | (8 + byte) << 4 | (4 + byte) << 8 | (12 + byte) << 12
        return _numbers(f"prmt.b32 $0, $1, $2, {order};", first, second, scales[eight])

    return _fragment(part, pair)


def _numbers(spread: str, first: Any, second: Any, scales: Any) -> ir.Value:
    """A pair of codes as bfloat16 times their scales; `spread` puts each, repeating its sign, into a half of $0."""
    code = f"{{ {spread} shl.b32 $0, $0, 4; and.b32 $0, $0, $3; mul.rn.bf16x2 $0, $0, $4; }}"
    return pure_ptx(code, 1, first, second, 0x87F087F0, scales)[0]


def _fragment(part: Codes, pair: Callable[[list[Any], list[Any], int, int], ir.Value]) -> jax.Array:
    """bfloat16 [64, 64] of pairs of neighbours in a row: pair(words, scales, eight of columns, half of rows)."""
    layouts = words_layout(part.words.size // 128), words_layout(part.scales.size // 128)

    @plgpu.inline_mgpu(arg_types=layouts, return_type=plgpu.ShapeDtypeStruct((64, 64), bf16, layout=plgpu.Layout.WGMMA))
    def convert(_: Any, words: mgpu.FragmentedArray, scales: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
        all_words, all_scales = words_of(words), words_of(scales)
        registers = np.empty(mgpu.WGMMA_LAYOUT.registers_shape((64, 64)), dtype=object)
        flat, two = registers.reshape(8, 2), ir.VectorType.get((2,), ir.BF16Type.get())
        for eight, half in np.ndindex(8, 2):
            flat[eight, half] = llvm.bitcast(two, pair(all_words, all_scales, eight, half))
        return mgpu.FragmentedArray(_registers=registers, _layout=mgpu.WGMMA_LAYOUT, _is_signed=None)

    return convert(*part)


def _types(*, words: int, scales: int) -> Codes:
    def type_of(n: int) -> Any:
        return plgpu.ShapeDtypeStruct((128 * n,), jnp.int32, layout=words_layout(n)) if n else None

    return Codes(type_of(words), type_of(scales))


def store_rows(out: Any, half: Any, sums: Any, row_bytes: int) -> None:
    """Writes a half of the output's columns, 16 bytes of a row at a time.

    Args:
        out: bfloat16 [N, 512] in global memory, rows `row_bytes` apart.
        half: int32, 0 or 1.
        sums: of each block bfloat16 [UNIT, N], rows as in `values`.
    """
    N = sums[0].shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, *[plgpu.Layout.WGMMA] * BLOCKS))
    def store(_: Any, out: ir.Value, half: Any, *sums: mgpu.FragmentedArray) -> None:
        at = _Thread()
        flat = [block.registers.reshape(N // 8, 2) for block in sums]
        (own,) = half.registers.flat
        column = _sum(_times(own, 2 * HALF), _times(at.warp, 2 * UNIT), _times(at.row, 16))
        offset = _sum(column, _times(at.column, 2 * row_bytes))
        start = arith.addi(address(out, 64), arith.extui(word(64), offset))
        for eight in range(N // 8):
            for one, order in enumerate((0x5410, 0x7632)):
                eights = []
                for block in flat:
                    first, second = (llvm.bitcast(word(), block[eight, half]) for half in range(2))
                    eights += pure_ptx(f"prmt.b32 $0, $1, $2, {order};", 1, first, second)
                place = (8 * eight + one) * row_bytes
                ptx(f"st.global.v4.b32 [$0 + {place}], {{$1, $2, $3, $4}};", [start, *eights])

    store(out, half, *sums)


def largest_of_columns(x: jax.Array, tops: Any) -> None:
    """Writes the largest of each column of a warp's rows: NaN if one is.

    Eight lanes have the same columns. Two that compare theirs each keep half of them, while there is an even number.

    Args:
        x: float32 [64, N] in the layout of a wgmma.
        tops: float32 [4, at least N] in shared memory, a row a warp.
    """
    N, pitch = x.shape[1], tops.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, x: mgpu.FragmentedArray, tops: ir.Value) -> None:
        at, start = _Thread(), mgpu.utils.memref_ptr(tops)

        def larger(a: ir.Value, b: ir.Value) -> ir.Value:
            return pure_ptx("max.NaN.f32 $0, $1, $2;", 1, a, b)[0]

        flat = x.registers.reshape(N // 8, 2)
        # Number 2e + i is that of column 8e + 2 * (a thread's column) + i.
        numbers = [
            larger(*(llvm.bitcast(word(), llvm.extractelement(flat[eight, half], _c(one))) for half in range(2)))
            for eight in range(N // 8)
            for one in range(2)
        ]
        first = _c(0)
        for bit in range(3):
            size, lanes = len(numbers) // 2, 4 << bit
            if len(numbers) % 2:
                others = [mgpu.utils.shfl_bfly(number, lanes) for number in numbers]
            else:
                upper = arith.andi(arith.shrui(at.row, _c(bit)), _c(1))
                has_upper = arith.cmpi(arith.CmpIPredicate.ne, upper, _c(0))
                pairs = list(zip(numbers[:size], numbers[size:], strict=True))
                others = [mgpu.utils.shfl_bfly(arith.select(has_upper, a, b), lanes) for a, b in pairs]
                numbers = [arith.select(has_upper, b, a) for a, b in pairs]
                first = _sum(first, _times(upper, size))
            numbers = [larger(a, b) for a, b in zip(numbers, others, strict=True)]
        row = _sum(_times(at.warp, 4 * pitch), _times(at.column, 8))
        for i, number in enumerate(numbers):
            place = _sum(first, _c(i))
            column = _sum(_times(arith.shrui(place, _c(1)), 32), _times(arith.andi(place, _c(1)), 4))
            # Lanes that have the same number all store it.
            llvm.store(number, mgpu.utils.getelementptr(start, [_sum(row, column)], word(8)))

    store(x, tops)
