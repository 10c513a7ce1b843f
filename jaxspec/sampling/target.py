"""A target's logits after the rules of each row's request, and what samplers ask of them.

Rules change few rows, if any. Where a kernel applies them, it writes these rows alone, in float32; the others are read as the
head gave them. Every operation here then runs on both arrays, each time on the rows that are there; rows that an operation of
`Columns` is told to leave out cost it nothing.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jaxspec.sampling.columns import Columns
from jaxspec.sampling.truncation import Truncation, cuts
from pallas_kernels.sampling.api import LogitsStats, Residual
from pallas_kernels.sampling.keys import LEAST_KEY

Tree = TypeVar("Tree")


class TargetLogits(NamedTuple):
    """Rows of logits [R, V].

    Attributes:
        raw: [R, V].
        ruled: float32 [R, V], of which only rows in `changed` are there; others are anything. None: `raw` has all rows as they
            are after their rules.
        changed: bool [R], which rows rules may have changed.
    """

    raw: jax.Array
    ruled: jax.Array | None
    changed: jax.Array

    @classmethod
    def of(cls, logits_RV: "jax.Array | TargetLogits") -> "TargetLogits":
        """Logits without rules, or after them."""
        if isinstance(logits_RV, TargetLogits):
            return logits_RV
        return cls(logits_RV, None, jnp.zeros(logits_RV.shape[0], bool))

    def stats(self, temperature: jax.Array, cut: jax.Array | None, columns: Columns) -> LogitsStats:
        """`Columns.stats` of what each row keeps, or of whole rows; of a row with LEAST_KEY it may be anything."""

        def found(logits: jax.Array, mine: jax.Array | None) -> LogitsStats:
            own = cut if mine is None else jnp.where(mine, LEAST_KEY + 1 if cut is None else cut, LEAST_KEY)
            return columns.stats(logits, temperature, own)

        return self._joined(found)

    def cuts(self, rows: Truncation, stats: LogitsStats, wanted: jax.Array, columns: Columns) -> jax.Array:
        """`truncation.cuts` of each row, int32 [R]."""

        def found(logits: jax.Array, wanted: jax.Array) -> jax.Array:
            return columns.by_rows(cuts, logits, rows, stats, wanted)

        if self.ruled is None:
            return found(self.raw, wanted)
        # One after the other, by what the second reads: blocks of that kernel wait for each other, and kernels that need
        # nothing of each other may run at once (`pallas_kernels/meet.py`).
        of_raw = found(self.raw, wanted & ~self.changed)
        of_ruled = found(self.ruled, wanted & self.changed & (of_raw == LEAST_KEY))
        return jnp.where(self.changed, of_ruled, of_raw)

    def draw(
        self,
        rows: jax.Array | None,
        temperature: jax.Array,
        keys: jax.Array,
        wanted: jax.Array,
        likely: jax.Array,
        residual: Residual | None,
        cut: jax.Array | None,
        columns: Columns,
    ) -> jax.Array:
        """`Columns.draw`."""

        def found(logits: jax.Array, mine: jax.Array | None) -> jax.Array:
            own = wanted if mine is None else wanted & mine
            return columns.draw(logits, rows, temperature, keys, own, likely, residual, cut)

        return self._joined(found, rows)

    def at(self, ids_RN: jax.Array) -> jax.Array:
        """The logits of ids [R, N] of the columns at hand, float32."""

        def found(logits: jax.Array, _: Any) -> jax.Array:
            return jnp.take_along_axis(logits, ids_RN, axis=1).astype(jnp.float32)

        return self._joined(found)

    def _joined(self, found: Callable[[jax.Array, jax.Array | None], Tree], rows: jax.Array | None = None) -> Tree:
        """found(logits, rows of them that count, None for all) of each array, and of each row what its array gave.

        Args:
            rows: int32, the row of logits that each result is of; None: one of each, in order.
        """
        if self.ruled is None:
            return found(self.raw, None)
        changed = self.changed if rows is None else self.changed[rows]
        ruled, raw = found(self.ruled, changed), found(self.raw, ~changed)

        def joined(one: jax.Array, other: jax.Array) -> jax.Array:
            return jnp.where(changed.reshape(-1, *[1] * (one.ndim - 1)), one, other)

        return jax.tree.map(joined, ruled, raw)
