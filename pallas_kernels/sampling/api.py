"""A sampler's passes over the logits: each logit is read once, and noise is drawn only for rows that need it."""

from collections.abc import Callable

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.sampling import mosaic, reference
from pallas_kernels.sampling.reference import Likeliest, LogitsStats, Residual, Tally, Weights


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


def tallies(logits: jax.Array, weights: Weights | None = None) -> Callable[..., Tally]:
    """A function that counts or weighs the ids whose key `ordered(logits)` reaches each of T thresholds.

    Sums of integers: every implementation gives the same, in whatever order it adds.

    Args:
        logits: float32 [R, V], after the temperature; some may be -inf, none NaN or infinite in rows that are wanted.
        weights: sums of weights instead of counts.

    Returns:
        tally(brackets, thresholds, wanted), of int32 [R, 2], keys: `Tally.inside` is of those from the first on, below
        the second; int32 [R, T], above the least int32; bool [R]: where it is False, the results may be anything. Where
        there is one threshold at once, only thresholds are read, and the others may be None.
    """
    return _implementation("tallies", logits).tallies(logits, weights)


def thresholds_at_once(logits: jax.Array) -> int:
    """Into how many parts less one a tally should cut a bracket: what it costs is reading, or each threshold."""
    return _implementation("tallies", logits).THRESHOLDS


def likeliest(logits: jax.Array, count: int, wanted: jax.Array) -> Likeliest:
    """The likeliest ids of each row that wants them.

    Args:
        logits: [R, V], finite.
        count: N, at most V.
        wanted: bool [R]; where it is False, the results may be anything.

    Returns:
        `Likeliest` of the rows.
    """
    return _implementation("likeliest", logits).likeliest(logits, count, wanted)


def _implementation(operation: str, logits: jax.Array):
    wanted = "reference" if current().attention == "reference" else "auto"
    return mosaic if choose(operation, wanted, {"mosaic": mosaic.unsupported_reason(logits)}) == "mosaic" else reference
