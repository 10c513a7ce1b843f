"""Paged multi-head latent attention for prompt chunks, with keys and values decompressed from the latents."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.latents import Latents
from pallas_kernels.mla_prefill import mosaic, reference


def mla_prefill(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    token_rows: jax.Array,
    positions: jax.Array,
    ends: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Causal attention of the prompt tokens of several requests over their pages (arXiv 2405.04434 section 2.1).

    The chunk's own latents must have been written to the pages already.

    Args:
        q_nope: [P, H, D], q_rope: [P, H, R]: queries of the P chunk tokens, request after request.
        w_uk: [H, D, L], w_uv: [H, V, L]: up-projections of the latent to keys and values.
        latent: [pages, page_size, L + R] the layer's cache, or `Fp8Latents` of that shape.
        page_tables: int32 [E, max_pages]; entries past a request's length may name any page.
        token_rows: int32 [P], the request (0..E-1) of each token; E for a padding token.
        positions: int32 [P]: token p sees the keys at positions <= positions[p].
        ends: int32 [E]: tokens of each request with this chunk; 0 for a padding row.
        scale: softmax scale.

    Returns:
        [P, H, V] in q's dtype; 0 for padding tokens.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    chosen = mosaic if prefiller(q_nope, q_rope, w_uk, w_uv, latent) == "mosaic" else reference
    return chosen.mla_prefill(q_nope, q_rope, w_uk, w_uv, latent, page_tables, token_rows, positions, ends, scale=scale)


def prefiller(
    q_nope: jax.Array,
    q_rope: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    latent: Latents,
) -> str:
    """The implementation that a call of `mla_prefill` runs on.

    Raises:
        UnsupportedError: as `mla_prefill`.
    """
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(q_nope, q_rope, w_uk, w_uv, latent)}
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    return choose("mla_prefill", current().attention, unsupported_reasons, same_as_auto=("triton",))
