"""Pages of FP8 latents for the Mosaic GPU kernel: a warpgroup turns codes into the bfloat16 tiles that others multiply.

The tiles are those of the kernel for bfloat16, so its results on the dequantised cache are the same to the bit. They take
all of a thread block's shared memory, so codes come from global memory into registers, three groups of columns ahead.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from pallas_kernels.compat import load
from pallas_kernels.inline_code import address, ptx, word
from pallas_kernels.latents import GROUP
from pallas_kernels.mosaic_attention import over_columns
from pallas_kernels.split_kv import PAGE

# Eight neighbouring columns a lane: a load of 8 bytes, and a store of 16 that meets no other's bank.
CODES = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
OF_ROWS = CODES.reduce(1)
# How many groups of columns are on their way. With four ptxas spills 484 bytes a thread instead of 268.
AHEAD = 3
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16

_LOAD = "ld.global.L1::no_allocate"


@dataclass(frozen=True)
class Ring:
    """Where tiles go: a part of shared memory each for columns, [stages, PAGE, width], that `full` says are there.

    Attributes:
        values: the parts of the latent from left to right, whole groups each, and their barriers.
        rope: that of the rotated keys, with its barrier.
        free: barriers of the stages whose readers are done.
    """

    values: tuple[tuple[Any, Any], ...]
    rope: tuple[Any, Any]
    free: Any


def convert_pages(
    latents: Sequence[Any], ring: Ring, stages: int, first_page: Any, page_at: Any, n: Any, emulated: bool
) -> None:
    """Fills the ring with n pages, by one warpgroup. Who multiplies them calls `publish` first.

    Args:
        latents: references to the arrays of `Fp8Latents`.
        first_page: number of the first page; page_at(i): that of the i-th, for any i.
        emulated: for the interpreter, which takes no PTX.
    """
    codes, scale, rope = latents
    parts = [
        (part, start, full, start + GROUP == part.shape[-1])
        for part, full in ring.values
        for start in range(0, part.shape[-1], GROUP)
    ]

    def held(page, group):
        """A group of a page in registers."""
        if emulated:
            columns = pl.ds(group * GROUP, GROUP)
            return (
                load(codes, (page, slice(None), columns), layout=CODES),
                load(scale, (page, slice(None), group), layout=OF_ROWS),
            )
        return _loaded(codes.at[page], scale.at[page], group)

    def convert(i, carry):
        (*groups,), page, next_page = carry
        stage = lax.rem(i, i32(stages))
        # A page number is there a page before the loads that need it.
        after_next = page_at(i + 2)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(ring.free.at[stage])

        rope_s, rope_full = ring.rope
        plgpu.copy_gmem_to_smem(rope.at[page], rope_s.at[stage], rope_full.at[stage])
        for group, (part, start, full, last) in enumerate(parts):
            codes_SG, scale_S = groups.pop(0)
            scale_SG = plgpu.layout_cast(over_columns(scale_S, (PAGE, GROUP)), CODES)
            part[stage, :, pl.ds(start, GROUP)] = (codes_SG.astype(f32) * scale_SG).astype(bf16)
            ahead = group + AHEAD
            groups.append(held(page if ahead < len(parts) else next_page, ahead % len(parts)))
            if last:
                plgpu.barrier_arrive(full.at[stage])
        return tuple(groups), next_page, after_next

    groups = tuple(held(first_page, group) for group in range(AHEAD))
    lax.fori_loop(i32(0), n, convert, (groups, first_page, page_at(i32(1))))


def _loaded(codes: Any, scale: Any, group: int) -> tuple[jax.Array, jax.Array]:
    """A group of a page: codes [PAGE, GROUP] and their scales [PAGE]. Read once, they stay out of L1, where spills are."""
    e4m3 = jnp.float8_e4m3fn
    types = (
        plgpu.ShapeDtypeStruct((PAGE, GROUP), e4m3, layout=CODES),
        plgpu.ShapeDtypeStruct((PAGE,), f32, layout=OF_ROWS),
    )
    columns, groups = codes.shape[-1], scale.shape[-1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()), return_type=types)
    def start(_: Any, codes: Any, scale: Any) -> tuple[mgpu.FragmentedArray, mgpu.FragmentedArray]:
        def constant(value: int) -> Any:
            return mgpu.c(value, word())

        def after(base: Any, offset: Any) -> Any:
            return arith.addi(base, arith.extui(word(64), offset))

        # Warps have four rows of each 16, eight lanes a row: see CODES.
        thread = arith.andi(mgpu.utils.thread_idx(), constant(127))
        row, lane = arith.shrui(thread, constant(3)), arith.andi(thread, constant(7))
        at = arith.addi(arith.muli(row, constant(columns)), arith.muli(lane, constant(8)))
        first, number = after(address(codes, 64), at), after(address(scale, 64), arith.muli(row, constant(4 * groups)))
        eights = np.empty(CODES.to_mgpu().registers_shape((PAGE, GROUP)), dtype=object)
        numbers = np.empty(OF_ROWS.to_mgpu().registers_shape((PAGE,)), dtype=object)
        of_codes = ir.VectorType.get((8,), ir.Float8E4M3FNType.get())
        of_numbers = ir.VectorType.get((1,), ir.F32Type.get())
        for i, n in np.ndindex(eights.shape[:2]):
            offset = 16 * i * columns + 64 * n + group * GROUP
            eight = ptx(f"{_LOAD}.b64 $0, [$1 + {offset}];", [first], word(64))
            eights[i, n] = mgpu.utils.bitcast(eight, of_codes)
        for i in range(len(numbers)):
            offset = 4 * (16 * i * groups + group)
            one = ptx(f"{_LOAD}.b32 $0, [$1 + {offset}];", [number], word())
            numbers[i] = mgpu.utils.bitcast(one, of_numbers)
        return (
            mgpu.FragmentedArray(_registers=eights, _layout=CODES.to_mgpu(), _is_signed=None),
            mgpu.FragmentedArray(_registers=numbers, _layout=OF_ROWS.to_mgpu(), _is_signed=None),
        )

    return start(codes, scale)
