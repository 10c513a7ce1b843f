"""Declaring parameters once: shape, dtype, logical axes and initialiser.

A model is built from these declarations without touching a device; its shapes, shardings, loader targets and random
values (for benchmarks and tests) all follow from them.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.errors import ConfigError

TENSOR_AXIS = "tensor"

# Which mesh axis each logical axis is split over. Axes that are absent are replicated.
AXIS_RULES: dict[str, str] = {
    "vocab": TENSOR_AXIS,
    "heads": TENSOR_AXIS,
    "kv_heads": TENSOR_AXIS,
    "mlp": TENSOR_AXIS,
    "experts": TENSOR_AXIS,
}

Init = Literal["normal", "ones", "zeros"]


@dataclass(frozen=True)
class Declare:
    """Passed through the constructors of a model: makes parameters of the model's compute dtype."""

    dtype: Any

    def __call__(
        self, shape: tuple[int, ...], axes: tuple[str | None, ...], init: Init = "normal", dtype: Any = None
    ) -> nnx.Param:
        assert len(shape) == len(axes)
        return nnx.Param(jax.ShapeDtypeStruct(shape, dtype or self.dtype), axes=axes, init=init)


def partition_spec(axes: tuple[str | None, ...]) -> PartitionSpec:
    """The mesh axes of a parameter's logical axes; two that land on one mesh axis are a bug in the declaration."""
    spec = [AXIS_RULES.get(a) if a else None for a in axes]
    used = [s for s in spec if s]
    assert len(used) == len(set(used)), f"logical axes {axes} share a mesh axis"
    return PartitionSpec(*spec)


def declarations(model: nnx.Module) -> dict[tuple[str | int, ...], nnx.Variable]:
    """Path -> declared parameter, in a stable order."""
    flat: Any = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return dict(flat)


def with_shardings(model: nnx.Module, mesh: Mesh) -> dict[tuple[str | int, ...], jax.ShapeDtypeStruct]:
    """Path -> shape, dtype and sharding of every parameter on `mesh`.

    Raises:
        ConfigError: a split axis is not divisible by the mesh axis.
    """
    out = {}
    for path, variable in declarations(model).items():
        value = variable.get_value()
        spec = partition_spec(variable.get_metadata()["axes"])
        for size, mesh_axis in zip(value.shape, spec, strict=True):
            if mesh_axis and size % mesh.shape[mesh_axis]:
                raise ConfigError(
                    f"tensor parallel size {mesh.shape[mesh_axis]} does not divide {size}, an axis of {dotted(path)}"
                )
        out[path] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=NamedSharding(mesh, spec))
    return out


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


def random_params(model: nnx.Module, mesh: Mesh, seed: int = 0, *, randomize_norms: bool = False) -> dict:
    """Random parameters as a nested dict: weights N(0, fan_in^-1/2), norms 1, biases 0, embeddings N(0, 1).

    Each tensor is drawn on its own shards by one small jit per shape, with the `rbg` generator: threefry initialisers
    of a whole model take minutes to compile.

    Args:
        randomize_norms: draw norms from U(0.5, 1.5) and router biases from N(0, 0.1), so that tests see them.
    """
    key = jax.random.key(seed, impl="rbg")
    flat = {}
    for i, (path, target) in enumerate(with_shardings(model, mesh).items()):
        init: Init = declarations(model)[path].get_metadata()["init"]
        draw = _drawer(init, randomize_norms, _std(path, target.shape), target)
        flat[path] = draw(jax.random.fold_in(key, i))
    return nest(flat)


def _std(path: tuple[str | int, ...], shape: tuple[int, ...]) -> float:
    return 1.0 if path[0] == "embed" else float(shape[-1]) ** -0.5


@functools.lru_cache(maxsize=256)
def _drawer(
    init: Init, randomize_norms: bool, std: float, target: jax.ShapeDtypeStruct
) -> Callable[[jax.Array], jax.Array]:
    """One jitted function for all tensors of a shape: a model has hundreds of tensors and a few dozen shapes."""

    def draw(key: jax.Array) -> jax.Array:
        if init == "normal":
            value = jax.random.normal(key, target.shape, jnp.float32) * std
        elif init == "ones":
            value = jnp.ones(target.shape)
            if randomize_norms:
                value = jax.random.uniform(key, target.shape, minval=0.5, maxval=1.5)
        else:
            value = jnp.zeros(target.shape)
            if randomize_norms:
                value = 0.1 * jax.random.normal(key, target.shape)
        return value.astype(target.dtype)

    return jax.jit(draw, out_shardings=target.sharding)


def count_parameters(model: Any) -> int:
    return sum(int(np.prod(v.get_value().shape)) for v in declarations(model).values())
