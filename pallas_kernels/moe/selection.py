"""The choice of experts in registers, which the kernels of `routing.py` and `dispatch_fused.py` share.

A block has ROWS tokens. Each warp keeps two rows of scores in registers and picks one expert after another: the largest
score, and the lowest index among equals, are two reductions by integer `redux.sync`, one instruction for a whole warp.
That is why scores are compared as integers of the same order. No two warps have to wait for each other.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load
from pallas_kernels.moe.dispatch_tiles import BLOCK

# Tokens of a block: two for each of its warps, so that the latency of one's reductions hides behind the other's.
ROWS = 8
# Columns of a tile are a multiple of this, and one such multiple holds a token's weights.
COLUMNS = BLOCK
# A row of scores lies in one warp, two columns in each lane.
TILE = plgpu.Layout.TILED(plgpu.Tiling(((4, COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)

# Tiles of scores, their keys and the order of choice stay in registers.
MAX_EXPERTS = 512
# Experts times parts of their logits that are loaded at once: 4 registers a thread for each 64, of which little else is in use.
PARTS_TILE = 2048
# One bit each.
MAX_GROUPS = 31

# Keys of -infinity and, below them all, of experts that have been chosen already.
BOTTOM, TAKEN = 0x007FFFFF, 0
SIGN, ALL = 0x80000000, 0xFFFFFFFF


@dataclass(frozen=True)
class Routing:
    """Options of `api.route_sigmoid` and `api.route_softmax`."""

    top_k: int
    num_groups: int
    top_groups: int
    normalize: bool
    scale: float

    @property
    def width(self) -> int:
        """Columns of the ids that the routing kernel writes."""
        return -(-self.top_k // 8) * 8


def kernel_inputs(logits: jax.Array, bias: jax.Array | None, live: jax.Array) -> list[jax.Array]:
    """What `read_block` reads, padded. For a decode step of a large model only `live` needs padding, once a step.

    Logits in parts, as `router.logit_parts` gives them, need none.
    """
    E = logits.shape[-1]
    if logits.ndim == 3:
        return [logits, *([] if bias is None else [bias]), live_flags(live)]
    T = logits.shape[0]
    rows, columns = -T % ROWS if T > ROWS else 0, -E % COLUMNS
    logits = jnp.pad(logits, ((0, rows), (0, columns)), constant_values=-jnp.inf)
    biases = [] if bias is None else [jnp.pad(bias, (0, columns))]
    return [logits, *biases, live_flags(live)]


def live_flags(live: jax.Array) -> jax.Array:
    """bool [T] as int32, padded to a multiple of ROWS; equal for all kernels of a step, so that XLA makes them once."""
    return jnp.pad(live.astype(jnp.int32), (0, -live.shape[0] % ROWS))


def tokens_of_a_block(logits: Any) -> int:
    """Of the kernels that route, for [T, E] logits, or [parts, T, E] of which one block reads those of one token."""
    return 1 if len(logits.shape) == 3 and logits.shape[0] >= ROWS else ROWS


def read_token(refs: Any, token: Any, sums_smem: Any) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """As `read_block` for one token, whose logits are in all rows; its live flag is a scalar.

    A row of the block's registers sums every ROWS-th part, so that all loads of a few parts are in flight together.

    Args:
        sums_smem: scratch float32 [ROWS, experts].
    """
    parts, *biases, live = refs
    count, _, experts = parts.shape
    zero = plgpu.layout_cast(jnp.zeros((ROWS, experts), jnp.float32), TILE)
    total = zero
    starts = [*range(0, count - ROWS, ROWS), count - ROWS]
    tiles = [load(parts, (pl.ds(start, ROWS), token), layout=TILE) for start in starts]
    # The last ones overlap those before them.
    tiles[-1] = jnp.where(iota(zero.shape, 0) >= len(starts) * ROWS - count, tiles[-1], zero)
    for tile in tiles:
        total = total + tile
    sums_smem[...] = total
    logits = zero
    for row in range(ROWS):
        logits = logits + down_columns(load(sums_smem, (row,), layout=TILE.reduce(0)))
    bias = down_columns(load(biases[0], (pl.ds(0, experts),), layout=TILE.reduce(0))) if biases else None
    return logits, bias, live[token]


def read_block(refs: Any, block: Any, T: int) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Logits and bias [ROWS, experts] and live flags [ROWS] of a block, from references to `kernel_inputs` of T tokens."""
    logits, *biases, live = refs
    experts = logits.shape[-1]
    bias = down_columns(load(biases[0], (pl.ds(0, experts),), layout=TILE.reduce(0))) if biases else None
    return _read_logits(logits, block, T), bias, load(live, (pl.ds(block * ROWS, ROWS),), layout=TILE.reduce(1))


