"""Paged grouped-query attention for decode windows."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.gqa_decode import mosaic, reference, triton
from pallas_kernels.sliding_window import window_pages


def gqa_decode(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    page_tables: jax.Array,
    bounds: jax.Array,
    sinks: jax.Array | None = None,
    *,
    scale: float,
    window: int | None = None,
) -> jax.Array:
    """Attention of n query tokens a request over its pages (arXiv 2305.13245).

    Args:
        q: [B, n, K, G, D]: G query heads for each of the K key heads.
        k, v: [pages, page_size, K, D] the layer's caches.
        page_tables: int32 [B, max_pages]; entries past a request's length may name any page.
        bounds: int32 [B, n], exclusive: query (b, r) sees the keys at positions < bounds[b, r]. At least 1.
        sinks: float32 [K, G]: a score of each head that counts as one more key, with a value of 0 (arXiv 2309.17453;
            gpt-oss).
        scale: softmax scale, of which sinks have none.
        window: query (b, r) sees the last `window` keys before its bound alone, and no page before them is read.

    Returns:
        [B, n, K, G, D] in q's dtype.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    if window is not None:
        page_tables, bounds = window_pages(page_tables, bounds, page_size=k.shape[1], window=window)
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(q, k, v), "triton": triton.unsupported_reason(q, k, v)}
    chosen = choose("gqa_decode", current().attention, unsupported_reasons)
    kernel = {"mosaic": mosaic, "triton": triton, "reference": reference}[chosen]
    return kernel.gqa_decode(q, k, v, page_tables, bounds, sinks, scale=scale, window=window)
