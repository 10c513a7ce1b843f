"""Mixture of experts: routing, and the routed and shared experts.

Which files run, by the tokens T of a call:

| T                                   | routing             | slot tables         | experts            |
|-------------------------------------|---------------------|---------------------|--------------------|
| 1, if `Tuning.one_token_experts`    | in the same kernel  | none                | `one_token.py`     |
| 1, the same on several devices      | `routing.py`        | none                | `one_token.py`     |
| 1, with biases or a clamp           | as for several      |                     |                    |
| 1 to 8 (few)                        | `dispatch_fused.py` | in the same kernel  | `mosaic.py`        |
| 9 to `Tuning.route_plan_tokens`     | `dispatch_meet.py`  | in the same kernel  | `mosaic.py`        |
| 9 and more, <= 1024 assignments     | `routing.py`        | `dispatch_small.py` | `mosaic.py`        |
| more (prefill)                      | `routing.py`        | `dispatch_large.py` | `mosaic.py`        |
| any, if no kernel supports the call | `reference.py`      | none                | `reference.py`     |

Weights with codes of four bits have matmuls of their own in `mosaic.py`: `packed_matmul.py`. So have those in FP8, whose
activations are FP8 too: `fp8_matmul.py`. Both also for one token, except INT4 and FP8 in blocks where `Tuning.one_token_int4`
and `one_token_fp8` say so. Quantised shared experts and dense MLPs run on these matmuls too:
`quantised_mlp.py`; the bfloat16 MLPs of a decode step's dense layers on the experts': `dense_mlp.py`.

`dispatch_meet.py` needs a counter, which the router's kernel (`logit_parts`) makes; without one two kernels run.

`mosaic.py` runs the steps in its rows one after another; its matmuls are in `grouped_matmul.py`, and from 9 tokens on
`gather.py` collects their rows. Called by itself, `experts` uses `dispatch_small.py` for few tokens too.

`slots.py` says what the tables hold, `config.py` how a call is cut; `selection.py` and `dispatch_tiles.py` are parts of
kernels.
"""

import dataclasses
from typing import Any

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import REFERENCES, W8A8, choose, current
from pallas_kernels.moe import combine, dense_mlp, mosaic, one_token, quantised_mlp, reference, router, routing
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.norm_linear.api import norms_apart
from pallas_kernels.norm_linear.reference import whole
from pallas_kernels.quant.values import Weight, unquantised_reason


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

    Scores are sigmoid(logits). A bias that affects only the choice is added; a group counts by the sum of its two best
    biased scores; the best `top_groups` groups stay; the weights are the unbiased scores of the chosen experts.

    Args:
        logits: float32 [T, E], or parts of them (`logit_parts`), whose T is padded.
        bias: float32 [E].
        top_k: experts of a token.
        num_groups: groups of E / num_groups experts each, of which `top_groups` stay.
        normalize: whether the weights are divided by their sum.
        scale: what the weights are multiplied by.

    Returns:
        weights float32 [T, top_k] and expert ids int32 [T, top_k].
    """
    return _route(logits, bias, Routing(top_k, num_groups, top_groups, normalize, scale))


def route_softmax(
    logits: jax.Array, *, top_k: int, num_groups: int, top_groups: int, normalize: bool, scale: float
) -> tuple[jax.Array, jax.Array]:
    """DeepSeek-V2 routing (arXiv 2405.04434 section 2.2): softmax scores; a group counts by its best score.

    Args:
        logits: float32 [T, E], or parts of them (`logit_parts`), whose T is padded.
        top_k, num_groups, top_groups, normalize, scale: as in `route_sigmoid`.

    Returns:
        weights float32 [T, top_k] and expert ids int32 [T, top_k].
    """
    return _route(logits, None, Routing(top_k, num_groups, top_groups, normalize, scale))


def splits_router(x: jax.Array, weight: jax.Array) -> bool:
    """Whether the logits x weight^T are best computed by `logit_parts`.

    Args:
        x: [T, H] what the router reads, or what it is the norm of. weight: [E, H] of the router.
    """
    choices = tuning.current()
    if not choices.norm_linear_tokens < x.shape[0] <= choices.router_tokens:
        return False
    return choose("moe_router", _wanted_beside(), {"mosaic": router.unsupported_reason(x, weight)}) == "mosaic"


def logit_parts(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits x weight^T as float32 [parts, >= T, E], whose sum they are: routing takes them as it takes logits.

    The second result is `zero` of `routed_experts`.

    Args:
        x: [T, H]. weight: float32 [E, H].
    """
    return router.logit_parts(x, weight)


