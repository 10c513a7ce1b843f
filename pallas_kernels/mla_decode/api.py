"""Paged multi-head latent attention for decode windows, in the absorbed form."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.latents import Latents
from pallas_kernels.mla_decode import mosaic, reference, triton


def mla_decode(
    q: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    bounds: jax.Array,
    w_uv: jax.Array | None = None,
    *,
    scale: float,
    value_dim: int,
) -> jax.Array:
    """Attention of n query tokens a request over its pages of latents (arXiv 2405.04434, appendix C, absorbed).

    Every query head shares the one latent "key"; the value is the latent's first `value_dim` columns.

    Args:
        q: [B, n, H, C] queries in latent space, C = latent rank + rope dim. There may be more of them than heads in w_uv: the
            rest are padding, which may be NaN.
        latent: [pages, page_size, C] the layer's cache, or `Fp8Latents` of that shape.
        page_tables: int32 [B, max_pages]; entries past a request's length may name any page.
        bounds: int32 [B, n], exclusive: query (b, r) sees the keys at positions < bounds[b, r]. At least 1.
        w_uv: [H, V, value_dim] up-projection of the latent to values, applied to the result; for a few tokens in the same
            kernels.
        scale: softmax scale.
        value_dim: the latent rank.

    Returns:
        [B, n, H, value_dim], or with w_uv [B, n, H, V], in q's dtype.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    chosen = decoder(q, latent, value_dim)
    if chosen == "mosaic":
        return mosaic.mla_decode(q, latent, page_tables, bounds, w_uv, scale=scale)
    if chosen == "triton":
        out = triton.mla_decode(q, latent, page_tables, bounds, scale=scale)
    else:
        out = reference.mla_decode(q, latent, page_tables, bounds, scale=scale, value_dim=value_dim)
    return out if w_uv is None else reference.values(out[:, :, : w_uv.shape[0]], w_uv)


def head_rows(n: int, H: int) -> int:
    """How many queries of a token, with H heads, are best handed to `mla_decode` in windows of n: more need no copy."""
    return mosaic.padded_rows(H) if n == 1 else H


def decoder(q: jax.Array, latent: Latents, value_dim: int) -> str:
    """The implementation that a call of `mla_decode` runs on.

    Raises:
        UnsupportedError: as `mla_decode`.
    """
    unsupported_reasons = {
        "mosaic": mosaic.unsupported_reason(q, latent, value_dim),
        "triton": triton.unsupported_reason(q, latent, value_dim),
    }
    return choose("mla_decode", current().attention, unsupported_reasons)
