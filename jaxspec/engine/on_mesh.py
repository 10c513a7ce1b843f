"""A step over the devices of a mesh: one `jax.shard_map`, in which each device sees its part of what is split."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.sharding import Mesh, PartitionSpec

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

    def of_parts(*args: Any) -> Any:
        with comm.split_over(axis, rank_axis):
            return function(*args)

    # The check of replication refuses kernels that read replicated and split arrays at once.
    mapped: Any = jax.shard_map(of_parts, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return mapped


def specs(tree: Any) -> Any:
    """How the arrays of a tree, or their shapes, lie on the mesh; on one device some may not say it."""
    return jax.tree.map(lambda array: getattr(array.sharding, "spec", PartitionSpec()), tree)
