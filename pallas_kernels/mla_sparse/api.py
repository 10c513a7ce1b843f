"""Multi-head latent attention over chosen keys, in the absorbed form."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.latents import Fp8Latents, Latents
from pallas_kernels.mla_decode import mosaic as decode_mosaic
from pallas_kernels.mla_decode import triton as decode_triton
from pallas_kernels.mla_sparse import gathered, mosaic, reference


def unsupported_reason(q: jax.Array | jax.ShapeDtypeStruct, latent: Latents, value_dim: int) -> str | None:
    """Why no kernel supports calls with such queries, latents and rank of them, or None if one does."""
    reasons = _unsupported_reasons(q, latent, value_dim)
    return None if None in reasons.values() else reasons["mosaic"]


def mla_sparse(
    q: jax.Array,
    latent: Latents,
    page_tables: jax.Array,
    rows: jax.Array,
    chosen: jax.Array,
    numbers: jax.Array,
    w_uv: jax.Array,
    *,
    scale: float,
) -> jax.Array:
    """Attention of query tokens over the keys that each of them has chosen, which `key_choice` finds.

    Of prompts and of decode windows alike: a token brings its page table and its choice, which holds no key that it may not
    see. Only chosen latents are read.

    Args:
        q: [T, H, C] queries in latent space, C = latent rank + rope dim.
        latent: [pages, page_size, C] the layer's cache, or `Fp8Latents` of that shape.
        page_tables: int32 [X, max_pages].
        rows: int32 [T] the page table of each token.
        chosen: int32 [T, K] positions, each once; past a token's number anything.
        numbers: int32 [T] how many keys each token has chosen. They say how work is spread, so layers whose tokens have chosen
            as many share a schedule.
        w_uv: [H, V, L] up-projection of the latent to values.
        scale: softmax scale.

    Returns:
        [T, H, V] in q's dtype; of tokens without keys anything, NaN too.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    unsupported_reasons = _unsupported_reasons(q, latent, w_uv.shape[2])
    backend = choose("mla_sparse", current().attention, unsupported_reasons)
    arguments = page_tables, rows, chosen, numbers, w_uv
    if backend == "reference":
        return reference.mla_sparse(q, latent, *arguments, scale=scale)
    if backend == "mosaic" and not isinstance(latent, Fp8Latents):
        return mosaic.mla_sparse(q, latent, *arguments, scale=scale)
    return gathered.mla_sparse(q, latent, *arguments, scale=scale)


def _unsupported_reasons(q: jax.Array | jax.ShapeDtypeStruct, latent: Latents, value_dim: int) -> dict[str, str | None]:
    """Of the kernels of `mla_decode`, which read the chosen latents as windows of one token."""
    queries = jax.ShapeDtypeStruct((q.shape[0], 1, *q.shape[1:]), q.dtype)
    return {
        "mosaic": decode_mosaic.unsupported_reason(queries, latent, value_dim),
        "triton": decode_triton.unsupported_reason(queries, latent, value_dim),
    }
