"""`bench comm`: sums over all GPUs of the machine, by size and by what makes them.

One executable has many sums, each of the result of the one before, as a step has them. Ways: "xla" is `lax.psum`, "two_phase"
XLA's reduce-scatter and all-gather, "peer_memory" our kernel (pallas_kernels/peer_sum). Results are compared with the sum in
float32; a way whose error is larger than rounding is an error of the run.
"""

import argparse
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.harness import record
from bench.harness.arguments import numbers
from bench.harness.timing import launches_for, rounds, turn_seconds
from bench.kernel.loop import WARM_UP_LAUNCHES
from jaxspec.errors import ConfigError
from pallas_kernels.peer_sum import mosaic
from pallas_kernels.peer_sum.mailbox import Mailboxes, open_mailboxes

AXIS = "tensor"
# Hidden size of Moonlight: 4 KB are one row, 128 KB 32 and 512 KB 128.
HIDDEN = 2048
SIZES = (4096, 1 << 17, 1 << 19, 1 << 21)
# Most microseconds that a sum may take over two GPUs, and what is hoped for.
GATES = {4096: (8.0, 6.0), 1 << 17: (9.0, 6.5), 1 << 19: (11.0, 7.5), 1 << 21: (22.0, 14.0)}
# Two roundings to bfloat16 of a sum.
MOST_ERROR = 2**-7


def _two_phase(part: jax.Array, axis: str) -> jax.Array:
    flat = part.reshape(-1)
    return lax.all_gather(lax.psum_scatter(flat, axis, tiled=True), axis, tiled=True).reshape(part.shape)


# Of a part and this device's row of the mailboxes' addresses.
Way = Callable[[jax.Array, jax.Array], jax.Array]
WAYS: Mapping[str, Way] = {
    "xla": lambda part, _: lax.psum(part, AXIS),
    "two_phase": lambda part, _: _two_phase(part, AXIS),
    "peer_memory": mosaic.total,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--bytes", type=numbers, default=list(SIZES), metavar="N,...", help="of a sum (default: 4 KB to 2 MB)"
    )
    parser.add_argument("--sums", type=int, default=54, metavar="N", help="in one executable (default: 54)")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    devices = jax.devices()
    if len(devices) < 2:
        raise ConfigError("sums need several devices, and there is one")
    mesh = Mesh(np.array(devices), (AXIS,))
    mailboxes = open_mailboxes(mesh, AXIS)
    rows: list[dict[str, Any]] = []
    for nbytes in arguments.bytes:
        row = measure(mesh, mailboxes, nbytes, arguments.sums)
        rows.append(row)
        print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    names = ["bytes", *(f"{way}_us" for way in WAYS)]
    print(record.table(names, [[str(row.get(name, "")) for name in names] for row in rows]))
    found = gates(rows) if len(devices) == 2 and devices[0].platform == "gpu" else []
    for gate in found:
        print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({gate['us']}, bound {gate['bound']})")
    result = {"benchmark": "comm", "sums": arguments.sums, "rows": rows, "gates": found}
    record.write("comm", result, arguments)
    return 0


def measure(mesh: Mesh, mailboxes: Mailboxes, nbytes: int, sums: int) -> dict[str, Any]:
    """Microseconds of each way's sum of `nbytes` on each device, wall time over a chain of `sums`.

    Raises:
        ConfigError: the size is no number of rows that the devices share.
    """
    if nbytes % (2 * HIDDEN):
        raise ConfigError(f"--bytes {nbytes} is no multiple of {2 * HIDDEN}, a row of {HIDDEN} columns in bfloat16")
    size = mesh.size
    shape = (nbytes // (2 * HIDDEN), HIDDEN)
    values = np.random.default_rng(0).standard_normal((size, *shape)).astype(jnp.bfloat16)
    parts = jax.device_put(values.reshape(-1, HIDDEN), NamedSharding(mesh, PartitionSpec(AXIS)))
    exact = values.astype(np.float32).sum(axis=0)
    row: dict[str, Any] = {"bytes": nbytes}
    timers: dict[str, Callable[[int], float]] = {}
    for name, total in WAYS.items():
        if name == "peer_memory" and (reason := _obstacle(mesh, parts)):
            row[name] = reason
            continue
        one = np.asarray(_chain(mesh, total, 1)(parts, mailboxes.addresses), np.float32)
        error = float(np.abs(one.reshape(size, *shape) - exact).max() / np.abs(exact).max())
        if not error < MOST_ERROR:
            raise ConfigError(f"{name} sums {nbytes} bytes wrong: the largest error is {error:.3g} of the largest sum")
        timers[name] = _timer(functools.partial(_chain(mesh, total, sums), parts, mailboxes.addresses), sums)
    seconds = turn_seconds(mesh.devices.flat[0].platform == "gpu")
    turns = {name: (timer, launches_for(timer, sums, seconds)) for name, timer in timers.items()}
    return row | {f"{name}_us": round(1e6 * value, 2) for name, value in rounds(turns).items()}


def _on_each(mesh: Mesh, call: Callable[..., jax.Array]) -> Any:
    """Of arrays that lie one after the other on their devices, the results likewise."""
    each = PartitionSpec(AXIS)
    return jax.jit(jax.shard_map(call, mesh=mesh, in_specs=each, out_specs=each, check_vma=False))


def _obstacle(mesh: Mesh, parts: jax.Array) -> str | None:
    """Why our kernel does not make this sum."""
    reasons: list[str | None] = []

    def ask(part: jax.Array) -> jax.Array:
        reasons.append(mosaic.unsupported_reason(part, AXIS))
        return part

    _on_each(mesh, ask).lower(parts)
    return reasons[0]


def _chain(mesh: Mesh, total: Way, sums: int) -> Any:
    """So many sums, each of what the one before gives."""

    def chain(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
        part = total(part, mailboxes)
        for _ in range(sums - 1):
            part = total(part * jnp.bfloat16(1 / mesh.size), mailboxes)
        return part

    return _on_each(mesh, chain)


def _timer(launch: Callable[[], jax.Array], sums: int) -> Callable[[int], float]:
    """From a number of launches to the seconds of one sum."""
    for _ in range(WARM_UP_LAUNCHES):
        launch().block_until_ready()

    def time_launches(launches: int) -> float:
        started = time.perf_counter()
        for _ in range(launches - 1):
            launch()
        launch().block_until_ready()
        return (time.perf_counter() - started) / (launches * sums)

    return time_launches


def gates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Our kernel's times beside their bounds, of the sizes that have one."""
    out = []
    for row in rows:
        if row["bytes"] in GATES and "peer_memory_us" in row:
            bound, goal = GATES[row["bytes"]]
            us = row["peer_memory_us"]
            out.append(
                {"gate": f"us of {row['bytes']} bytes", "us": us, "bound": bound, "goal": goal, "met": us <= bound}
            )
    return out
