"""A sampler's passes over the logits: each logit is read once, and noise is drawn only for rows that need it."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.sampling import mosaic, reference
from pallas_kernels.sampling.reference import LogitsStats, Residual


def logits_stats(logits: jax.Array, temperature: jax.Array) -> LogitsStats:
    """Argmax, log-sum-exp and finiteness of each row.

    There is no backend option of its own, as for `norm_linear`.

    Args:
        logits: [R, V]; some may be -inf.
        temperature: float32 [R], above 0.

    Returns:
        `LogitsStats` of the rows.
    """
    return _implementation("logits_stats", logits).logits_stats(logits, temperature)


def gumbel_argmax(
    logits: jax.Array,
    rows: jax.Array,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    residual: Residual | None = None,
) -> jax.Array:
    """Draws from softmax(logits / temperature), or from what a rejected draft leaves of it, by the Gumbel-max trick.

    The noise is `jax.random.gumbel`'s for the row's key: a draw depends on the row alone.

    Args:
        logits: [N, V].
        rows: int32 [R] the row of logits of each draw.
        temperature: float32 [R], above 0.
        keys: uint32 [R, 2] threefry keys.
        wanted: bool [R]; where it is False, the result may be any id.
        residual: adjusts the distribution of each draw.

    Returns:
        ids int32 [R].
    """
    return _implementation("gumbel_argmax", logits).gumbel_argmax(logits, rows, temperature, keys, wanted, residual)


def _implementation(operation: str, logits: jax.Array):
    wanted = "reference" if current().attention == "reference" else "auto"
    return mosaic if choose(operation, wanted, {"mosaic": mosaic.unsupported_reason(logits)}) == "mosaic" else reference
