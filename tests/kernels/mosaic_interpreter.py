"""The interpreter of Mosaic GPU kernels, with race detection, and with a check that it lacks itself.

The copy engine tiles global memory as it tiles shared memory: of a copy that begins inside a tile it leaves out what lies after
that tile's end. The interpreter copies everything, so here every interpreted copy says where it begins.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
import pytest

interpreted = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="the interpreter of jax 0.10 lacks features that the kernels use"
)

# Findings of every kernel since `detect_races`: jax itself keeps only those of the last one.
_found: list[Any] = []
# Places in global memory, with the tiles of the copy, of copies that begin inside a tile.
_torn: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
# Whether the kernels whose bodies are being traced are going to be interpreted.
_traced: list[bool] = []


def _checked(copy: Callable[..., Any]) -> Callable[..., Any]:
    """The copy function, which notes a torn copy of an interpreted kernel."""

    @functools.wraps(copy)
    def checked(source: Any, target: Any, *args: Any, **options: Any) -> Any:
        tiles = [t.tiling for ref in (source, target) for t in getattr(ref, "transforms", ()) if hasattr(t, "tiling")]
        if _traced and _traced[-1] and tiles:
            jax.debug.callback(functools.partial(_note, tiles[0]), *_begin(source, target)[-len(tiles[0]) :])
        return copy(source, target, *args, **options)

    return checked


def _begin(*refs: Any) -> list[Any]:
    """Where the one in global memory begins, by its dimensions that are not indexed away."""
    (ref,) = (ref for ref in refs if not any(hasattr(t, "tiling") for t in getattr(ref, "transforms", ())))
    begin = [0] * len(getattr(ref, "ref", ref).shape)
    for indexer in getattr(ref, "transforms", ()):
        places = zip(begin, indexer.indices, strict=True)
        begin = [at + index.start for at, index in places if hasattr(index, "start")]
    return begin


def _note(tiles: tuple[int, ...], *begin: Any) -> None:
    place = tuple(int(np.asarray(at)) for at in begin)
    if any(at % size for at, size in zip(place, tiles, strict=True)):
        _torn.append((place, tiles))


def _told(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """plgpu.kernel, which says while its body is traced whether that is going to be interpreted."""

    @functools.wraps(kernel)
    def told(body: Callable[..., None], *args: Any, **options: Any) -> Any:
        @functools.wraps(body)
        def traced(*refs: Any, **scratch: Any) -> None:
            _traced.append(bool(options.get("interpret")))
            try:
                body(*refs, **scratch)
            finally:
                _traced.pop()

        return kernel(traced, *args, **options)

    return told


plgpu.copy_gmem_to_smem = _checked(plgpu.copy_gmem_to_smem)
plgpu.copy_smem_to_gmem = _checked(plgpu.copy_smem_to_gmem)
plgpu.kernel = _told(plgpu.kernel)


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
    _torn.clear()
    return plgpu.InterpretGPUParams(detect_races=True)


def assert_no_races(results: Any, *, kernels: int = 1) -> None:
    """No kernel since `detect_races` had a race, or a copy that a GPU would leave incomplete.

    Args:
        results: of the calls, which are waited for.
        kernels: how many kernels ran at least.
    """
    jax.block_until_ready(results)
    assert len(_found) >= kernels
    assert not any(state.races_found for state in _found)
    jax.effects_barrier()
    assert not _torn, f"copies begin inside a tile (place, tile): {sorted(set(_torn))[:8]}"
