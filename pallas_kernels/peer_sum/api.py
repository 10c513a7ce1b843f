"""Sums of what the devices of a mesh axis hold."""

import math

import jax
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.backend import choose
from pallas_kernels.peer_sum import mosaic


def total(part: jax.Array, axis: str) -> jax.Array:
    """The sum of every device's part, the same bits on all of them.

    Up to `Tuning.peer_sum_bytes` a kernel reads the others' parts through their memory, and a step's CUDA graph holds it. XLA's
    own sums cut the graph in two.

    Args:
        part: equal shapes on all devices; traced inside a `jax.shard_map`.
        axis: of the mesh.
    """
    nbytes = math.prod(part.shape) * part.dtype.itemsize
    if nbytes <= tuning.current().peer_sum_bytes:
        chosen = choose("peer_sum", "auto", {"mosaic": mosaic.unsupported_reason(part, axis)})
        if chosen == "mosaic":
            return mosaic.total(part, axis)
    return lax.psum(part, axis)
