"""Token latencies, the same way for `bench serve` (arrival at a client) and `bench timeline` (end of a step).

Tokens arrive in chunks: a speculative cycle yields several, and one read of a client may hold the output of several
steps. Each token counts. A chunk of m tokens that arrives dt after the one before it is m gaps of dt / m; the other m - 1
tokens of a request's first chunk arrive with its first token: gaps of 0. So n tokens have n - 1 gaps, whose sum is the
time from first to last token, and a request's mean gap is its time per output token.
"""

from collections.abc import Iterable, Sequence

import numpy as np


def token_gaps(times: Sequence[float], counts: Sequence[int]) -> np.ndarray:
    """Seconds between neighbouring tokens of one request, float64 [tokens - 1].

    Args:
        times: when each chunk arrived, in seconds, ascending.
        counts: tokens of each chunk, at least 1.
    """
    if not times:
        return np.zeros(0)
    later = np.asarray(counts[1:], np.int64)
    return np.concatenate([np.zeros(counts[0] - 1), np.repeat(np.diff(times) / later, later)])


def time_per_output_token(times: Sequence[float], counts: Sequence[int]) -> float | None:
    """Seconds from the first to the last token over the tokens after the first; None where there are none."""
    tokens = sum(counts)
    return (times[-1] - times[0]) / (tokens - 1) if tokens > 1 else None


def summary(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean, median and 99th percentile (between two values by linear interpolation) in ms; None without values."""
    values = 1000 * np.asarray(list(seconds), np.float64)
    if not len(values):
        return None
    p50, p99 = np.percentile(values, [50, 99])
    return {name: round(float(v), 3) for name, v in (("mean", values.mean()), ("p50", p50), ("p99", p99))}
