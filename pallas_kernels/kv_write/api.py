"""Writing new tokens into the paged caches, in place when the cache is donated."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.kv_write import mosaic, reference


def write_latent(
    latent: jax.Array,
    kv_a: jax.Array,
    norm_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """Norms the latent part, rotates the shared key part and writes both: the cached form of MLA.

    Args:
        latent: [num_pages, page_size, L + R] the layer's cache.
        kv_a: [T, L + R] output of the joint down-projection.
        norm_weight: [L] of the latent's RMS norm; eps its epsilon.
        cos, sin: float32 [T, R / 2].
        pages, offsets: int32 [T] where each token goes; padding tokens go to page 0.

    Returns:
        The cache with the tokens written.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    chosen = mosaic if latent_writer(latent, kv_a, norm_weight) == "mosaic" else reference
    return chosen.write_latent(latent, kv_a, norm_weight, cos, sin, pages, offsets, eps=eps)


def latent_writer(latent: jax.Array, kv_a: jax.Array | jax.ShapeDtypeStruct, norm_weight: jax.Array) -> str:
    """Which implementation takes a call of `write_latent`."""
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(latent, kv_a, norm_weight)}
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    return choose("kv_write", current().attention, unsupported_reasons, same_as_auto=("triton",))


def write_kv(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes keys (already rotated) and values [T, K, D] into caches [num_pages, page_size, K, D]."""
    return reference.write_kv(k_cache, v_cache, k, v, pages, offsets)
