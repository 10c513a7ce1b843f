"""An RMS norm and the linear maps that read it."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels import tuning
from pallas_kernels.backend import choose, current
from pallas_kernels.norm_linear import add_norm, mosaic, reference, split_linear
from pallas_kernels.norm_linear import joined_linear as joined


def needs_separate_weights(T: int) -> bool:
    """Whether the weights that read the norm of T tokens should stay separate arrays instead of one concatenated matmul.

    They do for the kernel.
    """
    return tuning.current().norm_linear_tokens >= T


def norms_apart(T: int, *, from_tokens: int | None = None) -> bool:
    """Whether the norm of T tokens is best made where the residual stream is written, apart from what reads the norm.

    Args:
        from_tokens: the fewest for which it is, if that does not depend on `Tuning.norm_linear_tokens`.
    """
    choices = tuning.current()
    least = choices.norm_linear_tokens + 1 if from_tokens is None else from_tokens
    return least <= T <= choices.row_kernel_tokens and current().attention != "reference"


def joins_linears(x: jax.Array, weights: tuple[jax.Array, ...]) -> bool:
    """Whether the linear maps of x [T, H] by weights [*out, H] are best computed by `joined_linear`."""
    choices, T = tuning.current(), x.shape[0]
    if not choices.norm_linear_tokens < T <= choices.joined_linear_tokens or current().attention == "reference":
        return False
    if not joined.worthwhile(T, x.shape[1], sum(math.prod(weight.shape[:-1]) for weight in weights)):
        return False
    return choose("joined_linear", "auto", {"mosaic": joined.unsupported_reason(x, weights)}) == "mosaic"


def joined_linear(x: jax.Array, weights: tuple[jax.Array, ...]) -> jax.Array:
    """Linear maps of x [T, H] by weights [*out, H], side by side: [T, outputs of all]."""
    return joined.joined_linear(x, weights)


def linear_to_add(x: jax.Array, weight: jax.Array) -> jax.Array:
    """A linear map for the `delta` of `norm_linear`: its parts, where a kernel makes them for the sum with the stream.

    Args:
        x: [T, *in]. weight: [H, *in].

    Returns:
        [T, H], or [parts, T, H] whose float32 sum it is; `reference.whole` gives that.
    """
    T = x.shape[0]
    if norms_apart(T) and tuning.current().split_linear_tokens >= T:
        reason = split_linear.unsupported_reason(x, weight)
        if choose("split_linear", "auto", {"mosaic": reason}) == "mosaic":
            return split_linear.split_linear(x, weight)
    return jnp.tensordot(x, weight, axes=(tuple(range(1, x.ndim)), tuple(range(1, weight.ndim))))


def norm_linear(
    x: jax.Array,
    norm_weight: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    eps: float,
    delta: jax.Array | None = None,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Adds to the residual stream, norms it and projects the norm.

    There is no backend option of its own: the fastest implementation runs, or plain XLA where attention is set to
    "reference". The norm is rounded to the type of x before and after its weight, as in Hugging Face's DeepseekV3RMSNorm, and
    only after a float32 one, as in Qwen3_5RMSNorm.

    Args:
        x: [T, H] the residual stream.
        norm_weight: [H].
        weights: each [*out, H]. A float32 one (a router) gets the norm in float32.
        eps: of the norm.
        delta: [T, H] added to x first, or parts of it as `linear_to_add` gives them.
        centred: the norm's factor is 1 + norm_weight, in float32.

    Returns:
        x + delta [T, H]; its norm [T, H]; and for each of the weights the projection [T, *out], in the weight's type.
    """
    return norm_linear_and_zero(x, norm_weight, weights, eps=eps, delta=delta, centred=centred)[:3]


def norm_linear_and_zero(
    x: jax.Array,
    norm_weight: jax.Array,
    weights: tuple[jax.Array, ...],
    *,
    eps: float,
    delta: jax.Array | None = None,
    centred: bool = False,
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...], jax.Array | None]:
    """`norm_linear`, and from a kernel that makes one a 0, int32 [1], for a later kernel that needs a counter; else None."""
    options: dict[str, Any] = {"eps": eps, "centred": centred}
    # With more tokens XLA's matmuls are faster.
    if x.shape[0] > tuning.current().norm_linear_tokens:
        if delta is None or not norms_apart(x.shape[0]):
            return *reference.norm_linear(x, norm_weight, weights, delta=delta, **options), None
        reason = add_norm.unsupported_reason(x, norm_weight)
        if choose("add_norm", "auto", {"mosaic": reason}) != "mosaic":
            return *reference.norm_linear(x, norm_weight, weights, delta=delta, **options), None
        summed, normed = add_norm.add_norm(x, delta, norm_weight, **options)
        return summed, normed, reference.project(normed, weights), None
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(x, norm_weight, weights)}
    wanted = "reference" if current().attention == "reference" else "auto"
    delta = None if delta is None else reference.whole(delta)
    if choose("norm_linear", wanted, unsupported_reasons) == "mosaic":
        return mosaic.norm_linear(x, norm_weight, weights, delta=delta, **options)
    return *reference.norm_linear(x, norm_weight, weights, delta=delta, **options), None
