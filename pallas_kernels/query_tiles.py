"""How the prefill kernels cut the prompt tokens of several requests, one after another, into tiles of query rows."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

# Query rows of a tile, and of each of its two consumer warpgroups.
TILE, HALF = 128, 64
# TMA copies rows to shared memory in groups of a swizzle's eight: tiles start at a multiple.
GRANULE = 8
i32 = jnp.int32


def padded_rows(tokens: int) -> int:
    """Rows of queries that the tiles of `tokens` tokens need."""
    return max(-(-tokens // GRANULE) * GRANULE, TILE)


class Queries(NamedTuple):
    """The P tokens in T tiles of TILE rows, int32; tiles past the last request have no tokens."""

    row: jax.Array  # [T] the token of the first row, a multiple of GRANULE; may lie before the request's first
    request: jax.Array  # [T] 0..E-1
    position: jax.Array  # [T] position of the first row; may be negative if that row is not the request's
    filled: jax.Array  # [T] rows up to the request's last token in the tile, 0 if there is none
    tile_of: jax.Array  # [P] the tile of each token; any tile for padding
    row_of: jax.Array  # [P] its row in that tile


def tile_queries(token_rows: jax.Array, positions: jax.Array, num_requests: int) -> Queries:
    """Tiles of the P tokens of E requests; arguments as in `api.mla_prefill`."""
    P, E = token_rows.shape[0], num_requests
    num_tiles = (P + (TILE + GRANULE - 2) * E) // TILE  # the most that E requests can fill
    mine_EP = token_rows == jnp.arange(E, dtype=i32)[:, None]
    counts_E, first_E = mine_EP.sum(axis=1, dtype=i32), jnp.argmax(mine_EP, axis=1).astype(i32)
    aligned_E, after_E = first_E // GRANULE * GRANULE, first_E + counts_E
    tiles_E = jnp.where(counts_E > 0, -(-(after_E - aligned_E) // TILE), 0)
    ends_E = jnp.cumsum(tiles_E, dtype=i32)  # the tile after each request's last
    begins_E = ends_E - tiles_E

    tile_T = jnp.arange(num_tiles, dtype=i32)
    request_T = jnp.sum(tile_T[:, None] >= ends_E, axis=1, dtype=i32)
    used_T = request_T < E
    request_T = jnp.minimum(request_T, E - 1)
    begin_T = aligned_E[request_T] + (tile_T - begins_E[request_T]) * TILE
    row_T = jnp.where(used_T, jnp.minimum(begin_T, padded_rows(P) - TILE), 0)  # all rows exist

    rows_P = jnp.minimum(token_rows, E - 1)
    token_P = jnp.arange(P, dtype=i32)
    tile_of_P = jnp.clip(begins_E[rows_P] + (token_P - aligned_E[rows_P]) // TILE, 0, num_tiles - 1)
    return Queries(
        row=row_T,
        request=request_T,
        position=positions[first_E][request_T] + row_T - first_E[request_T],
        filled=jnp.where(used_T, jnp.minimum(after_E[request_T], begin_T + TILE) - row_T, 0),
        tile_of=tile_of_P,
        row_of=jnp.clip(token_P - row_T[tile_of_P], 0, TILE - 1),
    )
