"""Plain XLA: one scatter, which XLA performs in place on a donated cache."""

import jax
import jax.numpy as jnp


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
    L = norm_weight.shape[0]
    c32 = kv_a[:, :L].astype(jnp.float32)
    normed = c32 * jax.lax.rsqrt(jnp.mean(jnp.square(c32), axis=-1, keepdims=True) + eps)
    c = norm_weight * normed.astype(kv_a.dtype)
    a, b = jnp.split(kv_a[:, L:].astype(jnp.float32), 2, axis=-1)
    k_rope = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    row = jnp.concatenate([c.astype(latent.dtype), k_rope.astype(latent.dtype)], axis=-1)
    return latent.at[pages, offsets].set(row)


def write_kv(
    k_cache: jax.Array, v_cache: jax.Array, k: jax.Array, v: jax.Array, pages: jax.Array, offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return (
        k_cache.at[pages, offsets].set(k.astype(k_cache.dtype)),
        v_cache.at[pages, offsets].set(v.astype(v_cache.dtype)),
    )
