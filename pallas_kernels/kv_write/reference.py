"""Plain XLA: one scatter, which XLA performs in place on a donated cache."""

import jax
import jax.numpy as jnp

from pallas_kernels.latents import Latents, write


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
    L = norm_weight.shape[0]
    c32 = kv_a[:, :L].astype(jnp.float32)
    normed = c32 * jax.lax.rsqrt(jnp.mean(jnp.square(c32), axis=-1, keepdims=True) + eps)
    c = norm_weight * normed.astype(kv_a.dtype)
    a, b = jnp.split(kv_a[:, L:].astype(jnp.float32), 2, axis=-1)
    k_rope = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return write(latent, (pages, offsets), c, k_rope)


def write_kv(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return (
        k_cache.at[pages, offsets].set(k.astype(k_cache.dtype)),
        v_cache.at[pages, offsets].set(v.astype(v_cache.dtype)),
    )
