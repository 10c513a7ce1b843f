"""Sums and gathers of what the devices of a mesh axis hold, inside a `jax.shard_map`.

With mailboxes, and up to `Tuning.peer_sum_bytes`, kernels write into the others' memory, and a step's CUDA graph holds them.
XLA's own collectives cut the graph in two.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import tuning
from pallas_kernels.backend import choose
from pallas_kernels.norm_linear.api import norms_apart
from pallas_kernels.norm_linear.reference import whole
from pallas_kernels.peer_sum import mosaic
from pallas_kernels.row import WARPGROUP

# Of what has no rows of its own.
_NUMBERS_OF_A_ROW = 1024


def total(part: jax.Array, axis: str, mailboxes: jax.Array | None = None) -> jax.Array:
    """The sum of every device's part, the same bits on all of them.

    Args:
        part: equal shapes on all devices.
        axis: of the mesh.
        mailboxes: this device's row of `Mailboxes.addresses` of that axis; None: there are none.
    """
    if mailboxes is None:
        return lax.psum(part, axis)
    if part.dtype == jnp.bfloat16:
        return mosaic.total(part, mailboxes) if _has_kernel(part, axis) else lax.psum(part, axis)
    if not _has_kernel(_rows_of(part), axis):
        return lax.psum(part, axis)
    first, *others = _gathered(part, mailboxes)
    for other in others:
        first = first + other
    return first


def add_total(
    x: jax.Array, part: jax.Array, axis: str, mailboxes: jax.Array | None, norm_weight: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """The residual stream with `total` added, and its RMS norm where one kernel makes both.

    Args:
        x: [T, H], the same on all devices. norm_weight: [H].
        part: [T, H], or [parts, T, H], whose sum is rounded before the devices' are added.
        axis, mailboxes: as of `total`.

    Returns:
        x + total [T, H]; the norm [T, H], or None.
    """
    one = jax.ShapeDtypeStruct(x.shape, part.dtype)
    joins = mailboxes is not None and _joins(x, one, norm_weight) and mosaic.in_one_phase(one, axis)
    if mailboxes is not None and joins and _has_kernel(one, axis):
        return mosaic.add_total(x, part, norm_weight, mailboxes, eps=eps)
    return x + total(whole(part), axis, mailboxes), None


def scatter_sum(part: jax.Array, axis: str, mailboxes: jax.Array | None = None) -> jax.Array:
    """Of `total` the rows of this device, of as many equal parts as there are devices.

    Args:
        part: [devices * T, ...], equal shapes on all devices.
        axis, mailboxes: as of `total`.

    Returns:
        [T, ...].
    """
    if mailboxes is not None and part.dtype == jnp.bfloat16 and _has_kernel(part, axis):
        return mosaic.scatter_sum(part, mailboxes)
    return lax.psum_scatter(part, axis, scatter_dimension=0, tiled=True)


def scatter_add(
    x: jax.Array,
    part: jax.Array,
    beside: jax.Array | None,
    axis: str,
    mailboxes: jax.Array | None,
    norm_weight: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array | None]:
    """As `add_total`, of `scatter_sum` + beside.

    Args:
        x, beside: [T, H] of this device. part: [devices * T, H]. norm_weight: [H].
    """
    if mailboxes is not None and _joins(x, part, norm_weight) and _has_kernel(part, axis):
        return mosaic.scatter_add(x, part, beside, norm_weight, mailboxes, eps=eps)
    summed = scatter_sum(part, axis, mailboxes)
    return x + (summed if beside is None else summed + beside), None


def gather_rows(parts: Sequence[jax.Array], axis: str, mailboxes: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """`gather` of several arrays [T, columns], whose dtypes have 2 or 4 bytes."""
    if mailboxes is None:
        return tuple(lax.all_gather(part, axis, tiled=True) for part in parts)
    width = sum(part.shape[1] * part.dtype.itemsize for part in parts) // 2
    together = jax.ShapeDtypeStruct((parts[0].shape[0], -(-width // WARPGROUP) * WARPGROUP), jnp.bfloat16)
    if any(part.shape[1] % WARPGROUP for part in parts) or not _has_kernel(together, axis):
        return tuple(lax.all_gather(part, axis, tiled=True) for part in parts)
    return mosaic.gather(parts, mailboxes)


def gather(part: jax.Array, axis: str, mailboxes: jax.Array | None = None, *, along: int = 0) -> jax.Array:
    """All devices' arrays, one after the other along the axis `along`.

    Args:
        part: equal shapes on all devices.
        axis, mailboxes: as of `total`.
    """
    if mailboxes is not None and _has_kernel(_rows_of(part), axis):
        return jnp.concatenate(list(_gathered(part, mailboxes)), axis=along)
    return lax.all_gather(part, axis, axis=along, tiled=True)


def _gathered(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """[devices, *shape of part], by the kernel."""
    rows = _rows_of(part)
    whole = mosaic.gather([rows], mailboxes)[0].reshape(-1, rows.size)
    return whole[:, : part.size].reshape(-1, *part.shape)


def _rows_of(part: jax.Array) -> jax.Array:
    """The numbers of an array as rows that kernels support, zeros after them."""
    if part.ndim == 2 and part.shape[1] % WARPGROUP == 0:
        return part
    row = min(_NUMBERS_OF_A_ROW, -(-part.size // WARPGROUP) * WARPGROUP)
    rows = -(-part.size // row)
    return jnp.pad(part.reshape(-1), (0, rows * row - part.size)).reshape(rows, row)


def _joins(x: jax.Array, part: Any, norm_weight: jax.Array) -> bool:
    """Whether one kernel adds what the devices tell to the residual stream x, and norms it."""
    return norms_apart(x.shape[0], from_tokens=1) and part.dtype == x.dtype == norm_weight.dtype == jnp.bfloat16


def _has_kernel(rows: Any, axis: str) -> bool:
    if math.prod(rows.shape) * rows.dtype.itemsize > tuning.current().peer_sum_bytes:
        return False
    return choose("peer_sum", "auto", {"mosaic": mosaic.unsupported_reason(rows, axis)}) == "mosaic"
