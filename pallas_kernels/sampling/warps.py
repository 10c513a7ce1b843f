"""What the threads of a warp find together, without a barrier.

Warps of a block get different answers and may take different branches. Nothing that all of them do together, like a reduction
or a barrier, may lie in such a branch.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir.dialects import arith, nvvm

from pallas_kernels.inline_code import elements, word

_ONE = plgpu.Layout.WG_SPLAT(())

# All threads of a warp.
_ALL = 0xFFFFFFFF

i32 = jnp.int32


def any_in_warp(found: jax.Array, *, layout: Any, emulated: bool) -> jax.Array:
    """Whether a thread of the warp has True in bool [n], which is in `layout`: bool [].

    Args:
        emulated: for the interpreter, which knows no warps: over all threads.
    """
    if emulated:
        return found.any()
    words = jnp.where(found, jnp.ones_like(found, i32), jnp.zeros_like(found, i32))

    def vote(word: Any, mine: Any) -> Any:
        is_one = arith.cmpi(arith.CmpIPredicate.ne, mine, mgpu.c(0, word))
        return arith.extui(word, nvvm.vote_sync(mgpu.c(_ALL, word), is_one, "any"))

    return _in_warp(words, arith.ori, vote, layout) != 0


def largest_in_warp(values: jax.Array, *, layout: Any, emulated: bool) -> jax.Array:
    """The largest of the warp's int32 [n]: int32 []. Arguments as in `any_in_warp`."""
    if emulated:
        return values.max()

    def largest(word: Any, mine: Any) -> Any:
        return nvvm.redux_sync(mine, nvvm.ReductionKind.MAX, mgpu.c(_ALL, word))

    return _in_warp(values, arith.maxsi, largest, layout)


def _in_warp(
    values: jax.Array, combine: Callable[[Any, Any], Any], across: Callable[[Any, Any], Any], layout: Any
) -> jax.Array:
    """A thread's int32 values combined, then across(the type of a word, these) of the warp's threads: int32 []."""

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), i32, layout=_ONE))
    def found(_: Any, values: Any) -> Any:
        mine = functools.reduce(combine, (each for register in values.registers.flat for each in elements(register)))
        return mgpu.FragmentedArray.splat(across(word(), mine), (), is_signed=True)

    return found(values)
