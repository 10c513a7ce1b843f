"""Mosaic GPU kernels in which every device writes rows to the others: `peer_sum`, `peer_scatter_sum`, `peer_gather` in traces.

A warpgroup has one row of each device's result; `exchange.py` says how it gets what the others have of it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load
from pallas_kernels.peer_sum.exchange import Told, exchange, room, row_layout
from pallas_kernels.peer_sum.mailbox import MOST_BYTES, MOST_DEVICES
from pallas_kernels.row import PARAMS, f32, inverse_rms, normed_row, row_unsupported_reason, whole_row

# Over more than two devices a sum in two phases writes less: each device adds up a part of the rows, then gathers all. In the
# time of the second call, and of the kernel that then makes the norm, a device writes about so many bytes.
BYTES_OF_A_PHASE = 2_000_000


def unsupported_reason(part: jax.Array, axis: str) -> str | None:
    """Why the kernels do not support this part, or None if they do."""
    if part.ndim != 2:
        return f"it needs rows, and the part has {part.ndim} axes"
    if (reason := row_unsupported_reason(part.shape[1])) is not None:
        return reason
    if (size := part.shape[0] * room(part.shape[1] * part.dtype.itemsize)) > MOST_BYTES:
        return f"a mailbox holds at most {MOST_BYTES} bytes of each device, not {size}"
    if (devices := lax.axis_size(axis)) > MOST_DEVICES:
        return f"it writes to the memory of at most {MOST_DEVICES} devices, not of {devices}"
    return hopper_unsupported_reason()


@jax.jit
def total(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.total`, [T, H] in bfloat16. Jitted, so that the layers of a model share one lowering."""
    T, H = part.shape
    devices = _devices(mailboxes)
    if _in_two_phases(part, devices):
        return gather([scatter_sum(part, mailboxes)], mailboxes)[0]

    def peer_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        own = load(part, (t, pl.ds(0, H)), layout=whole_row(H))
        (came,) = exchange([Told([own], own)], mailboxes, t, devices, T)
        summed[t, :] = _sum_of(came)

    return _by_rows(peer_sum, T, jax.ShapeDtypeStruct((T, H), part.dtype))(part, mailboxes.reshape(-1))


