"""What arrays take on each device: by their declared shapes and shardings, and as they lie there."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

import jax


def declared_bytes(shapes: Iterable[jax.ShapeDtypeStruct]) -> int:
    """Bytes on each device of arrays with such shapes, dtypes and shardings; nothing is allocated."""
    return sum(math.prod(_part(shape)) * shape.dtype.itemsize for shape in shapes)


def _part(shape: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return shape.sharding.shard_shape(shape.shape) if shape.sharding else shape.shape


def held_bytes(arrays: Iterable[jax.Array]) -> dict[Any, int]:
    """Bytes of these arrays on each device that has a part of them."""
    held: Counter[Any] = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return dict(held)
