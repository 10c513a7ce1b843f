"""Paged grouped-query attention for prompt chunks."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.gqa_prefill import mosaic, reference


def gqa_prefill(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Causal attention of the prompt tokens of several requests over their pages (arXiv 2305.13245).

    The chunk's own keys and values must have been written to the pages already.

    Args:
        q: [P, K, G, D]: queries of the P chunk tokens, request after request; G query heads for each key head.
        k, v: [pages, page_size, K, D] the layer's caches.
        page_tables: int32 [E, max_pages]; entries past a request's length may name any page.
        token_rows: int32 [P], the request (0..E-1) of each token; E for a padding token.
        positions: int32 [P]: token p sees the keys at positions <= positions[p].
        ends: int32 [E]: tokens of each request with this chunk; 0 for a padding row.
        sinks: float32 [K, G], as in `gqa_decode`.
        scale: softmax scale, of which sinks have none.
        window: token p sees the last `window` of its keys alone, and no block of pages before them is read.

    Returns:
        [P, K, G, D] in q's dtype; 0 for padding tokens.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(q, k, v)}
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    chosen = choose("gqa_prefill", current().attention, unsupported_reasons, same_as_auto=("triton",))
    kernel = mosaic if chosen == "mosaic" else reference
    return kernel.gqa_prefill(q, k, v, page_tables, token_rows, positions, ends, sinks, scale=scale, window=window)
