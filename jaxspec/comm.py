"""What the devices of a mesh tell each other inside a step. On one device every function here is the identity.

A step on several devices is one `jax.shard_map`: a model sees its own heads, experts and columns, and names each place
where the others' are needed. `split_over` says that it is traced so; without it there is one device and no collective.

Where requests are split too, the devices that share a part of them are a rank. All functions here are about the devices of
one rank, but for those whose names say otherwise: ranks meet in mixtures of experts and nowhere else.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.peer_sum import api as peer_sum

Tree = TypeVar("Tree")

_axis: ContextVar[str | None] = ContextVar("axis", default=None)
_rank_axis: ContextVar[str | None] = ContextVar("rank_axis", default=None)
_mailboxes: ContextVar[Mapping[str, jax.Array] | tuple[()]] = ContextVar("mailboxes", default=())


@contextlib.contextmanager
def split_over(axis: str | None, rank_axis: str | None = None) -> Iterator[None]:
    """What is traced inside runs on each device of these mesh axes, on its part of what is split.

    Args:
        axis: of the devices of a rank; None where one device is all of it.
        rank_axis: of the ranks; None where there is one.
    """
    token, rank_token = _axis.set(axis), _rank_axis.set(rank_axis)
    try:
        yield
    finally:
        _axis.reset(token)
        _rank_axis.reset(rank_token)


@contextlib.contextmanager
def through(mailboxes: Mapping[str, jax.Array] | tuple[()]) -> Iterator[None]:
    """What is traced inside sends small things through these, by axis: see `pallas_kernels.peer_sum`."""
    token = _mailboxes.set(mailboxes)
    try:
        yield
    finally:
        _mailboxes.reset(token)


def is_split() -> bool:
    """Whether the models hold a part of their heads, experts and columns."""
    return _axis.get() is not None


def size() -> int:
    """How many devices share the work."""
    return 1 if (axis := _axis.get()) is None else lax.axis_size(axis)


def total(part: jax.Array) -> jax.Array:
    """The sum of every device's part, the same bits on all of them."""
    return part if (axis := _axis.get()) is None else peer_sum.total(part, axis, _mailboxes_of(axis))


class Part(NamedTuple):
    """[T, H], or parts [parts, T, H], of which the sum over all devices is meant."""

    array: jax.Array


def add_total(x: jax.Array, part: jax.Array, norm_weight: jax.Array, eps: float) -> tuple[jax.Array, jax.Array | None]:
    """x [T, H] + `total` of [T, H] or of parts [parts, T, H]; and the RMS norm of the sum, where it costs nothing. Only where
    `is_split`."""
    axis = _split_axis()
    return peer_sum.add_total(x, part, axis, _mailboxes_of(axis), norm_weight, eps=eps)


def gather(part: jax.Array, *, axis: int) -> jax.Array:
    """All devices' parts of an array, one after the other along its `axis`, in the mesh's order."""
    return part if (name := _axis.get()) is None else peer_sum.gather(part, name, _mailboxes_of(name), along=axis)


def own(whole: jax.Array, size: int, *, axis: int) -> jax.Array:
    """This device's part of `size` along `axis` of what `gather` gives."""
    return whole if _axis.get() is None else lax.dynamic_slice_in_dim(whole, first(size), size, axis)


def first(size: int) -> jax.Array:
    """Where this device's part of `size` heads, experts or rows begins, int32 []. Only where `is_split`."""
    return lax.axis_index(_split_axis()) * size


def find(ids: jax.Array, size: int) -> jax.Array:
    """The place of ids in this device's part of `size`, `size` where another device has them. Only where `is_split`."""
    places = ids - first(size)
    return jnp.where((places >= 0) & (places < size), places, size)


def has_ranks() -> bool:
    """Whether other ranks serve other requests, and have other experts."""
    return _rank_axis.get() is not None


def first_expert(size: int) -> jax.Array | None:
    """Of all devices', those of other ranks too, where this one's `size` experts begin, int32 []. None on one device."""
    axes = tuple(axis for axis in (_rank_axis.get(), _axis.get()) if axis is not None)
    return lax.axis_index(axes) * size if axes else None


def rows_of_all_ranks(*rows: jax.Array) -> tuple[jax.Array, ...]:
    """Of each array [T, columns] those of all ranks, one after the other along the first axis. Only where `has_ranks`."""
    axis = _ranks()
    return peer_sum.gather_rows(rows, axis, _mailboxes_of(axis))


def total_of_own_rows(part: jax.Array) -> jax.Array:
    """Of rows as `rows_of_all_ranks` gives them, those of this rank, summed over the ranks. Only where `has_ranks`."""
    axis = _ranks()
    return peer_sum.scatter_sum(part, axis, _mailboxes_of(axis))


def add_total_of_own_rows(
    x: jax.Array, part: jax.Array, beside: jax.Array | None, norm_weight: jax.Array, eps: float
) -> tuple[jax.Array, jax.Array | None]:
    """x [T, H] + (`total_of_own_rows` + beside), and the RMS norm of the sum, where it costs nothing."""
    axis = _ranks()
    return peer_sum.scatter_add(x, part, beside, axis, _mailboxes_of(axis), norm_weight, eps=eps)


def everyones(tree: Tree) -> Tree:
    """Each array of every device, stacked along a new first axis: equal shapes of 32-bit numbers or truth values, gathered
    at once. All devices get the same bits. Only where `is_split`."""
    packed, unpacked = _packed(tree)
    assert is_split()
    return unpacked(gather(packed[None], axis=0))


def owners(tree: Tree, mine: jax.Array) -> Tree:
    """Of arrays of 32-bit numbers the elements of the one device where they are `mine`, a mask of their shape, to the bit.
    Only where `is_split`."""
    packed, unpacked = _packed(tree)
    assert is_split()
    return unpacked(total(jnp.where(mine[..., None], packed, 0)))


def swap(columns: jax.Array) -> jax.Array:
    """From this device's columns [R, C] of all rows to all columns [R / n, n * C] of its share of the rows; n divides R.
    Only where `is_split`."""
    return lax.all_to_all(columns, _split_axis(), split_axis=0, concat_axis=1, tiled=True)


def _mailboxes_of(axis: str) -> jax.Array | None:
    return dict(_mailboxes.get()).get(axis)


def _ranks() -> str:
    axis = _rank_axis.get()
    assert axis is not None
    return axis


def _split_axis() -> str:
    axis = _axis.get()
    assert axis is not None
    return axis


def _packed(tree: Tree) -> tuple[jax.Array, Callable[[jax.Array], Tree]]:
    """The bits of arrays of one shape as int32 [*shape, number of arrays], and the way back."""
    leaves, structure = jax.tree.flatten(tree)

    def bits(x: jax.Array) -> jax.Array:
        return x.astype(jnp.int32) if x.dtype == bool else lax.bitcast_convert_type(x, jnp.int32)

    def unpacked(packed: jax.Array) -> Tree:
        values = [
            packed[..., i] > 0 if leaf.dtype == bool else lax.bitcast_convert_type(packed[..., i], leaf.dtype)
            for i, leaf in enumerate(leaves)
        ]
        return jax.tree.unflatten(structure, values)

    return jnp.stack([bits(leaf) for leaf in leaves], axis=-1), unpacked
