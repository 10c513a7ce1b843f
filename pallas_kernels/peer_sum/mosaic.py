"""One Mosaic GPU kernel (`peer_sum` in traces): every device reads all devices' rows and adds them up in one order.

A call begins with a barrier of all devices, which the runtime adds: the parts are there, and nobody needs the memory of the
call before. It ends when all devices have read this one's part, whose memory may then be used for something else.

A warpgroup has one row. The first one waits for the other devices' last reads; the others do not wait, so that all come to
run, however few fit onto a device at once.
"""

import functools
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


def unsupported_reason(part: jax.Array, axis: str) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
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
    whole = whole_row(H)

    def on(device: int) -> Any:
        return {axis: jnp.int32(device)}

    def peer_sum(part, summed):
        done = pl.get_global(plgpu.SemaphoreType.REGULAR)
        t = lax.axis_index("token")
        # All loads come first, so that they are in flight together.
        rows = [load(plgpu.remote_ref(part, on(d)), (t, pl.ds(0, H)), layout=whole) for d in range(devices)]
        first, *others = (row.astype(f32) for row in rows)
        for other in others:
            first = first + other
        summed[t, :] = first.astype(summed.dtype)
        for device in range(devices):
            pl.semaphore_signal(done, device_id=on(device))

        @pl.when(t == 0)
        def _() -> None:
            pl.semaphore_wait(done, T * devices)

    return plgpu.kernel(
        peer_sum,
        out_type=jax.ShapeDtypeStruct((T, H), part.dtype),
        grid=(T,),
        grid_names=("token",),
        compiler_params=PARAMS,
    )(part)
