"""Queries of multi-head latent attention in the absorbed form, for `mla_decode`."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.kv_write import api as kv_write
from pallas_kernels.latents import Latents
from pallas_kernels.mla_query import mosaic, reference


def mla_query(q: jax.Array, w_uk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Absorbs the up-projection of keys into the queries and rotates their shared part (arXiv 2405.04434, appendix C).

    Args:
        q: [T, H, D + R] the queries as projected: D columns for the keys of a head, R, not yet rotated, for the shared key.
            One array, because one matmul makes them and XLA needs a launch to split its result.
        w_uk: [H, D, L] up-projection of the latent to keys.
        cos, sin: float32 [T, R / 2].

    Returns:
        [T, H, L + R] in q's dtype.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    chosen = mosaic if _chosen(q, w_uk) == "mosaic" else reference
    return chosen.mla_query(q, w_uk, cos, sin)


def write_and_query(
    latent: Latents,
    kv_a: jax.Array,
    norm_weight: jax.Array,
    q: jax.Array,
    w_uk: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
    head_rows: int | None = None,
) -> tuple[Latents, jax.Array]:
    """`kv_write.api.write_latent` and `mla_query` for the same tokens: one launch where Mosaic GPU kernels run both.

    Args:
        kv_a: [T, at least L + R], of which the last columns go to the cache.
        q: [T, at least H * (D + R)], of which the first columns are the heads' queries. May be the same array as kv_a, as
            one matmul makes both: XLA needs launches to split its result.
        head_rows: see `mla_decode.api.head_rows`.
        others: as in `write_latent` and `mla_query`.

    Returns:
        The cache with the tokens written; the queries, from the kernel with `head_rows` heads, of which those past the last
        are uninitialised.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    (T, _), (H, D, _), R = q.shape, w_uk.shape, 2 * cos.shape[1]
    queries = jax.ShapeDtypeStruct((T, H, D + R), q.dtype)
    written = jax.ShapeDtypeStruct((T, latent.shape[2]), kv_a.dtype)
    if kv_write.latent_writer(latent, written, norm_weight) == _chosen(queries, w_uk) == "mosaic":
        return mosaic.write_and_query(
            latent, kv_a, norm_weight, q, w_uk, cos, sin, pages, offsets, eps=eps, head_rows=head_rows
        )
    kv_a = kv_a[:, kv_a.shape[1] - written.shape[1] :]
    latent = kv_write.write_latent(latent, kv_a, norm_weight, cos, sin, pages, offsets, eps=eps)
    return latent, mla_query(q[:, : H * (D + R)].reshape(queries.shape), w_uk, cos, sin)


def _chosen(q: jax.Array | jax.ShapeDtypeStruct, w_uk: jax.Array) -> str:
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    return choose(
        "mla_query", current().attention, {"mosaic": mosaic.unsupported_reason(q, w_uk)}, same_as_auto=("triton",)
    )
