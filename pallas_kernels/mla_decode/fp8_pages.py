"""Pages of FP8 latents for the Mosaic GPU kernel: a warpgroup turns codes into the bfloat16 tiles that others multiply.

The tiles are those of the kernel for bfloat16, so its results on the dequantised cache are the same to the bit. They take
all of a thread block's shared memory, so codes come from global memory into registers. Those of the next page are on their
way while the warpgroup waits for a free stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.latents import GROUP
from pallas_kernels.mosaic_attention import over_columns
from pallas_kernels.split_kv import PAGE

# Eight neighbouring columns a lane: a load of 8 bytes, and a store of 16 that meets no other's bank.
CODES = plgpu.Layout.TILED(plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1)
OF_ROWS = CODES.reduce(1)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


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


def convert_pages(latents: Sequence[Any], ring: Ring, stages: int, first_page: Any, page_at: Any, n: Any) -> None:
    """Fills the ring with n pages, by one warpgroup.

    Args:
        latents: references to the arrays of `Fp8Latents`.
        first_page: number of the first page; page_at(i): that of the i-th, for any i.
    """
    codes, scale, rope = latents
    parts = [
        (part, start, full, start + GROUP == part.shape[-1])
        for part, full in ring.values
        for start in range(0, part.shape[-1], GROUP)
    ]

    def held(page, group):
        """A group of a page in registers."""
        columns = pl.ds(group * GROUP, GROUP)
        return (
            load(codes, (page, slice(None), columns), layout=CODES),
            load(scale, (page, slice(None), group), layout=OF_ROWS),
        )

    def convert(i, carry):
        groups, page, next_page = carry
        stage = lax.rem(i, i32(stages))
        # A page number is there a page before the loads that need it.
        after_next = page_at(i + 2)

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(ring.free.at[stage])

        rope_s, rope_full = ring.rope
        plgpu.copy_gmem_to_smem(rope.at[page], rope_s.at[stage], rope_full.at[stage])
        for (part, start, full, last), (codes_SG, scale_S) in zip(parts, groups, strict=True):
            scale_SG = plgpu.layout_cast(over_columns(scale_S, (PAGE, GROUP)), CODES)
            tile = part.at[stage, :, pl.ds(start, GROUP)]
            tile[...] = (codes_SG.astype(f32) * scale_SG).astype(bf16)
            if last:
                plgpu.commit_smem()
                plgpu.barrier_arrive(full.at[stage])
        # After the fences of `commit_smem`: they wait for every load that is on its way.
        return tuple(held(next_page, group) for group in range(len(parts))), next_page, after_next

    groups = tuple(held(first_page, group) for group in range(len(parts)))
    lax.fori_loop(i32(0), n, convert, (groups, first_page, page_at(i32(1))))
