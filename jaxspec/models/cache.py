"""A layer's cache, declared once: device state, memory, prefix caching and sharding all follow from its spec."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from jax.sharding import Mesh, NamedSharding

from jaxspec.models.params import AXIS_RULES, partition_spec

# A layer's cache: its spec's arrays, in their order.
LayerCache = tuple[jax.Array, ...]


@dataclass(frozen=True)
class CacheArray:
    """One array of a layer's cache.

    Attributes:
        name: what it holds, for people.
        per: "token": paged, [num_pages, page_size, *shape]; "slot": a state of fixed size for each request,
            [num_slots, versions, *shape].
        shape: of the values of one token or one state; `axes` are its logical axes, as for parameters.
        versions: states kept for a slot: the newest one, and earlier ones that a step may return to.
    """

    name: str
    per: Literal["token", "slot"]
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    versions: int = 1

    def __post_init__(self):
        assert len(self.shape) == len(self.axes)
        assert self.per == "slot" or self.versions == 1

    def device_bytes(self, mesh_sizes: Mapping[str, int]) -> int:
        """Bytes of one token or of one slot on each device of a mesh with such axis sizes."""
        split = math.prod(mesh_sizes[AXIS_RULES[axis]] for axis in self.axes if axis in AXIS_RULES)
        return self.dtype.itemsize * self.versions * math.prod(self.shape) // split


@dataclass(frozen=True)
class CacheSpec:
    """The cache of one layer."""

    arrays: tuple[CacheArray, ...]

    @property
    def paged(self) -> bool:
        """All of it is paged, so requests can share prefixes, and rejected drafts are simply overwritten."""
        return all(array.per == "token" for array in self.arrays)

    def shapes(self, *, num_pages: int, page_size: int, num_slots: int, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes, dtypes and shardings of its arrays."""

        def shape(array: CacheArray) -> jax.ShapeDtypeStruct:
            leading = (num_pages, page_size) if array.per == "token" else (num_slots, array.versions)
            sharding = NamedSharding(mesh, partition_spec((None, None, *array.axes)))
            return jax.ShapeDtypeStruct((*leading, *array.shape), array.dtype, sharding=sharding)

        return tuple(map(shape, self.arrays))


def page_bytes(specs: Iterable[CacheSpec], page_size: int, mesh_sizes: Mapping[str, int]) -> int:
    """Bytes of one page over all layers, on each device."""
    return page_size * _device_bytes(specs, "token", mesh_sizes)


def slot_bytes(specs: Iterable[CacheSpec], mesh_sizes: Mapping[str, int]) -> int:
    """Bytes that one slot's states take over all layers, on each device; 0 if all caches are paged."""
    return _device_bytes(specs, "slot", mesh_sizes)


def _device_bytes(specs: Iterable[CacheSpec], per: str, mesh_sizes: Mapping[str, int]) -> int:
    return sum(array.device_bytes(mesh_sizes) for spec in specs for array in spec.arrays if array.per == per)
