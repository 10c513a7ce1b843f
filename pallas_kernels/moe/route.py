"""The routing of a layer as one small Mosaic GPU kernel: scores, groups, the k best experts, their weights.

XLA makes five of it, and small kernels of a decode step cost 2.2 microseconds each on an H200, however little they do.
Where slots are shared (a few tokens) the tables of `schedule` come out of the same launch.

A block takes ROWS tokens. Each warp keeps two rows of scores in registers and picks one expert after the other: the
largest score, and among equals the lowest index, are two reductions by integer `redux.sync`, one instruction for a whole
warp, which is why scores are compared as integers of the same order. No two warps have to meet before the tables.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_obstacle
from pallas_kernels.compat import load
from pallas_kernels.moe.schedule import Schedule
from pallas_kernels.moe.tables import AS_ROWS, BLOCK, slot_ends, slot_experts

# Tokens of a block: two for each of its warps, so that the latency of one's reductions hides behind the other's.
ROWS = 8
# Columns of a tile are a multiple of this, and one such multiple holds a token's weights.
COLUMNS = BLOCK
# A row of scores lies in one warp, two columns in each lane.
TILE = plgpu.Layout.TILED(plgpu.Tiling(((4, COLUMNS), (2,))), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1)
# The chosen ids of a block: 8 of each token, held twice.
CHOSEN = plgpu.Layout.TILED(
    plgpu.Tiling(((ROWS, 8), (2, 8), (1,))), warp_dims=(-5,), lane_dims=(-3, -2, plgpu.Replicated(2)), vector_dim=-1
)

# Tiles of scores, their keys and the order of choice stay in registers.
MAX_EXPERTS = 512
# One bit each.
MAX_GROUPS = 31

# Keys of -infinity and of what has been chosen already, below them all.
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
        """Columns of the kernel's ids."""
        return -(-self.top_k // 8) * 8


def obstacle(logits: jax.Array, routing: Routing) -> str | None:
    """Why this kernel cannot take a call, None if it can."""
    E = logits.shape[1]
    if E > MAX_EXPERTS or routing.top_k > COLUMNS or routing.num_groups > MAX_GROUPS:
        return (
            f"it takes up to {MAX_EXPERTS} experts, {COLUMNS} of a token and {MAX_GROUPS} groups, "
            f"not {E}, {routing.top_k} and {routing.num_groups}"
        )
    if logits.dtype != jnp.float32:
        return f"it needs float32 logits, not {logits.dtype}"
    return hopper_obstacle()


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def route(
    logits: jax.Array, bias: jax.Array | None, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """As `api.route_sigmoid`, or `api.route_softmax` where the bias is None: weights and ids [T, k]."""
    T, k = logits.shape[0], routing.top_k
    weights, ids, _ = route_padded(logits, bias, jnp.ones(T, bool), routing=routing, interpret=interpret)
    return weights[:T, :k], ids[:T, :k]


@functools.partial(jax.jit, static_argnames=("routing", "interpret"))
def route_padded(
    logits: jax.Array, bias: jax.Array | None, live: jax.Array, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `route`, in rows of COLUMNS weights and of `routing.width` ids, and with rows past the last token's.

    Ids are E there, past the k-th, and of tokens that are not live. The third is a 0, int32 [1], for a kernel that counts.
    """
    T, E = logits.shape
    run = _route(T, E, bias is not None, routing, None, interpret)
    weights, chosen, zero = run(*_inputs(logits, bias, live))
    return weights, chosen.reshape(-1, routing.width), zero


def assign(
    logits: jax.Array, bias: jax.Array | None, live: jax.Array, *, routing: Routing, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """Weights float32 [T, k], and ids as `plan.plan_assigned` takes them.

    Those are int32 [blocks, ROWS * width], `routing.width` for each token; E where a token is not live or there is none.
    """
    weights, ids, _ = route_padded(logits, bias, live, routing=routing, interpret=interpret)
    return weights[: logits.shape[0], : routing.top_k], ids.reshape(-1, BLOCK)


def route_and_plan(
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    rows: int,
    slots: int,
    *,
    routing: Routing,
    interpret: Any = False,
) -> tuple[jax.Array, Schedule]:
    """Weights float32 [T, k] and the tables of `schedule` for shared slots, of T <= ROWS tokens."""
    T, E = logits.shape
    run = _route(T, E, bias is not None, routing, (rows, slots), interpret)
    weights, num_slots, expert, place = run(*_inputs(logits, bias, live))
    token = jnp.zeros(slots * rows, jnp.int32)  # Nobody reads it.
    return weights[:T, : routing.top_k], Schedule(num_slots, expert, token, place[:T, : routing.top_k])


def _inputs(logits: jax.Array, bias: jax.Array | None, live: jax.Array) -> list[jax.Array]:
    """What the kernel reads; of what is padded here, a decode step of a large model needs only `live`, once."""
    T, E = logits.shape
    rows, columns = -T % ROWS if T > ROWS else 0, -E % COLUMNS
    logits = jnp.pad(logits, ((0, rows), (0, columns)), constant_values=-jnp.inf)
    biases = [] if bias is None else [jnp.pad(bias, (0, columns))]
    return [logits, *biases, live_flags(live)]


def live_flags(live: jax.Array) -> jax.Array:
    """int32, of a multiple of ROWS tokens; the same for every kernel that asks, so that a step makes them once."""
    return jnp.pad(live.astype(jnp.int32), (0, -live.shape[0] % ROWS))


def _iota(shape: tuple[int, ...], axis: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=TILE)


def _along(vector: jax.Array, size: int) -> jax.Array:
    """[rows] as [rows, size]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (vector.shape[0], size), (0,)), TILE)


def _down(vector: jax.Array) -> jax.Array:
    """[columns] as [ROWS, columns]."""
    return plgpu.layout_cast(lax.broadcast_in_dim(vector, (ROWS, vector.shape[0]), (1,)), TILE)


def _const(value: float, like: jax.Array) -> jax.Array:
    return jnp.full(like.shape, value, like.dtype)


def _keys(x: jax.Array) -> jax.Array:
    """Integers in the order of `reference.ranks`: NaN as infinity. There is no -0 among scores, biased or not.

    They are unsigned because Mosaic's select takes its signedness from the mask where the first value is a constant: a
    maximum of such int32 would be that of uint32.
    """
    bits = lax.bitcast_convert_type(jnp.where(jnp.isnan(x), _const(jnp.inf, x), x), jnp.uint32)
    return jnp.where(bits >= _const(SIGN, bits), bits ^ _const(ALL, bits), bits ^ _const(SIGN, bits))


def _values(keys: jax.Array) -> jax.Array:
    """The floats of keys."""
    bits = jnp.where(keys >= _const(SIGN, keys), keys ^ _const(SIGN, keys), keys ^ _const(ALL, keys))
    return lax.bitcast_convert_type(bits, jnp.float32)


def _first(keys: jax.Array, columns: jax.Array, end: int) -> jax.Array:
    """The lowest column of each row, of those below the end, with the row's largest key."""
    best = _along(keys.max(axis=1), keys.shape[1])
    # A maximum, because Mosaic makes no single instruction of a minimum.
    return end - jnp.where(keys == best, end - columns, _const(0, columns)).max(axis=1)


def _group_keys(keys: jax.Array, columns: jax.Array, groups: int, size: int, *, best_two: bool) -> list[jax.Array]:
    """By group: keys [ROWS] of its best score, or of the sum of its two best."""
    found = []
    for start in range(0, groups * size, size):
        low, high = start // COLUMNS * COLUMNS, -(-(start + size) // COLUMNS) * COLUMNS
        part, column = (lax.slice(a, (0, low), (ROWS, high)) for a in (keys, columns))
        if (low, high) != (start, start + size):
            part = jnp.where((column >= start) & (column < start + size), part, _const(TAKEN, part))
        best = part.max(axis=1)
        if best_two and size > 1:
            mine = column == _along(_first(part, column, high), high - low)
            second = jnp.where(mine, _const(TAKEN, part), part).max(axis=1)
            best = _keys(_values(best) + _values(second))
        found.append(best)
    return found


def _kept_groups(found: list[jax.Array], top_groups: int) -> jax.Array:
    """int32 [ROWS]: a bit for each of the best groups, the lower index first among equals."""
    kept = jnp.zeros(found[0].shape, jnp.int32)
    for g, mine in enumerate(found):
        before = jnp.zeros(mine.shape, jnp.int32)
        for h, other in enumerate(found):
            if h != g:
                ahead = other >= mine if h < g else other > mine
                before += jnp.where(ahead, _const(1, before), _const(0, before))
        kept += jnp.where(before < top_groups, _const(1 << g, kept), _const(0, kept))
    return kept


@functools.cache
def _route(T: int, E: int, biased: bool, r: Routing, tables: tuple[int, int] | None, interpret: Any) -> Any:
    """kernel(logits [T or a multiple of ROWS, experts], bias [experts] if biased, live [a multiple of ROWS]).

    experts is E, padded by -infinity. Gives weights [padded T, COLUMNS], chosen ids [blocks, ROWS, width] and a 0; or, for
    tables = (rows, slots), instead of these two: num_slots, expert, and place [ROWS, COLUMNS].
    """
    int32 = jnp.int32
    experts, padded = -(-E // COLUMNS) * COLUMNS, -(-T // ROWS) * ROWS
    k = r.top_k
    rows, slots = tables or (0, 0)

    def rows_of(logits, block):
        """This block's logits [ROWS, experts]."""
        if T >= ROWS:
            return load(logits, (pl.ds(block * ROWS, ROWS),), layout=TILE)
        tile = _down(load(logits, (0,), layout=TILE.reduce(0)))
        for t in range(1, T):
            row = _down(load(logits, (t,), layout=TILE.reduce(0)))
            tile = jnp.where(_iota(tile.shape, 0) == t, row, tile)
        return tile

    def choose(logits, bias):
        """order [ROWS, experts], j for the j-th choice and -1 for none; ids and weights [ROWS, COLUMNS]."""
        if bias is None:
            powers = jnp.exp(logits - _along(logits.max(axis=1), experts))
            scores = choice = powers / _along(powers.sum(axis=1), experts)
        else:
            scores = 1.0 / (1.0 + jnp.exp(-logits))
            choice = scores + bias
        columns = _iota((ROWS, experts), 1)
        keys = _keys(choice)
        if experts > E:
            keys = jnp.where(columns < E, keys, _const(BOTTOM, keys))
        if r.num_groups > 1:
            size = E // r.num_groups
            found = _group_keys(keys, columns, r.num_groups, size, best_two=bias is not None)
            kept = _kept_groups(found, r.top_groups)
            group = jnp.minimum(lax.div(columns, _const(size, columns)), MAX_GROUPS)
            mine = lax.shift_right_logical(_along(kept, experts), group) & 1
            keys = jnp.where(mine == 1, keys, _const(BOTTOM, keys))
        bits = lax.bitcast_convert_type(scores, int32)
        column = _iota((ROWS, COLUMNS), 1)

        def pick(j, carry):
            keys, order, ids, weights = carry
            chosen = _first(keys, columns, experts)
            mine, rest = columns == _along(chosen, experts), columns != _along(chosen, experts)
            # Bits, for a sum of integers is one instruction too.
            score = jnp.where(mine, bits, _const(0, bits)).sum(axis=1)
            return (
                jnp.where(rest, keys, _const(TAKEN, keys)),
                jnp.where(rest, order, jnp.full(order.shape, j, int32)),
                jnp.where(column == j, _along(chosen, COLUMNS), ids),
                jnp.where(column == j, _along(score, COLUMNS), weights),
            )

        def filled(value, size):
            return plgpu.layout_cast(jnp.full((ROWS, size), value, int32), TILE)

        carry = (keys, filled(-1, experts), filled(E, COLUMNS), filled(0, COLUMNS))
        _, order, ids, weights = lax.fori_loop(0, k, pick, carry)
        weights = lax.bitcast_convert_type(weights, jnp.float32)
        if r.normalize:
            weights = weights / (_along(weights.sum(axis=1), COLUMNS) + 1e-20)
        return order, ids, weights * r.scale

    def inputs(refs, block):
        logits, *bias, live = refs
        bias = _down(load(bias[0], (pl.ds(0, experts),), layout=TILE.reduce(0))) if biased else None
        return rows_of(logits, block), bias, load(live, (pl.ds(block * ROWS, ROWS),), layout=TILE.reduce(1))

    def route_body(*refs, ids_smem):
        *given, weights, chosen, zero = refs
        block = lax.axis_index("block")

        @pl.when(block == 0)
        def _():
            zero[0] = int32(0)

        logits, bias, live = inputs(given, block)
        _, ids, weights[pl.ds(block * ROWS, ROWS)] = choose(logits, bias)
        ids_smem[...] = jnp.where(_along(live, COLUMNS) == 1, ids, _const(E, ids))
        chosen[block] = load(ids_smem, (slice(None), pl.ds(0, r.width)), layout=CHOSEN)

    def plan_body(*refs, order_smem, used_smem, ends_smem):
        *given, weights, num_slots, expert, place = refs
        logits, bias, live = inputs(given, 0)
        order, _, weights[...] = choose(logits, bias)
        order = jnp.where(_along(live, experts) == 1, order, _const(-1, order))
        order_smem[...] = order
        used = load(order_smem, (0,), layout=AS_ROWS)
        for t in range(1, T):
            used = jnp.maximum(used, load(order_smem, (t,), layout=AS_ROWS))
        used_smem[...] = jnp.where(used >= 0, _const(1, used), _const(0, used))
        ends_smem[...] = slot_ends(used_smem)
        num_slots[0] = ends_smem[experts - 1]
        for first in range(0, slots, BLOCK):
            expert[pl.ds(first, BLOCK)] = slot_experts(ends_smem, first)
        # The rows of a slot are the tokens.
        starts = _down(load(ends_smem, (pl.ds(0, experts),), layout=TILE.reduce(0))) * rows - rows
        starts = starts + _iota((ROWS, experts), 0)
        column = _iota((ROWS, COLUMNS), 1)
        places = _const(0, column)
        for j in range(k):
            start = jnp.where(order == j, starts, _const(0, starts)).sum(axis=1)
            places = jnp.where(column == j, _along(start, COLUMNS), places)
        place[...] = places

    body: Any
    rest: list[tuple[int, ...]]
    if tables is None:
        body, name = route_body, "moe_route"
        rest = [(padded // ROWS, ROWS, r.width), (1,)]
        scratch = {"ids_smem": plgpu.SMEM((ROWS, COLUMNS), int32)}
    else:
        body, name = plan_body, "moe_route_plan"
        rest = [(1,), (-(-slots // BLOCK) * BLOCK,), (ROWS, COLUMNS)]
        scratch = {
            "order_smem": plgpu.SMEM((ROWS, experts), int32),
            "used_smem": plgpu.SMEM((experts,), int32),
            "ends_smem": plgpu.SMEM((experts,), int32),
        }
    body.__name__ = name
    return plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((padded, COLUMNS), jnp.float32),
            *(jax.ShapeDtypeStruct(shape, int32) for shape in rest),
        ],
        scratch_types=scratch,
        grid=(padded // ROWS,),
        grid_names=("block",),
        interpret=interpret,
        # Exact exp and division: approximate ones would move scores that nearly tie.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
    )
