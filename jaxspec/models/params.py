"""Declaring parameters once: shape, dtype, logical axes and initialiser.

A model is built from these declarations without touching a device; its shapes, shardings, loader targets and random
values (for benchmarks and tests) all follow from them.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError
from pallas_kernels.quant.schemes import VALUES, Scheme
from pallas_kernels.quant.values import Quantised

# The axes of a mesh: ranks, which serve requests of their own, and the devices of a rank. A mesh of one rank has the second
# alone.
DATA_AXIS, TENSOR_AXIS = "data", "tensor"

# Which mesh axes each logical axis is split over, the first of them first. Axes that are absent are replicated.
AXIS_RULES: dict[str, tuple[str, ...]] = {
    "ranks": (DATA_AXIS,),  # of arrays that belong to requests: each rank's part after the other's
    "vocab": (TENSOR_AXIS,),
    "heads": (TENSOR_AXIS,),
    "kv_heads": (TENSOR_AXIS,),
    "mlp": (TENSOR_AXIS,),
    "experts": (DATA_AXIS, TENSOR_AXIS),
}

# Of random codes, whose largest is 448.
_E4M3_STD = 112.0

Init = Literal["normal", "ones", "zeros", "codes", "scale", "factor"]
ModuleT = TypeVar("ModuleT", bound=nnx.Module)


@dataclass(frozen=True)
class Declare:
    """Passed through the constructors of a model: makes parameters of the model's compute dtype.

    Attributes:
        centred_norms: see `ModelConfig`.
    """

    dtype: Any
    centred_norms: bool = False

    def __call__(
        self,
        shape: tuple[int, ...],
        axes: tuple[str | None, ...],
        init: Init = "normal",
        dtype: Any = None,
        *,
        quantisable: bool = False,
        spreads: int = 1,
    ) -> nnx.Param:
        """
        Args:
            quantisable: a weight [*stack, out, in] that the model also takes as a `Quantised`.
            spreads: heads of which the split axis has groups: more devices than groups may share them (see `spread_heads`).
        """
        assert len(shape) == len(axes)
        value = jax.ShapeDtypeStruct(shape, dtype or self.dtype)
        metadata: dict[str, Any] = {"axes": axes, "init": init, "quantisable": quantisable, "spreads": spreads}
        return nnx.Param(value, **metadata, block=(1,) * len(shape))


class QuantisedParam(nnx.Module):
    """A weight declared as its codes, their scale and, in schemes that have one, a factor of each matrix.

    Read like a parameter it gives a `Quantised`.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[str | None, ...], scheme: Scheme):
        self.scheme = scheme
        of_array: dict[str, tuple[str | None, ...]] = {
            "codes": axes, "scale": scheme.scale_axes(axes), "factor": axes[:-2],
        }  # fmt: skip
        for name, array in scheme.arrays(shape).items():
            block = scheme.block(len(shape)) if name == "codes" else (1,) * len(array.shape)
            options: dict[str, Any] = {
                "init": name, "scheme": scheme, "block": block, "fan_in": shape[-1], "spreads": 1,
            }  # fmt: skip
            setattr(self, name, nnx.Param(array, axes=of_array[name], **options))

    def __getitem__(self, index: EllipsisType) -> Quantised:
        arrays = {name: getattr(self, name)[index] for name in ("codes", "scale", "factor") if hasattr(self, name)}
        return Quantised(**arrays, scheme=self.scheme)