def _read_logits(logits: Any, block: Any, T: int) -> jax.Array:
    if len(logits.shape) == 3:
        return _summed_parts(logits, block)
    if T >= ROWS:
        return load(logits, (pl.ds(block * ROWS, ROWS),), layout=TILE)
    tile = down_columns(load(logits, (0,), layout=TILE.reduce(0)))
    for t in range(1, T):
        row = down_columns(load(logits, (t,), layout=TILE.reduce(0)))
        tile = jnp.where(iota(tile.shape, 0) == t, row, tile)
    return tile


def _summed_parts(parts: Any, block: Any) -> jax.Array:
    """The logits [ROWS, experts] of a block from their parts [parts, >= T, experts], summed in order."""
    count, _, experts = parts.shape
    at_once = math.gcd(count, max(PARTS_TILE // experts, 1))

    def add(i: Any, total: jax.Array) -> jax.Array:
        # Loads of a round are in flight together.
        rows = pl.ds(block * ROWS, ROWS)
        tiles = [load(parts, (i * at_once + j, rows), layout=TILE) for j in range(at_once)]
        for tile in tiles:
            total = total + tile
        return total

    zero = plgpu.layout_cast(jnp.zeros((ROWS, experts), jnp.float32), TILE)
    return lax.fori_loop(0, count // at_once, add, zero)


def select_experts(
    logits: jax.Array, bias: jax.Array | None, E: int, r: Routing
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Chooses the experts of a block's tokens.

    Args:
        logits, bias: [ROWS, experts] in registers, as `read_block` gives them; experts is E, padded.

    Returns:
        order int32 [ROWS, experts]: j for the j-th choice, -1 for experts that are not chosen; ids int32 and weights
        float32 [ROWS, COLUMNS], of which the first top_k columns count; the other ids are E.
    """
    int32 = jnp.int32
    experts = logits.shape[1]
    if bias is None:
        powers = jnp.exp(logits - along_rows(logits.max(axis=1), experts))
        scores = choice = powers / along_rows(powers.sum(axis=1), experts)
    else:
        scores = 1.0 / (1.0 + jnp.exp(-logits))
        choice = scores + bias
    columns = iota((ROWS, experts), 1)
    keys = _keys(choice)
    if experts > E:
        keys = jnp.where(columns < E, keys, constant_like(BOTTOM, keys))
    if r.num_groups > 1:
        size = E // r.num_groups
        found = _group_keys(keys, columns, r.num_groups, size, best_two=bias is not None)
        kept = _kept_groups(found, r.top_groups)
        group = jnp.minimum(lax.div(columns, constant_like(size, columns)), MAX_GROUPS)
        mine = lax.shift_right_logical(along_rows(kept, experts), group) & 1
        keys = jnp.where(mine == 1, keys, constant_like(BOTTOM, keys))
    bits = lax.bitcast_convert_type(scores, int32)
    column = iota((ROWS, COLUMNS), 1)

    def pick(j, carry):
        keys, order, ids, weights = carry
        chosen = _first(keys, columns, experts)
        mine, rest = columns == along_rows(chosen, experts), columns != along_rows(chosen, experts)
        # The bits of the score, because a sum of integers is one instruction too.
        score = jnp.where(mine, bits, constant_like(0, bits)).sum(axis=1)
        return (
            jnp.where(rest, keys, constant_like(TAKEN, keys)),
            jnp.where(rest, order, jnp.full(order.shape, j, int32)),
            jnp.where(column == j, along_rows(chosen, COLUMNS), ids),
            jnp.where(column == j, along_rows(score, COLUMNS), weights),
        )

    def filled(value, size):
        return plgpu.layout_cast(jnp.full((ROWS, size), value, int32), TILE)

    carry = (keys, filled(-1, experts), filled(E, COLUMNS), filled(0, COLUMNS))
    _, order, ids, weights = lax.fori_loop(0, r.top_k, pick, carry)
    weights = lax.bitcast_convert_type(weights, jnp.float32)
    if r.normalize:
        weights = weights / (along_rows(weights.sum(axis=1), COLUMNS) + 1e-20)
    return order, ids, weights * r.scale


def iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def along_rows(vector: jax.Array, size: int) -> jax.Array:
    """[rows] as [rows, size]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (vector.shape[0], size), (0,)), TILE)


def down_columns(vector: jax.Array) -> jax.Array:
    """[columns] as [ROWS, columns]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (ROWS, vector.shape[0]), (1,)), TILE)


def constant_like(value: float, like: jax.Array) -> jax.Array:
    return jnp.full(like.shape, value, like.dtype)


def _keys(x: jax.Array) -> jax.Array:
    """uint32 keys in the order of `reference.ranks`: NaN as infinity. Scores, biased or not, are never -0.

    They are unsigned because Mosaic's select gets its signedness from the mask where the first value is a constant, and a
    maximum of such int32 values would be that of uint32.
    """
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), constant_like(jnp.inf, x), x), jnp.uint32)
    return jnp.where(
        bits >= constant_like(SIGN, bits), bits ^ constant_like(ALL, bits), bits ^ constant_like(SIGN, bits)
    )


def _values(keys: jax.Array) -> jax.Array:
    """The floats that the keys stand for."""
    bits = jnp.where(
        keys >= constant_like(SIGN, keys), keys ^ constant_like(SIGN, keys), keys ^ constant_like(ALL, keys)
    )
    return lax.bitcast_convert_type(bits, jnp.float32)


def _first(keys: jax.Array, columns: jax.Array, end: int) -> jax.Array:
    """The lowest column of each row, below `end`, that has the row's largest key."""
    best = along_rows(keys.max(axis=1), keys.shape[1])
    # A maximum, because Mosaic has no single instruction for a minimum.
    return end - jnp.where(keys == best, end - columns, constant_like(0, columns)).max(axis=1)


def _group_keys(keys: jax.Array, columns: jax.Array, groups: int, size: int, *, best_two: bool) -> list[jax.Array]:
    """For each group the keys [ROWS] of its best score, or of the sum of its two best."""
    found = []
    for start in range(0, groups * size, size):
        low, high = start // COLUMNS * COLUMNS, -(-(start + size) // COLUMNS) * COLUMNS
        part, column = (lax.slice(a, (0, low), (ROWS, high)) for a in (keys, columns))
        if (low, high) != (start, start + size):
            part = jnp.where((column >= start) & (column < start + size), part, constant_like(TAKEN, part))
        best = part.max(axis=1)
        if best_two and size > 1:
            mine = column == along_rows(_first(part, column, high), high - low)
            second = jnp.where(mine, constant_like(TAKEN, part), part).max(axis=1)
            best = _keys(_values(best) + _values(second))
        found.append(best)
    return found


def _kept_groups(found: list[jax.Array], top_groups: int) -> jax.Array:
    """int32 [ROWS]: a bit for each group that is kept, the lower index first among equals."""
    kept = jnp.zeros(found[0].shape, jnp.int32)
    for g, mine in enumerate(found):
        before = jnp.zeros(mine.shape, jnp.int32)
        for h, other in enumerate(found):
            if h != g:
                ahead = other >= mine if h < g else other > mine
                before += jnp.where(ahead, constant_like(1, before), constant_like(0, before))
        kept += jnp.where(before < top_groups, constant_like(1 << g, kept), constant_like(0, kept))
    return kept
