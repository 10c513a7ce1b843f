"""Paged grouped-query attention for decode windows."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.gqa_decode import mosaic, reference, triton


def gqa_decode(
    q: jax.Array, k: jax.Array, v: jax.Array, page_tables: jax.Array, bounds: jax.Array, *, scale: float
) -> jax.Array:
    """Attention of n query tokens a request over its pages (arXiv 2305.13245).

    Args:
        q: [B, n, K, G, D]: G query heads for each of the K key heads.
        k, v: [pages, page_size, K, D] the layer's caches.
        page_tables: int32 [B, max_pages]; entries past a request's length may name any page.
        bounds: int32 [B, n], exclusive: query (b, r) sees the keys at positions < bounds[b, r]. At least 1.
        scale: softmax scale.

    Returns:
        [B, n, K, G, D] in q's dtype.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(q, k, v), "triton": triton.unsupported_reason(q, k, v)}
    chosen = choose("gqa_decode", current().attention, unsupported_reasons)
    kernel = {"mosaic": mosaic, "triton": triton, "reference": reference}[chosen]
    return kernel.gqa_decode(q, k, v, page_tables, bounds, scale=scale)
