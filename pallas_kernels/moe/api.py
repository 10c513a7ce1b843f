"""Mixture of experts: routing, and the routed experts' matmuls."""

import dataclasses

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.moe import mosaic, one_token, reference, route


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
    return _route(logits, bias, route.Routing(top_k, num_groups, top_groups, normalize, scale))


def route_softmax(
    logits: jax.Array, *, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """DeepSeek-V2 routing (arXiv 2405.04434 section 2.2): softmax scores; a group counts by its best score.

    Args:
        logits: float32 [T, E].

    Returns:
        weights float32 [T, top_k] and expert ids int32 [T, top_k].
    """
    return _route(logits, None, route.Routing(top_k, num_groups, top_groups, normalize, scale))


def experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Weighted sum of the routed experts' SwiGLU outputs, plus the output of the shared experts, plus the residual.

    Args:
        x: [T, H].
        gate_up: [E, 2, I, H], gate first. down: [E, H, I]. Both as checkpoints store them, [out, in].
        weights: float32 [T, k]. ids: int32 [T, k].
        live: bool [T]: tokens that are not live reach no expert and give 0.
        shared: gate_up [2, S, H] and down [H, S] of the shared experts, which are one MLP of their joint inner size S.
        residual: [T, H] what the sum, rounded to x's dtype, is added to.

    Returns:
        [T, H] in x's dtype.

    Raises:
        UnsupportedError: the backend that was asked for (`backend.Backends.moe`) cannot take this call.
    """
    if _experts_backend(x, gate_up, down, shared) != "mosaic":
        out = reference.experts(x, gate_up, down, weights, ids, live, shared)
    elif one_token.takes(x, gate_up, shared):
        return one_token.experts(x, gate_up, down, weights, ids, live, shared, residual, k=ids.shape[1])
    else:
        out = mosaic.experts(x, gate_up, down, weights, ids, live, shared)
    return out if residual is None else residual + out


def routed_experts(
    x: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    shared: tuple[jax.Array, jax.Array] | None = None,
    residual: jax.Array | None = None,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
) -> jax.Array:
    """`experts` of what `route_sigmoid` chooses or, where the bias is None, `route_softmax`.

    Together, because kernels for both need fewer launches than one after the other.
    """
    routing = route.Routing(top_k, num_groups, top_groups, normalize, scale)
    if _experts_backend(x, gate_up, down, shared) != "mosaic" or _route_backend(logits, routing) != "mosaic":
        weights, ids = _route(logits, bias, routing)
        return experts(x, gate_up, down, weights, ids, live, shared, residual)
    if one_token.takes(x, gate_up, shared):
        # As they are: to cut them to k would be two launches.
        weights, ids, zero = route.route_padded(logits, bias, live, routing=routing)
        return one_token.experts(x, gate_up, down, weights, ids, live, shared, residual, zero, k=top_k)
    out = mosaic.routed_experts(x, gate_up, down, logits, bias, live, shared, routing=routing)
    return out if residual is None else residual + out


def _experts_backend(
    x: jax.Array, gate_up: jax.Array, down: jax.Array, shared: tuple[jax.Array, jax.Array] | None
) -> str:
    return choose("moe", current().moe, {"mosaic": mosaic.obstacle(x, gate_up, down, shared)})


def _route_backend(logits: jax.Array, routing: route.Routing) -> str:
    # Who asks for a kernel means the experts: a routing that has none is no reason to refuse the model.
    wanted = "auto" if current().moe == "mosaic" else current().moe
    return choose("moe_route", wanted, {"mosaic": route.obstacle(logits, routing)})


def _route(logits: jax.Array, bias: jax.Array | None, routing: route.Routing) -> tuple[jax.Array, jax.Array]:
    if _route_backend(logits, routing) == "mosaic":
        return route.route(logits, bias, routing=routing)
    options = dataclasses.asdict(routing)
    if bias is None:
        return reference.route_softmax(logits, **options)
    return reference.route_sigmoid(logits, bias, **options)