def experts(
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Weighted sum of the routed experts' SwiGLU outputs, plus the output of the shared experts, plus the residual.

    Args:
        x: [T, H].
        weights: float32 [T, k]. ids: int32 [T, k].
        live: bool [T]; tokens that are not live reach no expert and give 0.
        residual: [T, H] added to the sum after it is rounded to x's dtype.

    Returns:
        [T, H] in x's dtype.

    Raises:
        UnsupportedError: the requested backend (`backend.Backends.moe`) does not support this call.
    """
    return _experts(_experts_backend(x, parameters), x, parameters, weights, ids, live, residual)


def routed_experts(
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    residual: jax.Array | None = None,
    zero: jax.Array | None = None,
    *,
    top_k: int,
    num_groups: int,
    top_groups: int,
    normalize: bool,
    scale: float,
) -> jax.Array:
    """`experts` of what `route_sigmoid`, or where the bias is None `route_softmax`, chooses.

    Together, because kernels for both need fewer launches than one after the other.

    Args:
        logits: float32 [T, E], or parts of them (`logit_parts`).
        bias, top_k, num_groups, top_groups, normalize, scale: as in `route_sigmoid`.
        x, parameters, live, residual: as in `experts`.
        zero: int32 [1], a 0 for a kernel that needs a counter, if one is there; nothing else may read it later.

    Returns:
        [T, H] in x's dtype.

    Raises:
        UnsupportedError: the requested backend (`backend.Backends.moe`) does not support this call.
    """
    options = Routing(top_k, num_groups, top_groups, normalize, scale)
    backend = _experts_backend(x, parameters)
    route_backend = _route_backend(logits, options)
    kernels = backend == route_backend == "mosaic"
    if kernels and one_token.supports(x, parameters, top_k):
        if parameters.first is None:
            return one_token.routed_experts(x, parameters, logits, bias, live, residual, zero, routing=options)
        # With their padding: to cut them to k would be two launches.
        weights, ids, zero = routing.route_padded(logits, bias, live, routing=options)
        return one_token.experts(x, parameters, weights, ids, live, residual, zero, k=top_k)
    if not kernels or parameters.first is not None:
        weights, ids = (a[: x.shape[0]] for a in _route_on(route_backend, logits, bias, options))
        return _experts(backend, x, parameters, weights, ids, live, residual)
    out = mosaic.routed_experts(x, parameters, logits, bias, live, zero, routing=options)
    return out if residual is None else residual + out


def add_routed_experts(
    residual: jax.Array,
    x: jax.Array,
    parameters: ExpertWeights,
    logits: jax.Array,
    bias: jax.Array | None,
    live: jax.Array,
    following: tuple[jax.Array, float] | None = None,
    zero: jax.Array | None = None,
    **options: Any,
) -> tuple[jax.Array, jax.Array | None]:
    """`routed_experts` with a residual, and where one kernel makes both, the RMS norm of the result.

    Args:
        following: weight [H] and eps of that norm; None for no norm.
        zero and others: as in `routed_experts`.

    Returns:
        [T, H] in x's dtype, and its norm [T, H], or None where whoever needs the norm has to make it.

    Raises:
        UnsupportedError: the requested backend (`backend.Backends.moe`) does not support this call.
    """
    if following is not None and norms_apart(x.shape[0]):
        routing_options = Routing(**options)
        backends = _experts_backend(x, parameters), _route_backend(logits, routing_options)
        reason = combine.unsupported_reason(residual, following[0])
        if backends == ("mosaic", "mosaic") and choose("moe_combine", "auto", {"mosaic": reason}) == "mosaic":
            return mosaic.add_and_norm(
                x, parameters, logits, bias, live, residual, following[0], zero,
                routing=routing_options, eps=following[1],
            )  # fmt: skip
    return routed_experts(x, parameters, logits, bias, live, residual, zero, **options), None


def experts_obstacle(dtype: Any, parameters: ExpertWeights) -> str | None:
    """Why no kernel here supports these experts, or None if one does.

    Args:
        dtype: of activations.
        parameters: their shapes and dtypes are enough, but it takes all of them: what is left out may be what a kernel lacks.
    """
    return mosaic.unsupported_reason(jax.ShapeDtypeStruct((1, parameters.gate_up.shape[-1]), dtype), parameters)


def mlp(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """The MLP of a dense layer, down(silu(gate x) * up x): [T, H] in x's dtype.

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I].
    """
    return whole(mlp_to_add(x, gate_up, down))


def mlp_to_add(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """`mlp` for the `delta` of `norm_linear`: [T, H], or parts of it as `linear_to_add` gives them."""
    if not unquantised_reason(gate_up, down):
        assert isinstance(gate_up, jax.Array)
        assert isinstance(down, jax.Array)
        choices = tuning.current()
        fits = choices.norm_linear_tokens < x.shape[0] <= choices.mlp_kernel_tokens
        if fits and dense_mlp.worthwhile(down.shape[1]):
            reason = dense_mlp.unsupported_reason(x, gate_up, down)
            if choose("dense_mlp", _wanted_beside(), {"mosaic": reason}) == "mosaic":
                return dense_mlp.mlp_to_add(x, gate_up, down)
        return reference.swiglu(x, gate_up, down)
    reason = quantised_mlp.unsupported_reason(x, gate_up, down)
    # The option is about experts; where it asks for their kernels, plain XLA may still run this.
    wanted = "auto" if current().moe == "mosaic" else current().moe
    backend = choose("mlp", wanted, {"mosaic": reason}, references=REFERENCES)
    if backend == "mosaic":
        return quantised_mlp.mlp(x, gate_up, down)
    return reference.swiglu(x, gate_up, down, w8a8=backend == W8A8)


def mlp_obstacle(dtype: Any, gate_up: Weight, down: Weight) -> str | None:
    """Why no kernel here supports the quantised MLP of a dense layer, or None if one does or it is not quantised.

    Args:
        dtype: of activations.
        gate_up, down: their shapes and dtypes are enough.
    """
    if not unquantised_reason(gate_up, down):
        return None
    x = jax.ShapeDtypeStruct((1, gate_up.shape[-1]), dtype)
    return quantised_mlp.unsupported_reason(x, gate_up, down)


def _experts_backend(x: jax.Array, parameters: ExpertWeights) -> str:
    reasons = {"mosaic": mosaic.unsupported_reason(x, parameters)}
    return choose("moe", current().moe, reasons, references=REFERENCES)


def _experts(
    backend: str,
    x: jax.Array,
    parameters: ExpertWeights,
    weights: jax.Array,
    ids: jax.Array,
    live: jax.Array,
    residual: jax.Array | None,
) -> jax.Array:
    if backend != "mosaic":
        out = reference.experts(x, parameters, weights, ids, live, w8a8=backend == W8A8)
    elif one_token.supports(x, parameters, ids.shape[1]):
        return one_token.experts(x, parameters, weights, ids, live, residual, k=ids.shape[1])
    else:
        out = mosaic.experts(x, parameters, weights, ids, live)
    return out if residual is None else residual + out


def _wanted_beside() -> str:
    """Of operations beside the experts, whose option it is: without a kernel they run in plain XLA instead of raising."""
    return {"mosaic": "auto", W8A8: "reference"}.get(current().moe, current().moe)


def _route_backend(logits: jax.Array, options: Routing) -> str:
    return choose("moe_route", _wanted_beside(), {"mosaic": routing.unsupported_reason(logits, options)})


def _route(logits: jax.Array, bias: jax.Array | None, options: Routing) -> tuple[jax.Array, jax.Array]:
    return _route_on(_route_backend(logits, options), logits, bias, options)


def _route_on(backend: str, logits: jax.Array, bias: jax.Array | None, options: Routing) -> tuple[jax.Array, jax.Array]:
    if backend == "mosaic":
        return routing.route(logits, bias, routing=options)
    logits = logits.sum(axis=0) if logits.ndim == 3 else logits
    if bias is None:
        return reference.route_softmax(logits, **dataclasses.asdict(options))
    return reference.route_sigmoid(logits, bias, **dataclasses.asdict(options))
