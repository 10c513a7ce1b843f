"""The interpreter of Mosaic GPU kernels, which looks for races."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 lacks what the kernels use"
)

# Of every kernel since `detect_races`: jax itself keeps what it found in the last one only.
_found: list[Any] = []


@functools.cache
def _keep_what_is_found() -> None:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    make = gpu_callbacks.GPURaceDetectionState

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        _found.append(make(*args, **kwargs))
        return _found[-1]

    gpu_callbacks.GPURaceDetectionState = make_and_keep  # type: ignore[assignment, misc]


def detect_races() -> Any:
    """For a kernel's argument `interpret`."""
    _keep_what_is_found()
    _found.clear()
    return plgpu.InterpretGPUParams(detect_races=True)


def assert_no_races(results: Any, *, kernels: int = 1) -> None:
    """In the calls since `detect_races`, which gave these results.

    Args:
        kernels: how many ran, at least.
    """
    jax.block_until_ready(results)
    assert len(_found) >= kernels
    assert not any(state.races_found for state in _found)
