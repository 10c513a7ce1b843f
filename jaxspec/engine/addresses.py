"""Room for what comes and goes, so that a step's temporaries lie where they lay before.

A recorded CUDA graph holds the addresses of its buffers. Where one lies elsewhere than at the last run, XLA changes every
kernel that touches it, 3 to 5 us each, while the host dispatches the step; and nearly all kernels touch the temporaries, which
are one allocation. A step's input and outputs live on beside the next step's. Were one of them next to the temporaries'
place, that place would begin after it in one step, and where it was in the next.
"""

from collections.abc import Iterable

import jax
import numpy as np
from jax.sharding import NamedSharding

from jaxspec.engine.batch import InputLayout
from jaxspec.engine.launcher import laid_out
from jaxspec.models.params import num_ranks

# At most so many inputs and outputs of steps exist at once.
_GAPS = 16
_LEAST_BYTES = 1 << 17


def leave_gaps(layouts: Iterable[InputLayout], sharding: NamedSharding) -> tuple[jax.Array, ...]:
    """Free gaps in every device's memory, which the allocator fills with inputs and small outputs of steps before it cuts
    any from the free rest, where the temporaries are.

    Args:
        layouts: of the inputs of a rank. sharding: how those of all ranks lie.

    Returns:
        What keeps the gaps apart from each other and from the rest, for as long as it lives.
    """
    largest = max(4 * layout.size for layout in layouts)
    size = num_ranks(sharding.mesh) * max(_LEAST_BYTES, 1 << (largest - 1).bit_length())
    blocks = [laid_out(np.zeros(size, np.uint8), sharding).block_until_ready() for _ in range(2 * _GAPS)]
    return tuple(blocks[1::2])
