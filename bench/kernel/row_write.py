"""Rows of `bench kernel` for copying drafts' logits to the slots of requests."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import normal
from bench.kernel.case import Case, once
from pallas_kernels.row_write.api import write_rows
from pallas_kernels.sampling.shapes import ROWS, VOCABULARIES

DRAFTS = 3


@dataclass(frozen=True)
class RowWrite(Case):
    """R rows of V logits, of which the first `written` go to slots of a donated array of DRAFTS rows each."""

    R: int
    written: int
    V: int = VOCABULARIES["moonlight"]
    calls: int = 2 * DRAFTS
    labels: ClassVar[tuple[str, ...]] = ("R", "written")
    fill: ClassVar[float] = 0.0

    @property
    def bytes(self) -> float:
        return 2.0 * 2 * self.written * self.V + 4 * self.R

    def slots(self) -> np.ndarray:
        slots = 1 + np.random.default_rng(0).permutation(self.R).astype(np.int32)
        return np.where(np.arange(self.R) < self.written, slots, self.R + 1).astype(np.int32)

    def inputs(self) -> Any:
        return [normal(i, (self.R, self.V), 3.0) for i in range(self.calls)], jnp.asarray(self.slots())

    def results(self) -> Any:
        return jax.ShapeDtypeStruct((self.R + 1, DRAFTS, self.V), jnp.bfloat16)

    def many(self, inputs: Any, results: Any) -> Any:
        logits, slots = inputs
        write = [once(lambda array, rows, slots, i=i: write_rows(array, i, rows, slots)) for i in range(DRAFTS)]
        for call, rows in enumerate(logits):
            results = write[call % DRAFTS](results, rows, slots)
        return results

    def error(self, inputs: Any, results: Any) -> float:
        """0, or infinite if a row of the last calls is not there to the bit, or anything was written elsewhere."""
        want = np.zeros(results.shape, results.dtype)
        for i, rows in enumerate(inputs[0][-DRAFTS:]):
            want[self.slots()[: self.written], i] = np.asarray(rows)[: self.written]
        return 0.0 if np.array_equal(np.asarray(results), want) else float("inf")


ROW_WRITE: dict[str, list[Case]] = {
    "all": [RowWrite(R, written) for R in ROWS for written in (0, R)],
    "quick": [RowWrite(R, written) for R, written in ((1, 1), (32, 32), (128, 0), (128, 128))],
    "tiny": [RowWrite(R, written, 40) for R, written in ((1, 1), (5, 3))],
}
