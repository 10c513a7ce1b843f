"""A sampler's passes over the logits: each logit is read once, and noise is drawn only for rows that need it."""

from typing import Any

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.sampling import mosaic, reference
from pallas_kernels.sampling.cutoffs import cutoffs as cutoffs_mosaic
from pallas_kernels.sampling.likeliest import likeliest as likeliest_mosaic
from pallas_kernels.sampling.reference import Bounds, Drawn, Likeliest, LogitsStats, Residual


def logits_stats(logits: jax.Array, temperature: jax.Array, cuts: jax.Array | None = None) -> LogitsStats:
    """Argmax, log-sum-exp and finiteness of each row, or of what it keeps.

    There is no backend option of its own, as for `norm_linear`.

    Args:
        logits: [R, V]; some may be -inf.
        temperature: float32 [R], above 0.
        cuts: int32 [R], see `cutoffs`: only logits that are kept count. A row that keeps all, with LEAST_KEY, is not
            read, and its results may be anything; one with LEAST_KEY + 1 keeps all and is read.

    Returns:
        `LogitsStats` of the rows.
    """
    return _implementation("logits_stats", logits).logits_stats(logits, temperature, cuts)


def gumbel_argmax(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None = None,
    cuts: jax.Array | None = None,
) -> jax.Array:
    """Draws from softmax(logits / temperature), or from what a rejected draft leaves of it, by the Gumbel-max trick.

    The noise follows from the row's key and an id alone (see noise.py): a draw depends on the row alone.

    Args:
        logits: [N, V].
        rows: int32 [R] the row of logits of each draw; None: one draw of each row, in order.
        temperature: float32 [R], above 0.
        keys: uint32 [R, 2] threefry keys.
        wanted: bool [R]; where it is False, the result may be any id.
        likely: int32 [N] a likely id of each row of logits, or anything that is no id. It decides how long a draw takes, not
            what it draws.
        residual: adjusts the distribution of each draw.
        cuts: int32 [N], see `cutoffs`: of each row of logits only what is kept is drawn.

    Returns:
        ids int32 [R].
    """
    chosen = _implementation("gumbel_argmax", logits)
    return chosen.gumbel_argmax(logits, rows, temperature, keys, wanted, likely, residual, cuts)


def gumbel_best(
    logits: jax.Array,
    rows: jax.Array | None,
    temperature: jax.Array,
    keys: jax.Array,
    wanted: jax.Array,
    likely: jax.Array,
    residual: Residual | None,
    cuts: jax.Array | None,
    first_column: jax.Array,
) -> Drawn:
    """`gumbel_argmax` over a part of the vocabulary's columns: what it puts forward, with its score.

    Of the parts of a row the one with the largest score wins, of equal ones the first: that is the row's draw. The arguments
    are those of `gumbel_argmax`, and ids are counted from the part's own beginning, in `likely`, residuals and the result.

    Args:
        first_column: int32 [] where the part begins; its noise is that of these columns.
    """
    chosen = _implementation("gumbel_argmax", logits)
    return chosen.gumbel_best(logits, rows, temperature, keys, wanted, likely, residual, cuts, first_column)


def cutoffs(logits: jax.Array, bounds: Bounds) -> jax.Array:
    """The key `ordered(logit)` of the least logit that a row's min_p, top_k and top_p keep; all above are kept too.

    Ids with the same logit / temperature as the last that top_k keeps stay, as do those of equal probability to the last
    that top_p keeps. Sums are of integers: every implementation has the same, in whatever order it adds.

    Args:
        logits: [R, V]; some may be -inf.
        bounds: the rules. Where all are neutral the result is at most the key of -inf; so it may be in rows with NaN.

    Returns:
        int32 [R].
    """
    operation: Any = cutoffs_mosaic if _chosen("cutoffs", logits) == "mosaic" else reference.cutoffs
    return operation(logits, bounds)


def likeliest(logits: jax.Array, count: int, wanted: jax.Array) -> Likeliest:
    """The likeliest ids of each row that wants them.

    Args:
        logits: [R, V], finite.
        count: N, at most V.
        wanted: bool [R]; where it is False, the results may be anything.

    Returns:
        `Likeliest` of the rows.
    """
    operation: Any = likeliest_mosaic if _chosen("likeliest", logits) == "mosaic" else reference.likeliest
    return operation(logits, count, wanted)


def _implementation(operation: str, logits: jax.Array):
    return mosaic if _chosen(operation, logits) == "mosaic" else reference


def _chosen(operation: str, logits: jax.Array) -> str:
    wanted = "reference" if current().attention == "reference" else "auto"
    return choose(operation, wanted, {"mosaic": mosaic.unsupported_reason(logits)})
