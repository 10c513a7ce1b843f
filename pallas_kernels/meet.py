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

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, counter: Any) -> None:
        mgpu.utils.warpgroup_barrier()
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.signal(1, memory_scope="gpu")
        semaphore.wait(count, decrement=False, memory_scope="gpu")

    wait(counter)
