"""Which implementation of an operation a step uses: chosen while the step is traced, and logged once."""

import contextlib
import functools
import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import jax
import jax.numpy as jnp

BACKENDS = ("auto", "mosaic", "triton", "reference")
# Plain XLA in the arithmetic of Hopper's kernels where weights are in FP8, whose activations are then FP8 too. Experts and
# MLPs have it; it is for measuring on any device what these kernels make of a model.
W8A8 = "reference_w8a8"
# What asks for plain XLA by name.
REFERENCES = ("reference", W8A8)
logger = logging.getLogger("jaxspec.kernels")


class UnsupportedError(ValueError):
    """The requested backend does not support this call."""


@dataclass(frozen=True)
class Backends:
    """Which backend runs attention and the routed experts.

    "auto" is the fastest kernel that supports the call, or the plain-XLA reference if none does. On several devices a call
    sees its own device's heads and experts.

    Attributes:
        attention: one of BACKENDS.
        moe: one of BACKENDS, or W8A8.
        needs_kernels: "auto" does not mean plain XLA for these operations. The small ones that have no option may use it.
    """

    attention: str = "auto"
    moe: str = "auto"
    needs_kernels: bool = False


# Which of the two says how an operation runs.
_OPTIONS = {
    operation: option
    for option, operations in {
        "attention": (
            "gated_delta", "gqa_decode", "gqa_prefill", "key_choice", "kv_write", "mla_decode", "mla_prefill", "mla_query",
            "mla_sparse",
        ),
        "moe": ("moe",),
    }.items()
    for operation in operations
}  # fmt: skip


_DEFAULT = Backends()
_current: ContextVar[Backends] = ContextVar("backends", default=_DEFAULT)
_chosen: ContextVar[dict[str, set[str]] | None] = ContextVar("chosen", default=None)


@contextlib.contextmanager
def use(backends: Backends) -> Iterator[dict[str, set[str]]]:
    """Sets the backends of everything traced inside. Yields the choices as they are made: operation -> implementations."""
    chosen: dict[str, set[str]] = {}
    tokens = _current.set(backends), _chosen.set(chosen)
    try:
        yield chosen
    finally:
        _current.reset(tokens[0])
        _chosen.reset(tokens[1])


def current() -> Backends:
    return _current.get()


def choose(
    operation: str,
    wanted: str,
    unsupported_reasons: Mapping[str, str | None],
    *,
    same_as_auto: Collection[str] = (),
    references: Collection[str] = ("reference",),
) -> str:
    """Chooses the implementation of one call, logs the choice and records it for `use`.

    Args:
        operation: its name in the log.
        wanted: one of BACKENDS, or of `references`.
        unsupported_reasons: for each kernel, fastest first, why it does not support this call, or None if it does.
        same_as_auto: backends that have no kernel for this operation but for others of the same option; for this
            operation they mean "auto".
        references: what this operation has in plain XLA, which supports every call.

    Returns:
        A key of `unsupported_reasons`, or one of `references`.

    Raises:
        UnsupportedError: `wanted` does not support this call.
    """
    if wanted == "auto" or wanted in same_as_auto:
        chosen, why = _fastest(wanted, unsupported_reasons)
        if chosen == "reference" and current().needs_kernels and (option := _OPTIONS.get(operation)):
            raise UnsupportedError(
                f"{operation} would run on plain XLA ({why}), which has to be asked for: use the {option} backend "
                "'reference', which is slow"
            )
    else:
        if wanted not in references:
            _check_supported(operation, wanted, unsupported_reasons)
        chosen, why = wanted, "asked for"
    _log(operation, chosen, why)
    if (choices := _chosen.get()) is not None:
        choices.setdefault(operation, set()).add(chosen)
    return chosen


def _fastest(wanted: str, unsupported_reasons: Mapping[str, str | None]) -> tuple[str, str]:
    """The first implementation that supports the call, and why this one."""
    chosen = next((name for name, reason in unsupported_reasons.items() if reason is None), "reference")
    if chosen != "reference":
        why = ["the fastest that fits"]
    else:
        why = [f"not {name}: {reason}" for name, reason in unsupported_reasons.items()] or ["there is no other"]
    no_kernel = [f"there is no {wanted} kernel"] if wanted != "auto" else []
    return chosen, "; ".join(no_kernel + why)


def _check_supported(operation: str, wanted: str, unsupported_reasons: Mapping[str, str | None]) -> None:
    reason = unsupported_reasons.get(wanted, f"there is no {wanted} kernel")
    if reason is None:
        return
    supported = [name for name, other in unsupported_reasons.items() if other is None]
    *others, last = (repr(name) for name in ("auto", *supported, "reference"))
    raise UnsupportedError(
        f"{operation} cannot run on the backend {wanted!r}: {reason}; use {', '.join(others)} or {last}"
    )


def hopper_unsupported_reason(*dtypes: jnp.dtype) -> str | None:
    """Why a Mosaic GPU kernel for bfloat16 on Hopper cannot run here, or None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this is a {device.platform.upper()}"
    if compute_capability(device) != 90:
        return f"it needs compute capability 9.0, and {device.device_kind} has another"
    return _common_unsupported_reason(dtypes, ("bfloat16",))


def ampere_unsupported_reason(*dtypes: jnp.dtype) -> str | None:
    """Why a Triton kernel for one 16-bit dtype cannot run here, or None if it can."""
    device = jax.devices()[0]
    if device.platform != "gpu":
        return f"it needs an NVIDIA GPU, and this is a {device.platform.upper()}"
    if (compute_capability(device) or 0) < 80:
        return f"it needs compute capability 8.0 or more, and {device.device_kind} has another"
    if len(set(dtypes)) > 1:
        return f"it needs one type, not {' and '.join(sorted(map(str, set(dtypes))))}"
    return _common_unsupported_reason(dtypes, ("bfloat16", "float16"))


def compute_capability(device: jax.Device) -> int | None:
    """90 for 9.0; None where the device has none, as GPUs of other vendors."""
    major, _, minor = str(getattr(device, "compute_capability", "")).partition(".")
    return 10 * int(major) + int(minor) if major.isdecimal() and minor.isdecimal() else None


def _common_unsupported_reason(dtypes: Collection[jnp.dtype], supported: Sequence[str]) -> str | None:
    others = sorted({str(dtype) for dtype in dtypes} - set(supported))
    return f"it computes in {' or '.join(supported)}, not in {', '.join(others)}" if others else None


def _log(operation: str, chosen: str, why: str) -> None:
    platform = jax.devices()[0].platform
    if chosen == "reference" and platform != "gpu" and f"this is a {platform.upper()}" in why:
        _log_once(
            "all kernels: reference, plain XLA (the others need an NVIDIA GPU, and this is a %s)", platform.upper()
        )
    else:
        _log_once("%s: %s (%s)", operation, chosen, why)


@functools.cache
def _log_once(message: str, *values: str) -> None:
    logger.info(message, *values)
