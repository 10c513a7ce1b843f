"""What a step decides for each of its rows, between sampling and the update of the state."""

from typing import NamedTuple

import jax

from jaxspec.sampling.logprobs import TopLogprobs
from jaxspec.sampling.sampler import SamplingRows


class RowResult(NamedTuple):
    """What a step chose for each row of R = E + D.

    Attributes:
        ids, logprobs: [R, n]; the first `emitted` count, those behind `accepted` are stale but legal ids.
        emitted: int32 [R] tokens that the request gains, cut at its first stop; 0 for middle chunks and dead rows.
        accepted: int32 [R] drafts that the target agreed with, before any cut; 0 for prompt rows.
        flags: int32 [R].
        lengths: int32 [R] tokens whose KV is right after the step; `last` int32 [R], the token behind them.
        rows: the sampling parameters [R].
        top: [R, n, N] the likeliest ids at the position of each of `ids`; None in a "lean" bucket.
    """

    ids: jax.Array
    logprobs: jax.Array
    emitted: jax.Array
    accepted: jax.Array
    flags: jax.Array
    lengths: jax.Array
    last: jax.Array
    rows: SamplingRows
    top: TopLogprobs | None
