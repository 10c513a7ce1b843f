"""The ring of shared memory in the experts' matmuls: a warp fills its stages, the other warpgroups multiply what is there."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax


def keep_full(work: Sequence[tuple[Callable[[jax.Array], None], jax.Array]], free: Any, stages: int) -> None:
    """The work of the filling warpgroup, done by one warp.

    Args:
        work: fill(step) starts the copies of one of so many steps, int32 []. Of all steps together the n-th goes into stage
            n % stages.
        free: barriers, one a stage, which those that multiply complete when they have read it.
    """

    def stage(n: jax.Array) -> jax.Array:
        return lax.rem(n, jnp.int32(stages))

    # One warp: before a copy all warps that run the code wait for each other.
    @plgpu.warp_map
    def _warps(warp: jax.Array) -> None:
        @pl.when(warp == 0)
        def _first() -> None:
            begun = jnp.int32(0)
            for fill, steps in work:
                ahead = lax.max(lax.min(steps, stages - begun), jnp.int32(0))
                pl.loop(0, ahead)(fill)

                @pl.loop(ahead, steps)
                def _refill(step: jax.Array, fill: Any = fill, begun: jax.Array = begun) -> None:
                    plgpu.barrier_wait(free.at[stage(begun + step)])
                    fill(step)

                begun += steps

            # Every completion of a barrier must be awaited before the kernel ends.
            @pl.loop(lax.max(begun - stages, jnp.int32(0)), begun)
            def _drain(n: jax.Array) -> None:
                plgpu.barrier_wait(free.at[stage(n)])
