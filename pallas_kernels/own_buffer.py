"""Where the operands of Mosaic GPU's kernels begin."""

from typing import TypeVar

import jax
from jax import lax

Tree = TypeVar("Tree")

# Of operands, in bytes.
ALIGNMENT = 256


def own_buffer(operands: Tree) -> Tree:
    """The arrays of a tree, none of which XLA passes to a kernel as a pointer into a larger array.

    XLA does so with slices of whole rows, wherever they begin, while Mosaic GPU refuses operands that do not begin at a
    multiple of 256 bytes. So this is for small arrays that may be a part of others: rows of decode windows come after the
    prompts' rows. What is no slice is passed as it is.
    """
    return jax.tree.map(lax.optimization_barrier, operands)


def own_rows(rows: jax.Array) -> jax.Array:
    """`own_buffer` of an array [R, V] that may be large, where a slice of its rows may begin elsewhere: where a row is no
    multiple of 256 bytes, as some vocabularies' parts on several devices are not."""
    return own_buffer(rows) if rows.shape[1] * rows.dtype.itemsize % ALIGNMENT else rows
