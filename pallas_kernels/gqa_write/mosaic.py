"""Norms and rotates the heads of a token and writes its key and value: one Mosaic GPU kernel for Hopper (`gqa_write`).

XLA makes six kernels of it in a layer, whose cost is that of six launches. A warpgroup has a key head of one token: each of its
warps takes one query after another, and all hold the key: so a norm is a sum inside a warp. For a norm over all heads of the
token each warp sums the squares of all of them, again by itself.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, run_in_place
from pallas_kernels.gqa_write.reference import HeadNorms
from pallas_kernels.row import bf16, f32

ROWS = 4  # Queries of a tile, one for each warp.
LANES = 32
# Up to this many tokens the kernel sums the squares of all heads itself, every warp of every block those of its token. For the
# 56 rows of MiniMax-M2 a warp has 640 instructions more: 6 us with this many tokens, which are 16 blocks a multiprocessor. XLA
# reads them once only, but in four kernels of about 2 us.
SUMMED_TOKENS = 256
# Up to so many rows of queries and keys, whose loads have no loop around them, so that many are in flight.
SUMMED_ROWS = 64


def _tile(columns: int) -> Any:
    """The layout of [ROWS, columns], a row in each warp; of one row, in all warps, it is `.reduce(0)`."""
    wide = math.gcd(columns // LANES, 4)
    tiling = plgpu.Tiling(((ROWS, wide * LANES), (wide,)))
    return plgpu.Layout.TILED(tiling, warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)


def _down(row: jax.Array) -> jax.Array:
    """[columns] as [ROWS, columns]."""
    columns = row.shape[0]
    return plgpu.layout_cast(lax.broadcast_in_dim(row, (ROWS, columns), (1,)), _tile(columns))


def _along(of_rows: jax.Array, columns: int) -> jax.Array:
    """[ROWS] as [ROWS, columns]."""
    of_rows = plgpu.layout_cast(of_rows, _tile(columns).reduce(1))
    return plgpu.layout_cast(lax.broadcast_in_dim(of_rows, (ROWS, columns), (0,)), _tile(columns))


def unsupported_reason(k_cache: jax.Array, qkv: jax.Array, cos: jax.Array) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    group, D, half = qkv.shape[2] - 2, qkv.shape[3], cos.shape[1]
    if group < ROWS:
        return f"it needs at least {ROWS} queries for each key, not {group}"
    if half % LANES or D % LANES:
        return f"it needs multiples of {2 * LANES} columns that are rotated, and of {LANES} in a head, not {2 * half} and {D}"
    return hopper_unsupported_reason(k_cache.dtype, qkv.dtype)


def sums_squares(qkv: jax.Array) -> bool:
    """Whether the kernel had better sum the squares of all heads than be given their means (`HeadNorms`)."""
    T, K, rows, _ = qkv.shape
    return T <= SUMMED_TOKENS and K * (rows - 1) <= SUMMED_ROWS


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def write_heads(
    k_cache: jax.Array,
    v_cache: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: HeadNorms | None,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """See api.py. Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas."""
    T, K, _, D = qkv.shape
    G, half = qkv.shape[2] - 2, cos.shape[1]
    # Where the halves that are rotated begin, and the rest, with their columns.
    cuts = [(0, half), (half, half), *([(2 * half, D - 2 * half)] if 2 * half < D else [])]
    of_all_heads = norms is not None and norms.of_all_heads
    of_norms = () if norms is None else (norms.q, norms.k, norms.q_square, norms.k_square)
    arrays = [array for array in (bias, *of_norms) if array is not None]

    def gqa_write(qkv, cos, sin, pages, offsets, *refs):
        given, (keys, values, queries) = list(refs[: len(arrays)]), refs[len(arrays) :]
        token, head = lax.axis_index("token"), lax.axis_index("head")
        bias_of = given.pop(0) if bias is not None else None
        q_factor, k_factor, *means = given or (None, None)

        def read(ref: Any, index: tuple[Any, ...], columns: int, *, rows: bool) -> jax.Array:
            tile = _tile(columns)
            return load(ref, index, layout=tile if rows else tile.reduce(0))

        def biased(of: Any, at: Any, first: int, columns: int, *, rows: bool) -> jax.Array:
            """Columns of a row, or of ROWS rows, of a key head in `qkv`, in bfloat16."""
            x = read(qkv, (token, of, at, pl.ds(first, columns)), columns, rows=rows)
            if bias_of is None:
                return x
            added = read(bias_of, (of, at, pl.ds(first, columns)), columns, rows=rows)
            return (x.astype(f32) + added.astype(f32)).astype(bf16)

        def raw(at: Any, *, rows: bool) -> list[jax.Array]:
            """The parts of a row, or of ROWS rows, of this block's head."""
            return [biased(head, at, *cut, rows=rows) for cut in cuts]

        def mean_square_of_all(places: range) -> jax.Array:
            """Over these rows of all heads: float32 []."""
            rows = [biased(each, at, 0, D, rows=False).astype(f32) for each in range(K) for at in places]
            # Lanes add to each other only at the end.
            return functools.reduce(jnp.add, [row * row for row in rows]).sum() * (1 / (len(rows) * D))

        def mean_square(parts: list[jax.Array], axis: int) -> jax.Array:
            sums = [(x.astype(f32) * x.astype(f32)).sum(axis=axis) for x in parts]
            if axis == 1:
                sums = [plgpu.layout_cast(each, _tile(half).reduce(1)) for each in sums]
            return functools.reduce(jnp.add, sums) * (1 / D)

        # Of all queries and of all keys of the token.
        whole_squares: list[jax.Array] = []
        if of_all_heads:
            places = range(G), range(G, G + 1)
            whole_squares = [mean[token] for mean in means] or [mean_square_of_all(rows) for rows in places]

        def normed(x: jax.Array, factor: jax.Array, scale: jax.Array) -> jax.Array:
            x = x.astype(f32) * scale
            if factor.dtype == f32:
                return (factor * x).astype(bf16)
            # A product of two bfloat16 is exact in float32, so it is rounded once, as in the reference.
            return (factor.astype(f32) * x.astype(bf16).astype(f32)).astype(bf16)

        def turned(parts: list[jax.Array], *, rows: bool) -> list[jax.Array]:
            a, b, *rest = parts
            a, b = a.astype(f32), b.astype(f32)
            c, s = (read(ref, (token, pl.ds(0, half)), half, rows=False) for ref in (cos, sin))
            if rows:
                c, s = _down(c), _down(s)
            return [(a * c - b * s).astype(bf16), (b * c + a * s).astype(bf16), *rest]

        def key() -> list[jax.Array]:
            parts = raw(G, rows=False)
            if k_factor is None:
                return turned(parts, rows=False)
            square = whole_squares[1] if of_all_heads else mean_square(parts, axis=0)
            index = (head,) if of_all_heads else ()
            factors = [read(k_factor, (*index, pl.ds(*cut)), cut[1], rows=False) for cut in cuts]
            scale = lax.rsqrt(square + eps)
            return turned([normed(x, w, scale) for x, w in zip(parts, factors, strict=True)], rows=False)

        def tile_of_queries(start: int) -> list[jax.Array]:
            at = pl.ds(start, ROWS)
            parts = raw(at, rows=True)
            if q_factor is None:
                return turned(parts, rows=True)
            if of_all_heads:
                scales = [lax.rsqrt(whole_squares[0] + eps)] * len(cuts)
                factors = [read(q_factor, (head, at, pl.ds(*cut)), cut[1], rows=True) for cut in cuts]
            else:
                scale = lax.rsqrt(mean_square(parts, axis=1) + eps)
                scales = [_along(scale, columns) for _, columns in cuts]
                factors = [_down(read(q_factor, (pl.ds(*cut),), cut[1], rows=False)) for cut in cuts]
            return turned([normed(*each) for each in zip(parts, factors, scales, strict=True)], rows=True)

        k, value = key(), raw(G + 1, rows=False)
        # The last tile may repeat rows of the one before.
        starts = [min(start, G - ROWS) for start in range(0, G, ROWS)]
        q = [tile_of_queries(start) for start in starts]
        page, offset = pages[token], offsets[token]
        # All loads come before the first store: the compiler moves no load across a store.
        for (first, columns), part, v in zip(cuts, k, value, strict=True):
            keys[page, offset, head, pl.ds(first, columns)] = part
            values[page, offset, head, pl.ds(first, columns)] = v
        for start, parts in zip(starts, q, strict=True):
            for (first, columns), part in zip(cuts, parts, strict=True):
                queries[token, head, pl.ds(start, ROWS), pl.ds(first, columns)] = part

    keys, values, queries = run_in_place(
        gqa_write,
        (qkv, cos, sin, pages, offsets, *arrays),
        (k_cache, v_cache),
        (jax.ShapeDtypeStruct((T, K, G, D), qkv.dtype),),
        scratch_types={},
        grid=(T, K),
        grid_names=("token", "head"),
        # No approximate square root, so that rounding is as in the reference.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )
    return keys, values, queries
