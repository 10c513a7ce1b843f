"""Which implementation of an operation a step uses: chosen while the step is traced, named once in the log."""

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp

BACKENDS = ("auto", "mosaic", "triton", "reference")
logger = logging.getLogger("jaxspec.kernels")


class UnsupportedError(ValueError):
    """The backend that was asked for cannot take this call."""


@dataclass(frozen=True)
class Backends:
    """What runs attention and the routed experts, and on how many devices.

    "auto" is the fastest kernel that can take the call, else the plain-XLA reference.
    """

    attention: str = "auto"
    moe: str = "auto"
    devices: int = 1


_DEFAULT = Backends()
_current: ContextVar[Backends] = ContextVar("backends", default=_DEFAULT)
_chosen: ContextVar[dict[str, set[str]] | None] = ContextVar("chosen", default=None)


@contextlib.contextmanager
def use(backends: Backends) -> Iterator[dict[str, set[str]]]:
    """The backends of everything traced inside. Yields what gets chosen: operation -> implementations."""
    chosen: dict[str, set[str]] = {}
    tokens = _current.set(backends), _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(tokens[0])
        _chosen.reset(tokens[1])


def current() -> Backends:
    return _current.get()


def choose(operation: str, wanted: str, obstacles: Mapping[str, str | None], *, elsewhere: Collection[str] = ()) -> str:
    """The implementation for one call.

    Args:
        wanted: one of BACKENDS.
        obstacles: by implementation, the best first: why it cannot take this call, None where it can.
        elsewhere: backends without a kernel for this operation that mean another one of the same option: to want one of
            them leaves this operation to "auto".

    Raises:
        UnsupportedError: `wanted` cannot take it.
    """
    chosen, why = _decide(operation, wanted, obstacles, elsewhere)
    _log(operation, chosen, why)
    if (choices := _chosen.get()) is not None:
        choices.setdefault(operation, set()).add(chosen)
    return chosen


def _decide(
    operation: str, wanted: str, obstacles: Mapping[str, str | None], elsewhere: Collection[str]
) -> tuple[str, str]:
    """The implementation, and why that one."""
    if wanted == "auto" or wanted in elsewhere:
        chosen = next((name for name, obstacle in obstacles.items() if obstacle is None), "reference")
        none = [f"there is no {wanted} kernel"] if wanted in elsewhere else []
        others = [f"not {name}: {obstacle}" for name, obstacle in obstacles.items() if obstacle]
        fastest = ["the fastest that fits"] if chosen != "reference" else others or ["there is no other"]
        return chosen, "; ".join(none + fastest)
    if wanted != "reference" and (obstacle := obstacles.get(wanted, f"there is no {wanted} kernel")):
        *served, last = (repr(name) for name in ("auto", *(n for n, o in obstacles.items() if o is None), "reference"))
        raise UnsupportedError(
            f"{operation} cannot run on the backend {wanted!r}: {obstacle}; use {', '.join(served)} or {last}"
        )
    return wanted, "asked for"


def hopper_obstacle(*dtypes: jnp.dtype) -> str | None:
    """Why a Mosaic GPU kernel for bfloat16 on Hopper cannot run here, None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this is a {device.platform.upper()}"
    if compute_capability(device) != 90:
        return f"it needs compute capability 9.0, and {device.device_kind} has another"
    return _call_obstacle(dtypes, ("bfloat16",))


def ampere_obstacle(*dtypes: jnp.dtype) -> str | None:
    """Why a Triton kernel for 16-bit types cannot run here, None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this is a {device.platform.upper()}"
    if (compute_capability(device) or 0) < 80:
        return f"it needs compute capability 8.0 or more, and {device.device_kind} has another"
    if len(set(dtypes)) > 1:
        return f"it needs one type, not {' and '.join(sorted(map(str, set(dtypes))))}"
    return _call_obstacle(dtypes, ("bfloat16", "float16"))


def compute_capability(device: jax.Device) -> int | None:
    """90 for 9.0; None where the device has none, as GPUs of other makers."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() and minor.isdecimal() else None


def _call_obstacle(dtypes: Collection[jnp.dtype], supported: Sequence[str]) -> str | None:
    if current().devices > 1:
        return "it runs on one device only"
    others = sorted({str(dtype) for dtype in dtypes} - set(supported))
    return f"it computes in {' or '.join(supported)}, not in {', '.join(others)}" if others else None


@functools.cache
def _log(operation: str, chosen: str, why: str) -> None:
    logger.info("%s: %s (%s)", operation, chosen, why)