def declared(weight: nnx.Param | QuantisedParam, mesh_sizes: Mapping[str, int]) -> Any:
    """What each device of a mesh has of a weight: a `jax.ShapeDtypeStruct`, or a `Quantised` of them.

    Args:
        mesh_sizes: the mesh's axes, for which `with_shardings` refuses nothing.
    """
    if isinstance(weight, nnx.Variable):
        whole, axes = weight.get_value(), weight.get_metadata()["axes"]
        part = (size // devices_of(axis, mesh_sizes) for size, axis in zip(whole.shape, axes, strict=True))
        return jax.ShapeDtypeStruct(tuple(part), whole.dtype)
    names = [name for name in ("codes", "scale", "factor") if hasattr(weight, name)]
    return Quantised(**{name: declared(getattr(weight, name), mesh_sizes) for name in names}, scheme=weight.scheme)


Schemes = Mapping[tuple[str | int, ...], Scheme]


def quantised(model: ModuleT, schemes: Schemes) -> ModuleT:
    """`model`, with its parameters at these paths declared as quantised."""
    for path, scheme in schemes.items():
        owner: Any = model
        for key in path[:-1]:
            owner = owner[key] if isinstance(key, int) else getattr(owner, key)
        declared = getattr(owner, str(path[-1]))
        metadata = declared.get_metadata()
        assert metadata["quantisable"], dotted(path)
        setattr(owner, str(path[-1]), QuantisedParam(declared.get_value().shape, metadata["axes"], scheme))
    return model


def schemes_of(model: nnx.Module) -> dict[tuple[str | int, ...], Scheme]:
    """What `quantised` was given."""
    found = {}
    for path, variable in declarations(model).items():
        if "scheme" in (metadata := variable.get_metadata()) and path[-1] == "codes":
            found[path[:-1]] = metadata["scheme"]
    return found


def kernel_obstacles(model: nnx.Module, dtype: Any, mesh_sizes: Mapping[str, int]) -> dict[str, str]:
    """Modules with quantised weights that no kernel reads here, by their paths, and why: `kernel_obstacle` of each.

    Args:
        dtype: of activations.
        mesh_sizes: axes of the mesh that shares the weights. Kernels see what one of its devices has.
    """
    found = {}
    for path in schemes_of(model):
        owner: Any = model
        for key in path[:-1]:
            owner = owner[key] if isinstance(key, int) else getattr(owner, key)
        if reason := owner.kernel_obstacle(dtype, mesh_sizes):
            found[dotted(path[:-1])] = reason
    return found


def partition_spec(axes: tuple[str | None, ...], mesh: Mesh) -> PartitionSpec:
    """The mesh axes of an array's logical axes; two that land on one mesh axis are a bug in the declaration."""
    split = [tuple(name for name in AXIS_RULES.get(axis or "", ()) if name in mesh.axis_names) for axis in axes]
    used = [name for names in split for name in names]
    assert len(used) == len(set(used)), f"logical axes {axes} share a mesh axis"
    return PartitionSpec(*(names if len(names) > 1 else next(iter(names), None) for names in split))


def of_ranks(mesh: Mesh) -> NamedSharding:
    """How arrays lie that belong to requests: each rank has its part of the first axis, and all of its devices the same."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXIS) if DATA_AXIS in mesh.axis_names else PartitionSpec())


def num_ranks(mesh: Mesh | AbstractMesh) -> int:
    """How many ranks, with requests of their own, a mesh has."""
    return mesh.shape.get(DATA_AXIS, 1)


def declarations(model: nnx.Module) -> dict[tuple[str | int, ...], nnx.Variable]:
    """Path -> declared parameter, in a stable order."""
    flat: Any = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return dict(flat)


def with_shardings(model: nnx.Module, mesh: Mesh) -> dict[tuple[str | int, ...], jax.ShapeDtypeStruct]:
    """Path -> shape, dtype and sharding of every parameter on `mesh`.

    Raises:
        ConfigError: a split axis is not divisible by the mesh axis, or the mesh cuts a block that has one scale; it names
            the sizes that would do.
    """
    ranks, out = num_ranks(mesh), {}
    for path, variable in declarations(model).items():
        value = variable.get_value()
        metadata = variable.get_metadata()
        for axis, size, block, _ in _split_axes(variable, value.shape):
            devices = devices_of(axis, mesh.shape)
            by = f"tensor parallel size {mesh.shape[TENSOR_AXIS]}"
            if devices > mesh.shape[TENSOR_AXIS]:
                by = f"data parallel size {ranks} times {by}"
            if size % devices:
                raise ConfigError(
                    f"{by} does not divide {size}, the {axis} axis of {dotted(path)}; use {_fitting_words(model, ranks)}"
                )
            if not fits(devices, size, block):
                raise ConfigError(
                    f"{by} cuts {dotted(path[:-1])} inside a block of {block} that has one scale ({metadata['scheme']}: "
                    f"{size} over {devices}); use {_fitting_words(model, ranks)}, or convert the model with "
                    "--quantization bf16"
                )
        sharding = NamedSharding(mesh, partition_spec(metadata["axes"], mesh))
        out[path] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
    return out


def _split_axes(variable: nnx.Variable, shape: tuple[int, ...]) -> list[tuple[str, int, int, int]]:
    """Logical name, size and block of each axis of a parameter that a mesh splits, and how many heads it spreads over."""
    metadata = variable.get_metadata()
    axes = zip(metadata["axes"], shape, metadata["block"], strict=True)
    return [(axis, size, block, metadata["spreads"]) for axis, size, block in axes if axis in AXIS_RULES]


def fits(devices: int, size: int, block: int = 1, spreads: int = 1) -> bool:
    """Whether so many devices split an axis of this size evenly, or share its groups of heads evenly."""
    whole = size % devices == 0 and size // devices % block == 0
    return devices == 1 or whole or (devices % size == 0 and spreads % devices == 0)


def devices_of(axis: str | None, mesh_sizes: Mapping[str, int]) -> int:
    """How many parts a mesh with such axis sizes makes of a logical axis."""
    return math.prod(mesh_sizes.get(name, 1) for name in AXIS_RULES.get(axis or "", ()))


def _fitting_words(model: nnx.Module, ranks: int) -> str:
    """The tensor parallel sizes that split a model evenly beside so many ranks, in words; or what else to change. Of heads that
    are spread, sizes of the model itself."""
    split = []
    for variable in declarations(model).values():
        split += _split_axes(variable, variable.get_metadata().get("unspread", variable.get_value().shape))

    def fit(n: int) -> bool:
        sizes = {TENSOR_AXIS: n, DATA_AXIS: ranks}
        return all(fits(devices_of(axis, sizes), *rest) for axis, *rest in split)

    fitting = [str(n) for n in range(1, min(max(size, spreads) for _, size, _, spreads in split) + 1) if fit(n)]
    if not fitting:
        experts = next(size for axis, size, *_ in split if devices_of(axis, {DATA_AXIS: ranks}) > 1)
        return f"a data parallel size that divides {experts}"
    *others, last = fitting
    return f"{', '.join(others)} or {last}" if others else last


def dotted(path: tuple[str | int, ...]) -> str:
    return ".".join(map(str, path))


def nest(flat: Mapping[tuple[str | int, ...], Any]) -> dict[str | int, Any]:
    """Path -> value as the nested dict that `nnx.replace_by_pure_dict` and the step take."""
    tree: dict[str | int, Any] = {}
    for path, value in flat.items():
        node = tree
        for key in path[:-1]:
            node = node.setdefault(key, {})
        node[path[-1]] = value
    return tree


def random_params(
    model: nnx.Module, mesh: Mesh, seed: int = 0, *, randomize_norms: bool = False, most_drawn: int = 1 << 28
) -> dict:
    """Random parameters as a nested dict: weights N(0, fan_in^-1/2), norms 1, biases 0, embeddings N(0, 1).

    Each tensor is drawn on its own shards by one small jit per shape, with the `rbg` generator: threefry initialisers
    of a whole model take minutes to compile.

    Args:
        randomize_norms: draw norms from U(0.5, 1.5) and router biases from N(0, 0.1), so that tests see them.
        most_drawn: elements that a device draws at once. Their random bits may take four bytes each beside the tensor, which
            for all experts of a big model's layer is as much as several layers take.
    """
    key = jax.random.key(seed, impl="rbg")
    flat, declared = {}, declarations(model)
    for i, (path, target) in enumerate(with_shardings(model, mesh).items()):
        metadata = declared[path].get_metadata()
        std = 1.0 if path[0] == "embed" else float(metadata.get("fan_in") or target.shape[-1]) ** -0.5
        draw = _drawer(metadata["init"], randomize_norms, std, target, metadata.get("scheme"), most_drawn)
        flat[path] = draw(jax.random.fold_in(key, i))
    return nest(flat)


@functools.lru_cache(maxsize=256)
def _drawer(
    init: Init, randomize_norms: bool, std: float, target: jax.ShapeDtypeStruct, scheme: Scheme | None, most_drawn: int
) -> Callable[[jax.Array], jax.Array]:
    """One jitted function for all tensors of a shape: a model has hundreds of tensors and a few dozen shapes."""

    def draw(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        if init == "normal":
            value = jax.random.normal(key, shape, jnp.float32) * std
        elif init == "ones":
            value = jnp.ones(shape)
            if randomize_norms:
                value = jax.random.uniform(key, shape, minval=0.5, maxval=1.5)
        elif init == "codes":
            return _random_codes(key, shape, target.dtype)
        elif init == "scale" and scheme:
            value = jax.random.uniform(key, shape, minval=0.5, maxval=1.5)
            value = value if scheme.factor else value * std / _codes_std(scheme)
            if target.dtype == jnp.uint8:  # exponents
                value = jnp.round(jnp.log2(value)) + 127
        elif init == "factor" and scheme:
            value = jnp.full(shape, std / _codes_std(scheme))
        else:
            value = jnp.zeros(shape)
            if randomize_norms:
                value = 0.1 * jax.random.normal(key, shape)
        return value.astype(target.dtype)

    sharding: Any = target.sharding
    part = sharding.shard_shape(target.shape)
    if math.prod(part) <= most_drawn:
        return jax.jit(lambda key: draw(key, target.shape), out_shardings=sharding)
    pieces = next(
        n for n in range(1, part[0] + 1) if (part[0] % n == 0 and math.prod(part) <= n * most_drawn) or n == part[0]
    )

    split = tuple(name for names in sharding.spec if names for name in ((names,) if isinstance(names, str) else names))

    def draw_part(key: jax.Array) -> jax.Array:
        if split:
            key = jax.random.fold_in(key, jax.lax.axis_index(split))
        piece = (part[0] // pieces, *part[1:])
        return jax.lax.map(lambda each: draw(each, piece), jax.random.split(key, pieces)).reshape(part)

    in_parts = jax.shard_map(
        draw_part, mesh=sharding.mesh, in_specs=PartitionSpec(), out_specs=sharding.spec, check_vma=False
    )
    return jax.jit(in_parts, out_shardings=sharding)


def _random_codes(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """e4m3 in numbers of a normal distribution without its tails, other codes uniformly."""
    if dtype == jnp.uint8:
        return jax.random.bits(key, shape, jnp.uint8)
    normal = jax.random.normal(key, shape) * _E4M3_STD
    return jnp.clip(normal, -4 * _E4M3_STD, 4 * _E4M3_STD).astype(dtype)


def _codes_std(scheme: Scheme) -> float:
    """Of what random codes stand for."""
    return _E4M3_STD if scheme.values == "e4m3" else float(np.std(VALUES[scheme.values]))


def count_parameters(model: Any) -> int:
    """Of the model; the scales of quantised weights are none of them."""
    total = 0
    for variable in declarations(model).values():
        metadata = variable.get_metadata()
        if metadata["init"] not in ("scale", "factor"):
            scheme = metadata.get("scheme")
            total += math.prod(variable.get_value().shape) * (scheme.packed if scheme else 1)
    return total


def device_bytes(model: nnx.Module, mesh: Mesh) -> int:
    """Of the parameters on each device of `mesh`. Raises as `with_shardings` does."""
    return shard_bytes(with_shardings(model, mesh).values())


def shard_bytes(arrays: Iterable[Any]) -> int:
    """Of arrays, or of their shapes and shardings, on each of their devices."""
    return sum(math.prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays)
