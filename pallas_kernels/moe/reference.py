"""Plain XLA: every expert sees every token, and weights of 0 drop what was not routed there.

That reads each expert once, which is what memory-bound decoding costs anyway, and needs no sort.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Bounds the [tokens, experts, inner] intermediate.
TOKEN_BLOCK = 256


def _keep_best_groups(scores: jax.Array, group_scores: jax.Array, top_groups: int) -> jax.Array:
    """scores [T, E] with -inf in all but the best groups, chosen by group_scores [T, groups]."""
    T, E = scores.shape
    num_groups = group_scores.shape[1]
    _, best = lax.top_k(group_scores, top_groups)
    kept = jnp.zeros((T, num_groups), bool).at[jnp.arange(T)[:, None], best].set(True)
    return jnp.where(jnp.repeat(kept, E // num_groups, axis=1), scores, -jnp.inf)


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
        best_two, _ = lax.top_k(biased.reshape(T, num_groups, E // num_groups), 2)
        biased = _keep_best_groups(biased, best_two.sum(axis=-1), top_groups)
    _, ids = lax.top_k(biased, top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return weights * scale, ids


def route_softmax(
    logits: jax.Array, *, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    T, E = logits.shape
    scores = jax.nn.softmax(logits, axis=1)
    chosen = scores
    if num_groups > 1:
        chosen = _keep_best_groups(scores, scores.reshape(T, num_groups, E // num_groups).max(axis=-1), top_groups)
    _, ids = lax.top_k(chosen, top_k)
    weights = jnp.take_along_axis(scores, ids, axis=1)
    if normalize:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    return weights * scale, ids


def experts(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, weights: jax.Array, ids: jax.Array, live: jax.Array
) -> jax.Array:
    T = x.shape[0]
    E = gate_up.shape[0]
    weights = jnp.where(live[:, None], weights, 0.0)
    share_TE = jnp.zeros((T, E), jnp.float32).at[jnp.arange(T)[:, None], ids].add(weights)

    def block(args):
        x_TH, share_TE = args
        gate_up_TEGI = jnp.einsum("th,egih->tegi", x_TH, gate_up)
        inner_TEI = jax.nn.silu(gate_up_TEGI[:, :, 0]) * gate_up_TEGI[:, :, 1]
        out_ETH = jnp.einsum("tei,ehi->eth", inner_TEI, down, preferred_element_type=jnp.float32)
        return jnp.einsum("eth,te->th", out_ETH, share_TE).astype(x.dtype)

    if T <= TOKEN_BLOCK:
        return block((x, share_TE))
    padded = -(-T // TOKEN_BLOCK) * TOKEN_BLOCK
    blocks = jax.tree.map(
        lambda a: jnp.pad(a, ((0, padded - T), (0, 0))).reshape(-1, TOKEN_BLOCK, a.shape[1]), (x, share_TE)
    )
    return lax.map(block, blocks).reshape(padded, -1)[:T]
