"""Words of the device in the host's memory, without a copy that the host would have to wait for."""

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.readback import mosaic


def is_used() -> bool:
    """Whether steps write their output into this process's memory: on Hopper, in one process, where it was measured to pay."""
    return tuning.current().host_readback and jax.process_count() == 1 and not hopper_unsupported_reason()


def write(words: jax.Array, to: jax.Array) -> jax.Array:
    """Writes words where the host waits for them; see `host_memory.HostMemory`.

    Args:
        words: int32 of any shape.
        to: int32 [3] or more, which begins with an `Entry`'s words; zeros: nothing is written.

    Returns:
        int32 [1], ready when all is written.
    """
    return mosaic.write(words, to)
