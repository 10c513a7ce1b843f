"""Absorbed queries on Hopper, in one Mosaic GPU kernel: a matmul for each head, and the rotation of the shared part.

A decode step is bound by reading w_uk, 128 or 192 KiB a head, and by the latency of a launch. So the latent's columns
are the rows of a wgmma and the tokens its columns, of which there may be as few as 8, and a head has one block for each
of its tiles: all read their weights and their tokens once, at the same time, without a pipeline. Further blocks of the
same launch rotate.

With fewer than 8 tokens the copies reach past the last one. TMA reads zeros there and drops writes, which saves XLA's
launches for padding; a column of a wgmma depends on its own token only.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import run_in_place, transpose_ref
from pallas_kernels.kv_write.mosaic import PARAMS, write_token
from pallas_kernels.latents import Latents, from_arrays
from pallas_kernels.rotary import HALF, ROWS, rotated

ROPE, LATENT = 2 * HALF, 512
# Widths of a head's queries before their rotated part.
NOPE = (128, 192)
# Up to this many tokens are a wgmma's columns.
MOST_COLUMNS = 128
GRANULE = 8  # Of a wgmma's columns, and of a copy's rows.
M = 64  # Rows of a wgmma.
# Tiles of twice as many rows read the tokens half as often. They are used where there are at least this many, two for each
# multiprocessor of an H200, so that none is idle.
WIDE_FROM = 264
# Tiles of rows that a block rotates: their loads are in flight together.
TILES_AT_ONCE = 4
GRID_NAMES = ("tokens", "head", "part")


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, w_uk: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    width = q.shape[-1]
    _, D, L = w_uk.shape
    if D not in NOPE or (width - D, L) != (ROPE, LATENT):
        heads = " or ".join(f"{nope} + {ROPE}" for nope in NOPE)
        return f"it supports heads of {heads} and latents of {LATENT}, not {D} + {width - D} and {L}"
    return hopper_unsupported_reason(q.dtype, w_uk.dtype)


@functools.partial(jax.jit, static_argnames=("interpret",))
def mla_query(q: jax.Array, w_uk: jax.Array, cos: jax.Array, sin: jax.Array, *, interpret: Any = False) -> jax.Array:
    """See api.py. Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas."""
    T = q.shape[0]
    q, cos, sin = _whole(q.reshape(T, -1), cos, sin)
    kernel = Kernel.of(q.shape[0], *w_uk.shape[:2])

    def mla_query(*refs, **scratch):
        kernel.body(lax.axis_index("part"), *refs, **scratch)

    run = plgpu.kernel(
        mla_query,
        out_type=kernel.out_type,
        scratch_types=kernel.scratch_types,
        grid=(kernel.token_blocks, kernel.H, kernel.parts),
        grid_names=GRID_NAMES,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
    return run(q, w_uk, cos, sin)[:T]


@functools.partial(jax.jit, static_argnames=("eps", "head_rows", "interpret"))
def write_and_query(
    latent: Latents,
    kv_a: jax.Array,
    norm_weight: jax.Array,
    q: jax.Array,
    w_uk: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
    head_rows: int | None = None,
    interpret: Any = False,
) -> tuple[Latents, jax.Array]:
    """See api.py. Each token's latent is a block of the same launch."""
    T = q.shape[0]
    q, cos, sin = _whole(q, cos, sin)
    kernel = Kernel.of(q.shape[0], w_uk.shape[0], w_uk.shape[1], head_rows)
    writers = -(-T // (kernel.token_blocks * kernel.H))

    def mla_write_and_query(kv_a, norm_weight, q, w_uk, cos, sin, pages, offsets, *latent_and_out, **scratch):
        *latent, out = latent_and_out
        part = lax.axis_index("part")
        kernel.body(part, q, w_uk, cos, sin, out, **scratch)
        row = lax.axis_index("tokens") * kernel.H + lax.axis_index("head")
        token = row * writers + part - kernel.parts

        @pl.when((part >= kernel.parts) & (token < T))
        def _write():
            write_token(token, kv_a, norm_weight, cos, sin, pages, offsets, *latent, eps=eps)

    *written, out = run_in_place(
        mla_write_and_query,
        (kv_a, norm_weight, q, w_uk, cos, sin, pages, offsets),
        tuple(jax.tree.leaves(latent)),
        (kernel.out_type,),
        scratch_types=kernel.scratch_types,
        grid=(kernel.token_blocks, kernel.H, kernel.parts + writers),
        grid_names=GRID_NAMES,
        interpret=interpret,
        compiler_params=PARAMS,
    )
    return from_arrays(tuple(written)), out[:T]


def _whole(*arrays: jax.Array) -> list[jax.Array]:
    """Pads more than GRANULE tokens to a multiple of it, because copies have whole tiles of rows."""
    T = arrays[0].shape[0]
    padding = -T % GRANULE if T > GRANULE else 0
    if not padding:
        return list(arrays)
    return [jnp.pad(a, ((0, padding), *((0, 0),) * (a.ndim - 1))) for a in arrays]


@dataclass(frozen=True)
class Kernel:
    """How T tokens, fewer than GRANULE or a multiple, and H heads of `nope` columns are cut.

    Attributes:
        token_blocks: blocks of tokens.
        head_rows: rows of the result for a token's heads.
        columns: tokens of a block.
        width: latent columns of a tile, of which a head has `tiles`.
        row_tiles: tiles of ROWS tokens in a block, for the rotation.
        parts: blocks of a head for each block of tokens, including those that rotate.
    """

    T: int
    H: int
    nope: int
    head_rows: int
    token_blocks: int
    columns: int
    width: int
    tiles: int
    row_tiles: int
    parts: int

    @classmethod
    def of(cls, T: int, H: int, nope: int, head_rows: int | None = None) -> "Kernel":
        token_blocks = -(-T // MOST_COLUMNS)
        columns = -(-T // (token_blocks * GRANULE)) * GRANULE
        width = 2 * M if token_blocks * H * (LATENT // (2 * M)) >= WIDE_FROM else M
        tiles, row_tiles = LATENT // width, columns // ROWS
        parts = tiles + -(-row_tiles // TILES_AT_ONCE)
        return cls(T, H, nope, head_rows or H, token_blocks, columns, width, tiles, row_tiles, parts)

    @property
    def out_type(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.T, self.head_rows, LATENT + ROPE), jnp.bfloat16)

    @property
    def scratch_types(self) -> dict[str, Any]:
        swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
        matrix = functools.partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=swizzled)
        return {
            "w_s": matrix((self.nope, self.width)),
            "x_s": matrix((self.columns, self.nope)),
            "out_s": matrix((self.columns, self.width)),
            "arrived": plgpu.Barrier(num_arrivals=2),
        }

    def body(self, part, q, w_uk, cos, sin, out, *, w_s, x_s, out_s, arrived):
        """The work of a block.

        q [T, at least H * (nope + 64)], w_uk [H, nope, 512], cos, sin [T, 32], out [T, head_rows, 576].
        """
        first, head = lax.axis_index("tokens") * self.columns, lax.axis_index("head")

        @pl.when(part < self.tiles)
        def _absorb():
            tokens, at = pl.ds(first, self.columns), pl.ds(part * self.width, self.width)
            plgpu.copy_gmem_to_smem(w_uk.at[head, :, at], w_s, arrived)
            plgpu.copy_gmem_to_smem(q.at[tokens, pl.ds(head * (self.nope + ROPE), self.nope)], x_s, arrived)
            plgpu.barrier_wait(arrived)

            def multiply(total):
                plgpu.wgmma(total, transpose_ref(w_s, (1, 0)), transpose_ref(x_s, (1, 0)))
                return total[...]

            y = pl.run_scoped(multiply, plgpu.ACC((self.width, self.columns), jnp.float32))
            staged = transpose_ref(out_s, (1, 0))
            staged[...] = plgpu.layout_cast(y.astype(jnp.bfloat16), plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(out_s, out.at[tokens, head, at])
            plgpu.wait_smem_to_gmem(0)

        @pl.when((part >= self.tiles) & (part < self.parts))
        def _rotate():
            rows: list[Any] = list(range(self.T))
            if self.T >= ROWS:
                start = first + (part - self.tiles) * (TILES_AT_ONCE * ROWS)
                # Tiles past the end rotate the last rows once more.
                rows = [
                    pl.ds(lax.min(start + i * ROWS, jnp.int32(self.T - ROWS)), ROWS)
                    for i in range(min(TILES_AT_ONCE, self.row_tiles))
                ]
            # All loads come before the first store: the compiler moves no load across a store.
            columns = head * (self.nope + ROPE) + self.nope
            for row, halves in [(row, rotated(q, (row,), columns, cos, sin, row)) for row in rows]:
                for i, half in enumerate(halves):
                    out[row, head, pl.ds(LATENT + i * HALF, HALF)] = half.astype(jnp.bfloat16)
