"""Plain XLA: a batched matmul and a rotation."""

import jax
import jax.numpy as jnp


def mla_query(q: jax.Array, w_uk: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    q_nope, q_rope = jnp.split(q, [w_uk.shape[1]], axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    a, b = jnp.split(q_rope.astype(jnp.float32), 2, axis=-1)
    q_rope = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(q.dtype)
    q_latent = jnp.einsum("thd,hdl->thl", q_nope, w_uk)
    return jnp.concatenate([q_latent, q_rope], axis=-1)
