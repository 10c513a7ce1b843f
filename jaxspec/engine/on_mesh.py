"""A step over the devices of a mesh: one `jax.shard_map`, in which each device sees its part of what is split."""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec import comm
from jaxspec.models.params import DATA_AXIS, TENSOR_AXIS, num_ranks

Function = TypeVar("Function", bound=Callable[..., Any])


def on_mesh(function: Function, mesh: Mesh, in_specs: tuple[Any, ...], out_specs: Any) -> Function:
    """A function of whole arrays that runs `function` on each device's parts; on one device `function` itself.

    Args:
        in_specs, out_specs: how its arguments and results lie on the mesh, trees of `PartitionSpec` or their beginnings.
            What is said to be replicated is not checked: only `comm` makes it so.
    """
    if mesh.size == 1:
        return function

    axis = TENSOR_AXIS if mesh.shape[TENSOR_AXIS] > 1 else None
    rank_axis = DATA_AXIS if num_ranks(mesh) > 1 else None

    def of_arrays(*args: Any) -> Any:
        # Empty arrays are made anew on each device: where nothing reads one after all, XLA's partitioner crashes.
        arrays, structure = jax.tree.flatten(args)
        array_specs = jax.tree.leaves(jax.tree.broadcast(in_specs, args, is_leaf=_is_spec), is_leaf=_is_spec)
        given = [(array, spec) for array, spec in zip(arrays, array_specs, strict=True) if array.size]

        def of_parts(*parts: jax.Array) -> Any:
            rest = iter(parts)
            whole = [
                next(rest) if array.size else jnp.zeros(NamedSharding(mesh, spec).shard_shape(array.shape), array.dtype)
                for array, spec in zip(arrays, array_specs, strict=True)
            ]
            with comm.split_over(axis, rank_axis):
                return function(*jax.tree.unflatten(structure, whole))

        # The check of replication refuses kernels that read replicated and split arrays at once.
        mapped = jax.shard_map(
            of_parts, mesh=mesh, in_specs=tuple(spec for _, spec in given), out_specs=out_specs, check_vma=False
        )
        return mapped(*(array for array, _ in given))

    return cast(Function, of_arrays)


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)


def specs(tree: Any) -> Any:
    """How the arrays of a tree, or their shapes, lie on the mesh; on one device some may not say it."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", PartitionSpec()), tree)
