"""What a sampler needs of logits: each is read once, and only for rows that draw is there noise."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.sampling import mosaic, reference
from pallas_kernels.sampling.reference import LogitsStats, Residual


def logits_stats(logits: jax.Array, temperature: jax.Array) -> LogitsStats:
    """Argmax, log-sum-exp and finiteness of each row.

    No option of its own, as `norm_linear`.

    Args:
        logits: [R, V], of which -inf may be some.
        temperature: float32 [R], above 0.
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
    """Draws from softmax(logits / temperature), or from what a rejected draft leaves of it: the Gumbel-max trick.

    The noise is `jax.random.gumbel`'s for the row's key: a draw depends on the row alone.

    Args:
        logits: [N, V].
        rows: int32 [R] the row of logits that each draw is from.
        temperature: float32 [R], above 0.
        keys: uint32 [R, 2] threefry keys.
        wanted: bool [R]; where it is False, the result is any id.

    Returns:
        ids int32 [R].
    """
    return _implementation("gumbel_argmax", logits).gumbel_argmax(logits, rows, temperature, keys, wanted, residual)


def _implementation(operation: str, logits: jax.Array):
    wanted = "reference" if current().attention == "reference" else "auto"
    return mosaic if choose(operation, wanted, {"mosaic": mosaic.unsupported_reason(logits)}) == "mosaic" else reference
