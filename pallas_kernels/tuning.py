"""Choices of the kernels that only measurements can make, as data by kind of device.

`bench tune` measures candidates and writes `tuned.json`; devices and fields without an entry get the defaults.
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
    """The defaults were measured on an H200.

    Attributes:
        split_overhead_pages: cost of starting, storing and merging a thread block of split attention, in pages.
        slot_rows: (tokens, rows), ascending: with up to that many tokens per expert on average, slots have that many rows;
            beyond the last entry they are the widest. Wide slots read weights less often but pad more. Rows are a multiple
            of 8 up to 64, or 128.
        packed_slot_rows: as `slot_rows`, of experts with codes of four bits.
        most_piece_rows: up to this many tokens the experts' kernels compute the shared experts too. Each of their tiles
            reads all tokens, which with more tokens outweighs its weights; registers limit this to 128.
        norm_linear_tokens: up to this many tokens, a norm and the projections that read it are one kernel. Each token costs
            each block a norm and a pass over its rows.
        one_token_experts: whether the experts of a single token have a kernel of their own.
        one_token_fp8, one_token_int4: whether they have it in FP8 and in INT4 too.
        row_kernel_tokens: with more tokens than `norm_linear_tokens` and up to this many, sums into the residual stream and
            the norms that follow them are kernels of ours.
        copying_tokens: up to this many tokens, the kernel that makes the slot tables also copies the tokens to their slots,
            if it is one kernel.
        route_plan_tokens: up to this many tokens, at least 8, routing and the slot tables are one kernel, where the router is a
            kernel of ours.
        router_tokens: with more tokens than `norm_linear_tokens` and up to this many, the router is a kernel of ours, of
            whose parts the routing makes the sum.
        split_linear_tokens: as `row_kernel_tokens`, of the linear map before such a sum, whose parts the sum adds up.
        joined_linear_tokens: as `row_kernel_tokens`, of the projections that read a norm made there.
        mlp_kernel_tokens: as `row_kernel_tokens`, of the MLPs of dense layers in bfloat16; at most 128.
        wide_values_tokens: up to this many tokens in windows of MLA, merging split requests and the up-projection of values
            are one kernel, where all its blocks run at once. Up to 4 they are another kernel in any case.
        head_kernel_tokens: up to this many tokens, the norms and the rotation of grouped-query attention's heads and the writes
            to its caches are one kernel of ours.
        delta_chunk_kernel: whether prompts of the gated delta rule walk over their chunks in a kernel of ours.
        bounded_draws: whether a draw looks only at columns that may win.
        rule_kernel: whether requests' rules for their logits are a kernel of ours, which touches only rows that have some.
        schedule_kernel: whether the schedule of split attention is a kernel of ours.
        peer_sum_bytes: sums over several devices of up to this many bytes are a kernel of ours, in the step's graph; 0: none.
        host_readback: whether steps write their output into the host's memory.
    """

    split_overhead_pages: int = 5
    slot_rows: tuple[tuple[float, int], ...] = ((12.0, 16), (30.0, 32), (64.0, 64))
    packed_slot_rows: tuple[tuple[float, int], ...] = ((12.0, 16), (30.0, 32), (64.0, 64))
    most_piece_rows: int = 128
    norm_linear_tokens: int = 1
    one_token_experts: bool = False
    one_token_fp8: bool = False
    one_token_int4: bool = False
    row_kernel_tokens: int = 0
    copying_tokens: int = 0
    route_plan_tokens: int = 8
    router_tokens: int = 0
    split_linear_tokens: int = 0
    joined_linear_tokens: int = 0
    mlp_kernel_tokens: int = 0
    wide_values_tokens: int = 0
    head_kernel_tokens: int = 0
    delta_chunk_kernel: bool = False
    bounded_draws: bool = False
    rule_kernel: bool = False
    schedule_kernel: bool = False
    peer_sum_bytes: int = 0
    host_readback: bool = False


_current: ContextVar[Tuning | None] = ContextVar("tuning", default=None)


def current() -> Tuning:
    """The choices for what is being traced: the first device's, unless `use` overrides them."""
    return _current.get() or of_device(jax.devices()[0].device_kind)


@contextlib.contextmanager
def use(tuning: Tuning) -> Iterator[None]:
    """Sets the choices for everything traced inside. jax does not retrace what it has traced before (`jax.clear_caches`)."""
    token = _current.set(tuning)
    try:
        yield
    finally:
        _current.reset(token)


@functools.cache
def of_device(kind: str) -> Tuning:
    return from_json(json.loads(FILE.read_text()).get(kind, {}))


def from_json(fields: dict[str, Any]) -> Tuning:
    """A `Tuning` from its JSON, whose lists become tuples.

    Raises:
        TypeError: a field is unknown.
    """
    return Tuning(**{name: as_tuples(value) for name, value in fields.items()})


def to_json(tuning: Tuning) -> dict[str, Any]:
    return dataclasses.asdict(tuning)


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, list) else value
