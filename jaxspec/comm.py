"""What the devices of a mesh tell each other inside a step. On one device every function here is the identity.

A step on several devices is one `jax.shard_map`: a model sees its own heads, experts and columns, and names each place
where the others' are needed. `split_over` says that it is traced so; without it there is one device and no collective.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import jax.numpy as jnp
from jax import lax

_axis: ContextVar[str | None] = ContextVar("axis", default=None)


@contextlib.contextmanager
def split_over(axis: str) -> Iterator[None]:
    """What is traced inside runs on each device of this mesh axis, on its part of what is split."""
    token = _axis.set(axis)
    try:
        yield
    finally:
        _axis.reset(token)


def is_split() -> bool:
    """Whether the models hold a part of their heads, experts and columns."""
    return _axis.get() is not None


def total(part: jax.Array) -> jax.Array:
    """The sum of every device's part, the same bits on all of them."""
    return part if (axis := _axis.get()) is None else lax.psum(part, axis)


def gather(part: jax.Array, *, axis: int) -> jax.Array:
    """All devices' parts of an array, one after the other along its `axis`, in the mesh's order."""
    return part if (name := _axis.get()) is None else lax.all_gather(part, name, axis=axis, tiled=True)


def own(whole: jax.Array, size: int, *, axis: int) -> jax.Array:
    """This device's part of `size` along `axis` of what `gather` gives."""
    return whole if _axis.get() is None else lax.dynamic_slice_in_dim(whole, first(size), size, axis)


def first(size: int) -> jax.Array:
    """Where this device's part of `size` heads, experts or rows begins, int32 []. Only where `is_split`."""
    axis = _axis.get()
    assert axis is not None
    return lax.axis_index(axis) * size


def find(ids: jax.Array, size: int) -> jax.Array:
    """The place of ids in this device's part of `size`, `size` where another device has them. Only where `is_split`."""
    places = ids - first(size)
    return jnp.where((places >= 0) & (places < size), places, size)
