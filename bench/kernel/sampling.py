"""Rows of `bench kernel` for sampling: one pass over the logits, and draws."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, spread
from bench.kernel.case import Case, once
from pallas_kernels.sampling.api import gumbel_argmax, logits_stats
from pallas_kernels.sampling.reference import gumbel
from pallas_kernels.sampling.shapes import ROWS, VOCABULARIES


@dataclass(frozen=True)
class Sampling(Case):
    """R rows of V logits, of which `draws` rows draw and the others are greedy."""

    R: int
    draws: int
    V: int = VOCABULARIES["moonlight"]
    calls: int = 8
    labels: ClassVar[tuple[str, ...]] = ("R", "draws")

    @property
    def bytes(self) -> float:
        return 2.0 * self.R * self.V

    def inputs(self) -> Any:
        logits = [normal(i, (self.R, self.V), 3.0) for i in range(self.calls)]
        keys = np.random.default_rng(0).integers(0, 2**32, (self.R, 2), np.uint32)
        return logits, jnp.asarray(keys), jnp.asarray(np.arange(self.R) < self.draws)

    def results(self) -> Any:
        return [(jax.ShapeDtypeStruct((self.R,), jnp.float32),) * 2] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        logits, keys, drawing = inputs
        ones = jnp.ones(self.R)

        def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            stats = logits_stats(logits, ones)
            drawn = gumbel_argmax(logits, jnp.arange(self.R, dtype=jnp.int32), ones, keys, drawing)
            return stats.log_z, jnp.where(drawing, drawn, stats.argmax).astype(jnp.float32)

        call = once(choose)
        return [call(each) for each in logits]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the log-sum-exp of some rows of the last call; infinite if one of their ids differs."""
        logits, keys, drawing = inputs
        log_z, ids = (exact(each) for each in results[-1])
        rows = np.array(spread(self.R, 4))
        x = exact(logits[-1][rows])
        noise = np.where(exact(drawing)[rows, None], exact(gumbel(keys[rows], self.V)), 0.0)
        if not np.array_equal(np.argmax(x + noise, axis=1), ids[rows]):
            return float("inf")
        top = x.max(axis=1)
        return largest_error(log_z[rows], top + np.log(np.exp(x - top[:, None]).sum(axis=1)))


SAMPLING: dict[str, list[Case]] = {
    "all": [Sampling(R, draws) for R in ROWS for draws in (0, R)],
    "quick": [Sampling(R, 0) for R in (1, 128)],
    "tiny": [Sampling(3, 2, 40, 2)],
}
