"""Mosaic GPU kernels in which every device reads the others' rows: `peer_sum`, `peer_scatter_sum` and `peer_gather` in traces.

A call begins with a barrier of all devices, which the runtime adds: the parts are there, and nobody needs the memory of the
call before. It ends when all devices have read this one's part, whose memory may then be used for something else.

A warpgroup makes one row. The first one waits for the other devices' last reads; the others do not wait, so that all come to
run, however few fit onto a device at once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load
from pallas_kernels.row import PARAMS, f32, row_unsupported_reason, whole_row

# Whose memory NVLink reaches in one host.
MOST_DEVICES = 8
# Over more than two devices, larger sums read less in two phases: each device adds up a part of the rows, then gathers all.
MOST_BYTES_AT_ONCE = 1 << 19


def unsupported_reason(part: jax.Array, axis: str) -> str | None:
    """Why the kernels do not support this part, or None if they do."""
    if part.ndim != 2:
        return f"it needs rows, and the part has {part.ndim} axes"
    if (reason := row_unsupported_reason(part.shape[1])) is not None:
        return reason
    if (devices := lax.axis_size(axis)) > MOST_DEVICES:
        return f"it reads the memory of at most {MOST_DEVICES} devices, not of {devices}"
    if jax.process_count() > 1:
        return "it needs all devices in one process"
    return hopper_unsupported_reason(part.dtype)


@functools.partial(jax.jit, static_argnames="axis")
def total(part: jax.Array, axis: str) -> jax.Array:
    """As `api.total`, [T, H] in bfloat16. Jitted, so that the layers of a model share one lowering."""
    T, H = part.shape
    devices = lax.axis_size(axis)
    if devices > 2 and T % devices == 0 and T * H * part.dtype.itemsize > MOST_BYTES_AT_ONCE:
        return gather(scatter_sum(part, axis), axis)

    def peer_sum(part: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        summed[t, :] = _sum_of(part, t, axis).astype(summed.dtype)
        _end(range(devices), axis, signals=T * devices)

    return _by_rows(peer_sum, part, T)


@functools.partial(jax.jit, static_argnames="axis")
def scatter_sum(part: jax.Array, axis: str) -> jax.Array:
    """As `api.scatter_sum`: [T, H] of parts [devices * T, H]."""
    devices = lax.axis_size(axis)
    T = part.shape[0] // devices

    def peer_scatter_sum(part: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        summed[t, :] = _sum_of(part, lax.axis_index(axis) * T + t, axis).astype(summed.dtype)
        _end(range(devices), axis, signals=T * devices)

    return _by_rows(peer_scatter_sum, part, T)


@functools.partial(jax.jit, static_argnames="axis")
def gather(part: jax.Array, axis: str) -> jax.Array:
    """As `api.gather`: [devices * T, H] of parts [T, H]."""
    T, H = part.shape
    devices = lax.axis_size(axis)

    def peer_gather(part: Any, whole: Any) -> None:
        row = lax.axis_index("row")
        device, t = row // T, row % T
        whole[row, :] = load(plgpu.remote_ref(part, _on(axis, device)), (t, pl.ds(0, H)), layout=whole_row(H))
        _end([device], axis, signals=T * devices)

    return _by_rows(peer_gather, part, devices * T)


def _by_rows(kernel: Callable[[Any, Any], None], part: jax.Array, rows: int) -> jax.Array:
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((rows, part.shape[1]), part.dtype),
        grid=(rows,),
        grid_names=("row",),
        compiler_params=PARAMS,
    )(part)


def _sum_of(part: Any, row: jax.Array, axis: str) -> jax.Array:
    """A row of all devices' parts, added in float32 in the order of the devices: [H]."""
    H = part.shape[1]
    # All loads come first, so that they are in flight together.
    rows = [
        load(plgpu.remote_ref(part, _on(axis, device)), (row, pl.ds(0, H)), layout=whole_row(H))
        for device in range(lax.axis_size(axis))
    ]
    first, *others = (row.astype(f32) for row in rows)
    for other in others:
        first = first + other
    return first


def _on(axis: str, device: Any) -> Any:
    """A device of the axis, as references and semaphores name it."""
    return {axis: jnp.int32(device)}


def _end(read: Sequence[Any], axis: str, *, signals: int) -> None:
    """Tells the devices whose memory a warpgroup has read, and lets the first one wait until all have said so.

    Args:
        signals: that each device gets in a call.
    """
    done = pl.get_global(plgpu.SemaphoreType.REGULAR)
    for device in read:
        pl.semaphore_signal(done, device_id=_on(axis, device))

    @pl.when(lax.axis_index("row") == 0)
    def _() -> None:
        pl.semaphore_wait(done, signals)
