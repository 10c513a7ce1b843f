"""Plain XLA, the oracle: routing, slot tables and experts.

Every expert sees every token, and weights of 0 drop the experts that a token did not choose. That reads each expert once,
as memory-bound decoding does anyway, and needs no sort.

With `w8a8` activations are rounded to FP8 where their weight is in FP8, as the kernels of such weights round them
(`fp8_matmul.py`). In float32 what is left between these and the kernels is the order of sums.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.moe.activation import joined
from pallas_kernels.moe.fp8_config import SCHEMES
from pallas_kernels.moe.slots import SlotTables, max_slots
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant import activations
from pallas_kernels.quant.reference import dequantise, linear
from pallas_kernels.quant.values import Weight, in_schemes

# Bounds the [tokens, experts, inner] intermediate.
TOKEN_BLOCK = 256
# Pairs of scores that `ranks` compares at once. XLA compiles 2**24 (256 tokens of 256 experts) for a GPU in two seconds,
# twice as many in 18, and 2048 tokens in minutes.
PAIR_BLOCK = 1 << 24


def ranks(scores: jax.Array) -> jax.Array:
    """The rank of each score along the last axis, int32: 0 for the first in the order of `lax.top_k`.

    That order is the largest first, NaN as infinity, the lower index first among equals. Comparing all pairs is one kernel
    on a GPU; top_k is a sort, which is many kernels and cannot be recorded in a CUDA graph. More than PAIR_BLOCK pairs are
    compared in a loop over blocks of the first axis.
    """
    # Without the barrier XLA fuses a sigmoid or softmax into the comparison and recomputes it for each pair.
    scores = lax.optimization_barrier(jnp.where(jnp.isnan(scores), jnp.inf, scores))
    pairs = scores.size * scores.shape[-1]
    if pairs <= PAIR_BLOCK:
        return _compare_all(scores)
    return lax.map(_compare_all, scores, batch_size=max(1, PAIR_BLOCK * len(scores) // pairs))


def _compare_all(scores: jax.Array) -> jax.Array:
    mine, other = scores[..., :, None], scores[..., None, :]
    index = jnp.arange(scores.shape[-1])
    before = (other > mine) | ((other == mine) & (index[None, :] < index[:, None]))
    return before.sum(axis=-1, dtype=jnp.int32)


def _keep_best_groups(scores: jax.Array, group_scores: jax.Array, top_groups: int) -> jax.Array:
    """scores [T, E] with -inf in all but the best groups, chosen by group_scores [T, groups]."""
    kept = ranks(group_scores) < top_groups
    return jnp.where(jnp.repeat(kept, scores.shape[1] // kept.shape[1], axis=1), scores, -jnp.inf)


def _choose(
    scores: jax.Array, choice: jax.Array, top_k: int, *, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """Ids of the top_k experts by choice [T, E], and their weights from scores [T, E]."""
    picked_TkE = ranks(choice)[:, None, :] == jnp.arange(top_k)[:, None]
    ids = jnp.where(picked_TkE, jnp.arange(choice.shape[1], dtype=jnp.int32), 0).sum(axis=2)
    weights = jnp.where(picked_TkE, scores[:, None, :], 0.0).sum(axis=2)
    if normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return weights * scale, ids


def route_sigmoid(
    logits: jax.Array,
    bias: jax.Array,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    T, E = logits.shape
    scores = jax.nn.sigmoid(logits)
    biased = scores + bias
    if num_groups > 1:
        grouped = biased.reshape(T, num_groups, E // num_groups)
        best_two = jnp.where(ranks(grouped) < 2, grouped, 0.0).sum(axis=-1)
        biased = _keep_best_groups(biased, best_two, top_groups)
    return _choose(scores, biased, top_k, normalize=normalize, scale=scale)


def route_softmax(
    logits: jax.Array, *, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    T, E = logits.shape
    scores = jax.nn.softmax(logits, axis=1)
    chosen = scores
    if num_groups > 1:
        chosen = _keep_best_groups(scores, scores.reshape(T, num_groups, E // num_groups).max(axis=-1), top_groups)
    return _choose(scores, chosen, top_k, normalize=normalize, scale=scale)


def slot_tables(ids: jax.Array, live: jax.Array, E: int, rows: int, *, all_tokens: bool) -> SlotTables:
    """The slot tables of one layer.

    Args:
        ids: int32 [T, k], each in [0, E) where the token is live.
        live: bool [T].
        rows: token rows of a slot.
        all_tokens: every slot has all T <= rows tokens, token t in row t, so that nothing has to be gathered.
    """
    T, k = ids.shape
    slots = max_slots(T, k, E, rows, all_tokens=all_tokens)
    hot_NE = ((ids[:, :, None] == jnp.arange(E)) & live[:, None, None]).reshape(T * k, E).astype(jnp.int32)
    count_E = hot_NE.sum(axis=0)
    blocks_E = jnp.minimum(count_E, 1) if all_tokens else -(-count_E // rows)
    ends_E = jnp.cumsum(blocks_E)
    token_N = jnp.arange(T * k, dtype=jnp.int32) // k
    rank_N = token_N if all_tokens else ((jnp.cumsum(hot_NE, axis=0) - hot_NE) * hot_NE).sum(axis=1)
    first_N = ((ends_E - blocks_E) * hot_NE).sum(axis=1)
    place_N = jnp.where(jnp.repeat(live, k), first_N * rows + rank_N, 0)
    expert = jnp.minimum((ends_E[None] <= jnp.arange(slots)[:, None]).sum(axis=1), E - 1)
    owned_N = jnp.where(jnp.repeat(live, k), place_N, slots * rows)
    token = jnp.zeros(slots * rows, jnp.int32).at[owned_N].set(token_N, mode="drop")
    used = jnp.zeros(slots, jnp.int32).at[owned_N // rows].add(1, mode="drop")
    tables = SlotTables(ends_E[-1:], expert.astype(jnp.int32), used, token, place_N.reshape(T, k))
    # Without the barrier XLA fuses the sums into the gather and the combine and recomputes them for each element.
    return lax.optimization_barrier(tables)


def _multiplied(x: jax.Array, weight: Weight, *, w8a8: bool) -> jax.Array:
    """What a product with the weight has of x [..., in]."""
    if not (w8a8 and in_schemes(SCHEMES, weight)):
        return x
    return activations.dequantise(activations.quantise(x)).astype(x.dtype)


def swiglu(x: jax.Array, gate_up: Weight, down: Weight, *, w8a8: bool = False) -> jax.Array:
    """down(silu(gate x) * up x): [T, H] from x [T, H], gate_up [2, I, H] and down [H, I]."""
    gate_up_T2I = linear(_multiplied(x, gate_up, w8a8=w8a8), gate_up)
    inner_TI = joined(gate_up_T2I[:, 0], gate_up_T2I[:, 1], None)
    return linear(_multiplied(inner_TI, down, w8a8=w8a8), down)


def experts(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    *,
    w8a8: bool = False,
) -> jax.Array:
    out = routed(x, parameters, weights, ids, live, w8a8=w8a8)
    if parameters.shared is None:
        return out
    return jnp.where(live[:, None], out + swiglu(x, *parameters.shared, w8a8=w8a8), 0)


def routed(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    *,
    w8a8: bool = False,
) -> jax.Array:
    """The routed experts alone, of those that are here."""
    T = x.shape[0]
    gate_up, down = (dequantise(weight, x.dtype) for weight in (parameters.gate_up, parameters.down))
    biases = parameters.biases
    E = gate_up.shape[0]
    weights = jnp.where(live[:, None], weights, 0.0)
    if parameters.first is not None:
        ids = ids - parameters.first
        here = (ids >= 0) & (ids < E)
        weights, ids = jnp.where(here, weights, 0.0), jnp.where(here, ids, 0)
    share_TE = jnp.zeros((T, E), jnp.float32).at[jnp.arange(T)[:, None], ids].add(weights)

    def block(args):
        x_TH, share_TE = args
        gate_up_TEGI = jnp.einsum("th,egih->tegi", _multiplied(x_TH, parameters.gate_up, w8a8=w8a8), gate_up)
        if biases is not None:
            gate_up_TEGI += biases[0]
        inner_TEI = joined(gate_up_TEGI[:, :, 0], gate_up_TEGI[:, :, 1], parameters.clamp)
        inner_TEI = _multiplied(inner_TEI, parameters.down, w8a8=w8a8)
        out_ETH = jnp.einsum("tei,ehi->eth", inner_TEI, down, preferred_element_type=jnp.float32)
        if biases is not None:
            out_ETH += biases[1][:, None]
        return jnp.einsum("eth,te->th", out_ETH, share_TE).astype(x.dtype)

    if T <= TOKEN_BLOCK:
        return block((x, share_TE))
    padded = -(-T // TOKEN_BLOCK) * TOKEN_BLOCK
    blocks = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padded - T), (0, 0))).reshape(-1, TOKEN_BLOCK, a.shape[1]), (x, share_TE)
    )
    return lax.map(block, blocks).reshape(padded, -1)[:T]
