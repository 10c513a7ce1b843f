"""Mixture of experts: routing, and the routed experts' matmuls."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.moe import mosaic, reference


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
    """DeepSeek-V3 routing (arXiv 2412.19437 section 2.1.2; modeling_deepseek.py `noaux_tc`).

    Scores are sigmoid(logits). A bias that only steers the selection is added; a group counts by the sum of its two
    best biased scores; the best `top_groups` groups stay; weights are the unbiased scores of the chosen experts.

    Args:
        logits: float32 [T, E]. bias: float32 [E].

    Returns:
        weights float32 [T, top_k] and expert ids int32 [T, top_k].
    """
    return reference.route_sigmoid(
        logits,
        bias,
        top_k=top_k,
        num_groups=num_groups,
        top_groups=top_groups,
        normalize=normalize,
        scale=scale,
    )


def route_softmax(
    logits: jax.Array, *, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """DeepSeek-V2 routing (arXiv 2405.04434 section 2.2): softmax scores; a group counts by its best score.

    Args:
        logits: float32 [T, E].

    Returns:
        weights float32 [T, top_k] and expert ids int32 [T, top_k].
    """
    return reference.route_softmax(
        logits, top_k=top_k, num_groups=num_groups, top_groups=top_groups, normalize=normalize, scale=scale
    )


def experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Weighted sum of the routed experts' SwiGLU outputs, plus the output of the shared experts.

    Args:
        x: [T, H].
        gate_up: [E, 2, I, H], gate first. down: [E, H, I]. Both as checkpoints store them, [out, in].
        weights: float32 [T, k]. ids: int32 [T, k].
        live: bool [T]: tokens that are not live reach no expert and give 0.
        shared: gate_up [2, S, H] and down [H, S] of the shared experts, which are one MLP of their joint inner size S.

    Returns:
        [T, H] in x's dtype.

    Raises:
        UnsupportedError: the backend that was asked for (`backend.Backends.moe`) cannot take this call.
    """
    if choose("moe", current().moe, {"mosaic": mosaic.obstacle(x, gate_up, down, shared)}) == "mosaic":
        return mosaic.experts(x, gate_up, down, weights, ids, live, shared)
    return reference.experts(x, gate_up, down, weights, ids, live, shared)
