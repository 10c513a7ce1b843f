"""The sizes that the Hopper kernels of MLA decode support, and what they write."""

import jax
import jax.numpy as jnp

from pallas_kernels.mosaic_attention import ROWS, WARPGROUP

KEY_DIM, VALUE_DIM = 576, 512


def output_types(B: int, blocks: int, rows: int, num_items: int) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Types of out, partial and lse.

    out [B, blocks * rows, 512] holds the requests that are one item; partial [blocks * rows, I, 512] and the base-2
    log-sum-exp lse float32 [blocks * 64, I padded] hold the items of the others.
    """
    padded_items = -(-num_items // WARPGROUP) * WARPGROUP
    return (
        jax.ShapeDtypeStruct((B, blocks * rows, VALUE_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((blocks * rows, num_items, VALUE_DIM), jnp.bfloat16),
        jax.ShapeDtypeStruct((blocks * ROWS, padded_items), jnp.float32),
    )
