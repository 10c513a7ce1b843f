"""Writing new tokens into the paged caches, in place when the cache is donated."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.kv_write import mosaic, reference
from pallas_kernels.latents import Latents


def write_latent(
    latent: Latents,
    kv_a: jax.Array,
    norm_weight: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
) -> Latents:
    """Norms the latent, rotates the shared key and writes both to the cache of MLA (arXiv 2405.04434, section 2.1).

    Args:
        latent: [num_pages, page_size, L + R] the layer's cache; `Fp8Latents` are quantised as they are written.
        kv_a: [T, L + R] output of the joint down-projection.
        norm_weight: [L] of the latent's RMS norm.
        eps: of the norm.
        cos, sin: float32 [T, R / 2].
        pages, offsets: int32 [T] where each token goes; padding tokens go to page 0.

    Returns:
        The cache with the tokens written.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    chosen = mosaic if latent_writer(latent, kv_a, norm_weight) == "mosaic" else reference
    return chosen.write_latent(latent, kv_a, norm_weight, cos, sin, pages, offsets, eps=eps)


def latent_writer(latent: Latents, kv_a: jax.Array | jax.ShapeDtypeStruct, norm_weight: jax.Array) -> str:
    """The implementation that a call of `write_latent` runs on."""
    unsupported_reasons = {"mosaic": mosaic.unsupported_reason(latent, kv_a, norm_weight)}
    # "triton" selects a decode kernel only; this operation then runs on the fastest implementation it has.
    return choose("kv_write", current().attention, unsupported_reasons, same_as_auto=("triton",))


def write_kv(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Writes keys and values to their caches, by XLA's scatter.

    Args:
        k_cache, v_cache: [num_pages, page_size, K, D] the layer's caches.
        k, v: [T, K, D]; keys already rotated.
        pages, offsets: int32 [T] where each token goes; padding tokens go to page 0.

    Returns:
        The caches with the tokens written.
    """
    return reference.write_kv(k_cache, v_cache, k, v, pages, offsets)
