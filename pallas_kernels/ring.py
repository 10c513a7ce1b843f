"""The ring of matmuls that stream weights: a warp fills its stages of shared memory, other warps multiply what is there."""

from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def keep_full(fill: Callable[[jax.Array], None], free: Any, steps: jax.Array, stages: int) -> None:
    """The work of the filling warpgroup, done by one warp: fill(step) of every step, which goes into stage step % stages.

    Args:
        fill: starts the copies of one step.
        free: barriers, one a stage, which those that multiply complete when they have read it.
        steps: int32 [].
    """

    def stage(step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(stages))

    # One warp: before a copy all warps that run the code wait for each other.
    @plgpu.warp_map
    def _warps(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _first() -> None:
            ahead = lax.min(steps, jnp.int32(stages))
            pl.loop(0, ahead)(fill)

            @pl.loop(ahead, steps)
            def _refill(step: jax.Array) -> None:
                plgpu.barrier_wait(free.at[stage(step)])
                fill(step)

            # Every completion of a barrier must be awaited before the kernel ends.
            @pl.loop(lax.max(steps - stages, jnp.int32(0)), steps)
            def _drain(step: jax.Array) -> None:
                plgpu.barrier_wait(free.at[stage(step)])
