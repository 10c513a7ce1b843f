"""Pages for the Mosaic GPU kernel that are gathered: 64 latents from anywhere in the cache make one.

TMA copies rows of a swizzled tile in eights. So the threads of a warpgroup copy, 16 bytes each: eight of them the 128 bytes
that a row has of a tile, so that every line of memory is read whole and no two threads meet in a bank of shared memory.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from pallas_kernels.compat import load
from pallas_kernels.inline_code import address, elements, ptx, publish, word
from pallas_kernels.split_kv import PAGE

TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
# A row of a tile, in bytes, and what a thread copies of it at once.
TILE_ROW, CHUNK = 128, 16
# A number of each row, with eight lanes.
OF_ROWS = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (4, 64), (8,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
).reduce(1)
i32 = jnp.int32

_COPY = "cp.async.cg.shared.global [$0], [$1], 16;"


def gather_pages(
    latent: Any,
    places: Any,
    request: Any,
    parts: tuple[tuple[Any, Any], ...],
    free: Any,
    first: Any,
    n: Any,
    emulated: bool,
) -> None:
    """Fills a ring with n pages, by one warpgroup.

    Args:
        latent: reference to the cache [pages, PAGE, C].
        places: reference to int32 [B, whole pages]: the token of the cache, counted through its pages, at each place of a
            request's context.
        parts: [stages, PAGE, width] of the columns from left to right, and barriers that say they are there.
        free: barriers of the stages whose readers are done.
        first: page of the context to begin with.
        emulated: for the interpreter, which has no such copies.
    """
    stages = parts[0][0].shape[0]

    def places_of(i):
        return load(places, (request, pl.ds((first + lax.min(i, n - 1)) * PAGE, PAGE)), layout=OF_ROWS)

    def copy(i, at):
        stage = lax.rem(i, i32(stages))

        @pl.when(i >= stages)
        def _():
            plgpu.barrier_wait(free.at[stage])

        column = 0
        for part, _ in parts:
            _copy_rows(latent, at, part.at[stage], column, emulated)
            column += part.shape[-1]
        # On their way while the page lands.
        later = places_of(i + 1)
        publish(emulated, copies=True)
        for _, full in parts:
            plgpu.barrier_arrive(full.at[stage])
        return later

    lax.fori_loop(i32(0), n, copy, places_of(i32(0)))


def _copy_rows(latent: Any, at: jax.Array, part: Any, column: int, emulated: bool) -> None:
    """Starts to copy the columns of `part` [PAGE, width] from `column` on of the tokens `at` [PAGE]."""
    width, columns = part.shape[-1], latent.shape[-1]
    if emulated:
        part[...] = latent[...].reshape(-1, columns)[at, column : column + width]
        return
    numbers = plgpu.broadcasted_iota(i32, (PAGE,), 0, layout=OF_ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(TILED), OF_ROWS, OF_ROWS))
    def start(_: Any, latent: Any, part: Any, at: Any, numbers: Any) -> None:
        def constant(value: int, bits: int = 32) -> Any:
            return mgpu.c(value, word(bits))

        source, target = address(latent, 64), address(part, 32)
        chunk = arith.andi(mgpu.utils.thread_idx(), constant(TILE_ROW // CHUNK - 1))
        tokens, rows = ([e for register in array.registers.flat for e in elements(register)] for array in (at, numbers))
        for token, row in zip(tokens, rows, strict=True):
            offset = arith.muli(arith.extui(word(64), token), constant(2 * columns, 64))
            offset = arith.addi(offset, arith.extui(word(64), arith.muli(chunk, constant(CHUNK))))
            offset = arith.addi(offset, constant(2 * column, 64))
            # Tiles of eight rows lie one after the other, and the chunks of such a row in an order of its own.
            in_tile = arith.andi(row, constant(7))
            place = arith.muli(arith.shrui(row, constant(3)), constant(8 * 2 * width))
            place = arith.addi(place, arith.muli(in_tile, constant(TILE_ROW)))
            place = arith.addi(place, arith.muli(arith.xori(chunk, in_tile), constant(CHUNK)))
            for tile in range(width // 64):
                to = arith.addi(arith.addi(target, place), constant(tile * 8 * TILE_ROW))
                ptx(_COPY, [to, arith.addi(arith.addi(source, offset), constant(tile * TILE_ROW, 64))])

    start(latent, part, at, numbers)
