"""What the kernels use of Pallas whose spelling differs between the supported versions of jax."""

from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu


def transpose_ref(ref: Any, permutation: tuple[int, ...]) -> Any:
    """A view of a reference with permuted axes."""
    return plgpu.transpose_ref(ref, permutation) if jax.__version_info__ < (0, 11) else ref.transpose(permutation)
