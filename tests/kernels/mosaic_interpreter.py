"""The interpreter of Mosaic GPU kernels, with race detection."""

import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import pytest

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 lacks features that the kernels use"
)

# Findings of every kernel since `detect_races`: jax itself keeps only those of the last one.
_found: list[Any] = []


@functools.cache
def _keep_all_findings() -> None:
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    make = gpu_callbacks.GPURaceDetectionState

    def make_and_keep(*args: Any, **kwargs: Any) -> Any:
        _found.append(make(*args, **kwargs))
        return _found[-1]

    gpu_callbacks.GPURaceDetectionState = make_and_keep  # type: ignore[assignment, misc]


def detect_races() -> Any:
    """A value for a kernel's argument `interpret`. Forgets earlier findings."""
    _keep_all_findings()
    _found.clear()
    return plgpu.InterpretGPUParams(detect_races=True)


def assert_no_races(results: Any, *, kernels: int = 1) -> None:
    """No kernel since `detect_races` had a race.

    Args:
        results: of the calls, which are waited for.
        kernels: how many kernels ran at least.
    """
    jax.block_until_ready(results)
    assert len(_found) >= kernels
    assert not any(state.races_found for state in _found)
