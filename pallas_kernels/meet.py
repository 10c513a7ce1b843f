"""Blocks of a grid that wait for each other at a counter in global memory. The interpreter has no such wait."""

from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu


def meet(counter: Any, count: int) -> None:
    """Waits until `count` warpgroups have arrived; what they wrote to global memory before is visible after.

    All of them must be on the device at once, or start in an order in which those that wait never keep out the others. Where
    kernels of a step run at the same time, two that meet must depend on each other: half of the blocks of each would wait
    forever for the rest.

    Args:
        counter: reference of one int32, 0 before the first arrival.
    """
    arrive(counter)
    await_arrivals(counter, count)


def arrive(counter: Any) -> None:
    """The first half of `meet`, for warpgroups that others wait for."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_: Any, counter: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        _semaphore(counter).signal(1, memory_scope="gpu")

    signal(counter)


def await_arrivals(counter: Any, count: int) -> None:
    """The second half of `meet`, for warpgroups that wait for others."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, counter: Any) -> None:
        _semaphore(counter).wait(count, decrement=False, memory_scope="gpu")

    wait(counter)


def _semaphore(counter: Any) -> mgpu.utils.SemaphoreRef:
    return mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
