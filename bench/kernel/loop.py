"""How `bench kernel` runs a case: launches in flight one after the other, on the same addresses."""

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from bench.harness.trace import kernel_seconds, traced
from bench.kernel.case import Case

TRACED_LAUNCHES = 3
# The first execution runs kernel by kernel, the second records the graph.
WARM_UP_LAUNCHES = 3


@functools.partial(jax.jit, donate_argnums=0, keep_unused=True)
def _refill(results: Any, value: float) -> Any:
    """In place: at other addresses the next launch would record its graph anew."""
    return jax.tree.map(lambda r: jnp.full_like(r, value), results)


@jax.jit
def _finite(results: Any) -> jax.Array:
    return jnp.stack([jnp.isfinite(r).all() for r in jax.tree.leaves(results)]).all()


class Loop:
    """An executable of a case with its inputs; results go back in, so every launch uses the same addresses."""

    def __init__(self, case: Case, executable: Any):
        self.calls = case.calls
        self.inputs = case.inputs()
        self._fill = case.fill
        self._executable = executable
        self.results = jax.tree.map(lambda s: jnp.full(s.shape, case.fill, s.dtype), case.results())
        self.launch(WARM_UP_LAUNCHES)

    def launch(self, launches: int) -> None:
        for _ in range(launches):
            self.results = self._executable(self.inputs, self.results)
        jax.block_until_ready(self.results)

    def launch_into_poison(self) -> Any:
        """The results of a launch, none of which can be left from the one before."""
        self.results = _refill(self.results, self._fill)
        self.launch(1)
        return self.results

    def finite(self) -> bool:
        return bool(_finite(self.results))

    def time(self, launches: int) -> float:
        """Wall time of one call, in seconds."""
        started = time.perf_counter()
        self.launch(launches)
        return (time.perf_counter() - started) / (launches * self.calls)


def device_seconds(loop: Loop) -> dict[str, float]:
    """Time of a call's kernels on the device without the gaps between them, by name; empty where the trace has none."""
    of_all = kernel_seconds(traced(lambda: loop.launch(TRACED_LAUNCHES)))
    return {name: seconds / (TRACED_LAUNCHES * loop.calls) for name, seconds in of_all.items()}
