"""A layer's cache, declared once: device state, memory, prefix caching and sharding all follow from its spec."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from jaxspec.models.params import devices_of, num_ranks, partition_spec

# A layer's cache: its spec's arrays, in their order.
LayerCache = tuple[jax.Array, ...]

# "auto": as the layers declare it, in the type of activations.
KVCacheDtype = Literal["auto", "bf16", "fp8"]
ModuleT = TypeVar("ModuleT", bound=nnx.Module)


@dataclass(frozen=True)
class CacheArray:
    """One array of a layer's cache.

    Attributes:
        name: what it holds, for people.
        per: "token": paged, [num_pages, page_size, *shape]; "slot": a state of fixed size for each request,
            [num_slots + snapshots, versions, *shape], where kept states of requests' beginnings lie after those of slots;
            "window": of each token of a slot's newest decode window, [num_slots, n, *shape]. With it the next step can
            bring the state up to the tokens that were accepted: a rejected one is never in it.
        shape: of the values of one token or one state; `axes` are its logical axes, as for parameters.
        versions: states kept for a slot.
    """

    name: str
    per: Literal["token", "slot", "window"]
    shape: tuple[int, ...]
    dtype: Any
    axes: tuple[str | None, ...]
    versions: int = 1

    def __post_init__(self):
        assert len(self.shape) == len(self.axes)
        assert self.per == "slot" or self.versions == 1

    def device_bytes(self, mesh_sizes: Mapping[str, int], window: int = 1) -> int:
        """Bytes of one token or of one slot on each device of a mesh with such axis sizes."""
        split = math.prod(devices_of(axis, mesh_sizes) for axis in self.axes if axis)
        number = window if self.per == "window" else self.versions
        return self.dtype.itemsize * number * math.prod(self.shape) // split


@dataclass(frozen=True)
class CacheSpec:
    """The cache of one layer.

    Attributes:
        fp8: what the layer keeps instead of `arrays` where its cache is to be in FP8; () if it has no such form.
    """

    arrays: tuple[CacheArray, ...]
    fp8: tuple[CacheArray, ...] = ()

    @property
    def in_fp8(self) -> bool:
        return any(array.dtype == jnp.float8_e4m3fn for array in self.arrays)

    def stored_as(self, dtype: KVCacheDtype) -> "CacheSpec":
        """With its pages in another type. "fp8" leaves a layer as it is that has no such form."""
        if dtype == "fp8" and self.fp8:
            return CacheSpec(self.fp8)
        if dtype == "bf16":
            return CacheSpec(tuple(map(_in_bfloat16, self.arrays)), self.fp8)
        return self

    @property
    def paged(self) -> bool:
        """All of it is paged, so requests can share prefixes, and rejected drafts are simply overwritten."""
        return all(array.per == "token" for array in self.arrays)

    @property
    def rejects(self) -> bool:
        """Tokens of a window can be rejected: they are overwritten, or not yet in the state."""
        return self.paged or any(array.per == "window" for array in self.arrays)

    def shapes(
        self, *, num_pages: int, page_size: int, num_slots: int, window: int, mesh: Mesh, snapshots: int = 0
    ) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Shapes, dtypes and shardings of its arrays, with decode windows of at most `window` tokens.

        Each rank of the mesh has so many pages and slots.
        """
        leading_dims = {"token": (num_pages, page_size), "window": (num_slots, window)}

        def shape(array: CacheArray) -> jax.ShapeDtypeStruct:
            leading = leading_dims.get(array.per, (num_slots + snapshots, array.versions))
            sharding = NamedSharding(mesh, partition_spec(("ranks", None, *array.axes), mesh))
            first, second = leading
            shape = (num_ranks(mesh) * first, second, *array.shape)
            return jax.ShapeDtypeStruct(shape, array.dtype, sharding=sharding)

        return tuple(map(shape, self.arrays))


def _in_bfloat16(array: CacheArray) -> CacheArray:
    of_activations = array.per == "token" and jnp.issubdtype(array.dtype, jnp.floating)
    return replace(array, dtype=np.dtype(jnp.bfloat16)) if of_activations else array


def cache_stored_as(model: ModuleT, dtype: KVCacheDtype) -> ModuleT:
    """`model`, with the cache of each of its layers declared in this type."""
    name = "cache_spec"  # see `Attention`
    for _, module in nnx.iter_modules(model):
        if isinstance(spec := vars(module).get(name), CacheSpec):
            setattr(module, name, spec.stored_as(dtype))
    return model


def page_bytes(specs: Iterable[CacheSpec], page_size: int, mesh_sizes: Mapping[str, int]) -> int:
    """Bytes of one page over all layers, on each device."""
    arrays = (array for spec in specs for array in spec.arrays if array.per == "token")
    return page_size * sum(array.device_bytes(mesh_sizes) for array in arrays)


def slot_bytes(specs: Iterable[CacheSpec], window: int, mesh_sizes: Mapping[str, int]) -> int:
    """Bytes that one slot's states take over all layers, on each device; 0 if all caches are paged."""
    arrays = (array for spec in specs for array in spec.arrays if array.per != "token")
    return sum(array.device_bytes(mesh_sizes, window) for array in arrays)
