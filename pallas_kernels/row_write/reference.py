"""Plain XLA: one scatter, which XLA performs in place on a donated array."""

import jax


def write_rows(array_SkV: jax.Array, i: int, rows_RV: jax.Array, slots_R: jax.Array) -> jax.Array:
    return array_SkV.at[slots_R, i].set(rows_RV, mode="drop")
