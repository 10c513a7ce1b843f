"""An RMS norm and the linear maps that read it."""

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import choose, current
from pallas_kernels.norm_linear import mosaic, reference


def reads_apart(T: int) -> bool:
    """Whether weights that T tokens go through are best given one by one: a kernel takes them so, and those that lie on
    several devices cannot be put together."""
    return tuning.current().norm_linear_tokens >= T or current().devices > 1


def norm_linear(
    x: jax.Array, norm_weight: jax.Array, weights: tuple[jax.Array, ...], *, eps: float, delta: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
    """Adds, norms, and projects.

    No option of its own: it is a part of every step, and takes the best implementation there is, plain XLA where attention
    is asked to be the reference. The norm is rounded to the type of x before and after its weight, as in Hugging Face's
    DeepseekV3RMSNorm.

    Args:
        x: [T, H] the residual stream.
        norm_weight: [H]; eps: the norm's epsilon.
        weights: each [*out, H]. A float32 one (a router) gets the norm in float32.
        delta: [T, H] what is added to x before.

    Returns:
        x + delta [T, H]; its norm [T, H]; for each of the weights [T, *out], in its type.
    """
    # With more tokens XLA's matmuls are better, whatever the backend.
    if x.shape[0] > tuning.current().norm_linear_tokens:
        return reference.norm_linear(x, norm_weight, weights, eps=eps, delta=delta)
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(x, norm_weight, weights)}
    wanted = "reference" if current().attention == "reference" else "auto"
    chosen = mosaic if choose("norm_linear", wanted, unsupported_reasons) == "mosaic" else reference
    return chosen.norm_linear(x, norm_weight, weights, eps=eps, delta=delta)
