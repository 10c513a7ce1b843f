"""What measurements decide and arithmetic does not: a few choices of the kernels, as data by kind of device.

`bench tune` measures candidates and writes the data; what has no entry gets the defaults.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

# Kind of device, as jax names it -> fields of `Tuning`.
FILE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True)
class Tuning:
    """The defaults are what an H200 was measured to want.

    Attributes:
        split_overhead_pages: what a thread block of split attention spends on starting, storing and being merged, in pages.
        slot_rows: (most tokens an expert has on average, rows of a slot), ascending; with more tokens slots are the widest.
            Wide slots read weights less often and pad more.
        most_piece_rows: up to this many tokens the experts' kernels take the shared experts. Each tile reads all tokens:
            with more of them that is more than its weights, and 128 are all that accumulators have registers for.
        norm_linear_tokens: up to this many tokens norms and what reads them are one kernel, at the cost of a norm and a
            pass over a block's rows for each of them.
        one_token_experts: whether a single token's experts have a kernel of their own.
    """

    split_overhead_pages: int = 5
    slot_rows: tuple[tuple[float, int], ...] = ((12.0, 16), (30.0, 32), (64.0, 64))
    most_piece_rows: int = 128
    norm_linear_tokens: int = 1
    one_token_experts: bool = False


_current: ContextVar[Tuning | None] = ContextVar("tuning", default=None)


def current() -> Tuning:
    """Of what is being traced: the first device's, unless `use` says otherwise."""
    return _current.get() or of_device(jax.devices()[0].device_kind)


@contextlib.contextmanager
def use(tuning: Tuning) -> Iterator[None]:
    """The choices of everything traced inside. What jax has traced before, it does not trace again: see
    `jax.clear_caches`."""
    token = _current.set(tuning)
    try:
        yield
    finally:
        _current.reset(token)


@functools.cache
def of_device(kind: str) -> Tuning:
    return from_json(json.loads(FILE.read_text()).get(kind, {}))


def from_json(fields: dict[str, Any]) -> Tuning:
    """JSON has lists where a `Tuning` has tuples.

    Raises:
        TypeError: there is no such field.
    """
    return Tuning(**{name: as_tuples(value) for name, value in fields.items()})


def to_json(tuning: Tuning) -> dict[str, Any]:
    return dataclasses.asdict(tuning)


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
