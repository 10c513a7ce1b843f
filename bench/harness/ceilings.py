"""What the device can do at most: bytes read and floating-point operations a second, measured in the same run."""

import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bench.harness.timing import launches_for, rounds, turn_seconds

Timer = Callable[[int], float]


def ceilings(gpu: bool) -> dict[str, float]:
    """Bytes a second of reading 2 GiB, FLOP a second of an 8192^3 matmul in bfloat16 (both smaller on a CPU).

    Timed as kernels are: an H200 multiplies faster for the first milliseconds than it has power to go on.
    """
    (size, read), (flops, matmul) = _read(gpu), _matmul(gpu)
    seconds = _in_turn({"read": read, "matmul": matmul}, gpu)
    return {"read_bytes_per_s": size / seconds["read"], "matmul_flop_per_s": flops / seconds["matmul"]}


def read_bandwidth(gpu: bool) -> float:
    """Bytes a second of reading an array much larger than any cache."""
    size, read = _read(gpu)
    return size / _in_turn({"read": read}, gpu)["read"]


def _read(gpu: bool) -> tuple[int, Timer]:
    array = jax.jit(lambda: jnp.arange(2**29 if gpu else 2**22, dtype=jnp.float32))()
    # The sum of each row: a sum of everything would need a second, serial kernel.
    return array.nbytes, _timer(jax.jit(lambda a: a.reshape(-1, 2**16).sum(axis=1)), array)


def _matmul(gpu: bool) -> tuple[float, Timer]:
    n = 8192 if gpu else 256
    a = jax.jit(lambda: jax.random.normal(jax.random.key(0, impl="rbg"), (n, n), jnp.float32).astype(jnp.bfloat16))()
    return 2.0 * n**3, _timer(jax.jit(lambda a: a @ a), a)


def _timer(run: Callable[[jax.Array], jax.Array], array: jax.Array) -> Timer:
    run(array).block_until_ready()  # compiled before it is timed

    def seconds(launches: int) -> float:
        started = time.perf_counter()
        for _ in range(launches):
            out = run(array)
        out.block_until_ready()
        return (time.perf_counter() - started) / launches

    return seconds


def _in_turn(timers: dict[str, Timer], gpu: bool) -> dict[str, float]:
    return rounds({name: (run, launches_for(run, 1, turn_seconds(gpu))) for name, run in timers.items()})