@functools.partial(jax.jit, static_argnames="eps")
def add_total(
    x: jax.Array, part: jax.Array, norm_weight: jax.Array, mailboxes: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """x + the total of all devices' parts and its norm, [T, H] each, rounded like `total` and `add_norm` after it.

    Args:
        x: [T, H], the same on all devices. norm_weight: [H].
        part: [T, H], or [parts, T, H], whose sum is rounded before it is told.
    """
    T, H = x.shape
    devices, whole = _devices(mailboxes), whole_row(H)

    def peer_add_norm(x: Any, part: Any, norm_weight: Any, mailboxes: Any, summed: Any, normed: Any) -> None:
        t = lax.axis_index("row")
        pieces = [(i,) for i in range(part.shape[0])] if len(part.shape) == 3 else [()]
        # All loads come first, so that they are in flight together.
        own = [load(part, (*piece, t, pl.ds(0, H)), layout=whole) for piece in pieces]
        row = load(x, (t, pl.ds(0, H)), layout=whole)
        weight = load(norm_weight, (pl.ds(0, H),), layout=whole)
        told = _sum_of(own) if own[1:] else own[0]
        (came,) = exchange([Told([told], told)], mailboxes, t, devices, T)
        row = row + _sum_of(came)
        summed[t, :] = row
        normed[t, :] = normed_row(row, inverse_rms(row, eps), weight)

    kernel = _by_rows(peer_add_norm, T, (jax.ShapeDtypeStruct((T, H), x.dtype),) * 2)
    return kernel(x, part, norm_weight, mailboxes.reshape(-1))


@jax.jit
def scatter_sum(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.scatter_sum`: [T, H] of parts [devices * T, H]."""
    devices, H = _devices(mailboxes), part.shape[1]
    T = part.shape[0] // devices

    def peer_scatter_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        places = [*(device * T for device in range(devices)), mailboxes[2 * devices] * T]
        *given, own = (load(part, (place + t, pl.ds(0, H)), layout=whole_row(H)) for place in places)
        (came,) = exchange([Told(given, own)], mailboxes, t, devices, T)
        summed[t, :] = _sum_of(came)

    return _by_rows(peer_scatter_sum, T, jax.ShapeDtypeStruct((T, H), part.dtype))(part, mailboxes.reshape(-1))


@functools.partial(jax.jit, static_argnames="eps")
def scatter_add(
    x: jax.Array,
    part: jax.Array,
    beside: jax.Array | None,
    norm_weight: jax.Array,
    mailboxes: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """x + (`scatter_sum` + beside) and its norm, [T, H] each, rounded in this order.

    Args:
        x, beside: [T, H] of this device. part: [devices * T, H]. norm_weight: [H].
    """
    T, H = x.shape
    devices, whole = _devices(mailboxes), whole_row(H)

    def peer_scatter_add_norm(x: Any, part: Any, norm_weight: Any, mailboxes: Any, *refs: Any) -> None:
        *others, summed, normed = refs
        t = lax.axis_index("row")
        places = [*(device * T for device in range(devices)), mailboxes[2 * devices] * T]
        *given, own = (load(part, (place + t, pl.ds(0, H)), layout=whole) for place in places)
        row, *added = (load(ref, (t, pl.ds(0, H)), layout=whole) for ref in (x, *others))
        weight = load(norm_weight, (pl.ds(0, H),), layout=whole)
        (came,) = exchange([Told(given, own)], mailboxes, t, devices, T)
        total = _sum_of(came)
        for each in added:
            total = total + each
        row = row + total
        summed[t, :] = row
        normed[t, :] = normed_row(row, inverse_rms(row, eps), weight)

    kernel = _by_rows(peer_scatter_add_norm, T, (jax.ShapeDtypeStruct((T, H), x.dtype),) * 2)
    return kernel(x, part, norm_weight, mailboxes.reshape(-1), *(() if beside is None else (beside,)))


@jax.jit
def gather(parts: Sequence[jax.Array], mailboxes: jax.Array) -> tuple[jax.Array, ...]:
    """As `api.gather`: each [devices * T, H] of parts [T, H], of any dtypes of 2 or 4 bytes, at once."""
    T, devices = parts[0].shape[0], _devices(mailboxes)

    def peer_gather(*refs: Any) -> None:
        given, mailboxes, wholes = refs[: len(parts)], refs[len(parts)], refs[len(parts) + 1 :]
        t = lax.axis_index("row")
        own = [load(ref, (t, pl.ds(0, ref.shape[1])), layout=row_layout(ref.shape[1], ref.dtype)) for ref in given]
        for whole, came in zip(wholes, exchange([Told([o], o) for o in own], mailboxes, t, devices, T), strict=True):
            for device, row in enumerate(came):
                whole[device * T + t, :] = row

    out = tuple(jax.ShapeDtypeStruct((devices * T, part.shape[1]), part.dtype) for part in parts)
    return tuple(_by_rows(peer_gather, T, out)(*parts, mailboxes.reshape(-1)))


def in_one_phase(part: Any, axis: str) -> bool:
    """Whether `total` of [T, H] is one exchange."""
    return not _in_two_phases(part, lax.axis_size(axis))


def _in_two_phases(part: Any, devices: int) -> bool:
    if part.shape[0] % devices:
        return False
    at_once, in_two = devices - 1, 2 * (devices - 1) / devices
    return 2 * (at_once - in_two) * part.size * part.dtype.itemsize > BYTES_OF_A_PHASE


def _devices(mailboxes: jax.Array) -> int:
    return (mailboxes.shape[-1] - 1) // 2


def _by_rows(kernel: Callable[..., None], rows: int, out_type: Any) -> Callable[..., Any]:
    return plgpu.kernel(kernel, out_type=out_type, grid=(rows,), grid_names=("row",), compiler_params=PARAMS)


def _sum_of(rows: Sequence[jax.Array]) -> jax.Array:
    """Rows added in float32 in their order, and rounded once."""
    first, *others = (row.astype(f32) for row in rows)
    for other in others:
        first = first + other
    return first.astype(rows[0].dtype)
