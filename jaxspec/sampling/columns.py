"""Which columns of the vocabulary a device holds, and what is asked of rows of logits across all columns.

On several devices each has its part of the columns of every row, as its part of the head gives them. What samplers ask of a
row is found in each part and joined from a few numbers a row; whole rows are put together for the cut-offs of truncation
alone, of which each device finds those of a share of the rows. All devices join the same bits in the same way, so what
follows is equal on all of them, ids above all. On one device every operation here is the ordinary one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jaxspec import comm
from pallas_kernels.sampling.api import (
    Drawn,
    Likeliest,
    LogitsStats,
    Residual,
    gumbel_argmax,
    gumbel_best,
    likeliest,
    logits_stats,
)

Tree = TypeVar("Tree")

# Logits of columns past the vocabulary's end: below all others, and finite, as a sound row's are.
PADDING = -3e38


@dataclass(frozen=True)
class Columns:
    """The columns of a vocabulary of `vocab` ids that this device holds: as many as any other, in the order of the mesh.

    Where the vocabulary does not divide, the last columns of the last devices lie past its end: see `padded`. (`with_shardings`
    refuses to lay out a head of such a vocabulary; samplers do not mind.) Logits here are [R, width], ids are those of the
    vocabulary unless something else is said.
    """

    vocab: int

    @property
    def width(self) -> int:
        """How many columns this device holds."""
        return -(-self.vocab // comm.size())

    @property
    def ids(self) -> jax.Array:
        """The id of each column, int32 [width]."""
        columns = jnp.arange(self.width, dtype=jnp.int32)
        return columns + comm.first(self.width) if comm.is_split() else columns

    def find(self, ids: jax.Array) -> jax.Array:
        """The column of each id; `width` or beyond where this device does not hold it."""
        return comm.find(ids, self.width) if comm.is_split() else ids

    def padded(self, logits: jax.Array) -> jax.Array:
        """Logits with PADDING past the vocabulary's end, whatever was there."""
        if self.width * comm.size() == self.vocab:
            return logits
        return jnp.where(self.ids < self.vocab, logits, jnp.asarray(PADDING, logits.dtype))

    def stats(self, logits: jax.Array, temperature: jax.Array, cuts: jax.Array | None = None) -> LogitsStats:
        """`logits_stats` of whole rows."""
        own = logits_stats(logits, temperature, cuts)
        return self._joined_stats(comm.everyones(_with_highest(logits, own))) if comm.is_split() else own

    def draw(
        self,
        logits: jax.Array,
        rows: jax.Array | None,
        temperature: jax.Array,
        keys: jax.Array,
        wanted: jax.Array,
        likely: jax.Array,
        residual: Residual | None = None,
        cuts: jax.Array | None = None,
    ) -> jax.Array:
        """`gumbel_argmax` of whole rows. The residual's logits are of this device's columns."""
        if not comm.is_split():
            return gumbel_argmax(logits, rows, temperature, keys, wanted, likely, residual, cuts)
        own = self._own_draw(logits, rows, temperature, keys, wanted, self.find(likely), residual, cuts)
        return self._joined_draw(comm.everyones(own), residual)

    def stats_and_draw(
        self, logits: jax.Array, temperature: jax.Array, keys: jax.Array, wanted: jax.Array
    ) -> tuple[LogitsStats, jax.Array]:
        """`stats` of each row and a `draw` from it, joined at once."""
        own = logits_stats(logits, temperature)
        if not comm.is_split():
            return own, gumbel_argmax(logits, None, temperature, keys, wanted, own.argmax)
        drawn = self._own_draw(logits, None, temperature, keys, wanted, own.argmax, None, None)
        stats, drawn = comm.everyones((_with_highest(logits, own), drawn))
        return self._joined_stats(stats), self._joined_draw(drawn, None)

    def pick(self, read: Callable[[jax.Array], Tree], ids: jax.Array) -> Tree:
        """What `read` finds at these ids' columns: a tree of arrays of 32-bit numbers, of the shape of `ids`."""
        if not comm.is_split():
            return read(ids)
        places = self.find(ids)
        return comm.owners(read(jnp.minimum(places, self.width - 1)), places < self.width)

    def logsumexp(self, logits: jax.Array) -> jax.Array:
        """Of whole rows, [R, 1]."""
        own = jax.nn.logsumexp(logits, axis=1, keepdims=True)
        return jax.nn.logsumexp(comm.gather(own, axis=1), axis=1, keepdims=True) if comm.is_split() else own

    def likeliest(self, logits: jax.Array, count: int, wanted: jax.Array) -> Likeliest:
        """`likeliest` of whole rows; count <= vocab."""
        if not comm.is_split():
            return likeliest(logits, count, wanted)
        return self.best_of(likeliest(logits, min(count, self.width), wanted), count)

    def best_of(self, own: Likeliest, count: int) -> Likeliest:
        """The `count` likeliest ids of whole rows from those of this device's columns, which are likeliest first.

        Without a sort, which would break a decode step's graph: each candidate's place is the number of those before it.
        """
        if not comm.is_split():
            return own
        ids_RC = comm.gather(own.ids + comm.first(self.width), axis=1)
        logits_RC = comm.gather(own.logits, axis=1)
        # Of equal ones the first has the lowest id: devices and each one's candidates are in that order.
        index_C = jnp.arange(ids_RC.shape[1])
        mine_RC1, other_R1C = logits_RC[:, :, None], logits_RC[:, None]
        before_RCC = (other_R1C > mine_RC1) | ((other_R1C == mine_RC1) & (index_C < index_C[:, None]))
        place_RC = before_RCC.sum(axis=2, dtype=jnp.int32)
        at_RN = jnp.argmax(place_RC[:, :, None] == jnp.arange(count), axis=1)
        return Likeliest(*(jnp.take_along_axis(each, at_RN, axis=1) for each in (ids_RC, logits_RC)))

    def by_rows(self, function: Callable[..., jax.Array], logits: jax.Array, *per_row: Any) -> jax.Array:
        """function(whole rows of logits, *per_row) -> [R]; on several devices each runs it on a share of the rows.

        Args:
            per_row: trees of arrays [R, ...]. The function treats rows apart.
        """
        if not comm.is_split():
            return function(logits, *per_row)
        R = logits.shape[0]
        share = -(-R // comm.size())

        def even(x: jax.Array) -> jax.Array:  # with the last row again
            return jnp.pad(x, ((0, share * comm.size() - R), *((0, 0),) * (x.ndim - 1)), mode="edge")

        rows = comm.swap(even(logits))[:, : self.vocab]
        shares = jax.tree.map(lambda x: comm.own(even(x), share, axis=0), per_row)
        return comm.gather(function(rows, *shares), axis=0)[:R]

    def _own_draw(
        self,
        logits: jax.Array,
        rows: jax.Array | None,
        temperature: jax.Array,
        keys: jax.Array,
        wanted: jax.Array,
        likely: jax.Array,
        residual: Residual | None,
        cuts: jax.Array | None,
    ) -> Drawn:
        if residual is not None:
            residual = residual._replace(excluded=self.find(residual.excluded))
        first = comm.first(self.width)
        return gumbel_best(logits, rows, temperature, keys, wanted, likely, residual, cuts, first)

    def _joined_draw(self, drawn: Drawn, residual: Residual | None) -> jax.Array:
        """Ids [R] from what every device puts forward, [n, R]."""
        ids, _ = self._first_of_best(drawn.whole.ids, drawn.whole.scores)
        if residual is None or drawn.left is None:
            return ids
        left_ids, left_scores = self._first_of_best(drawn.left.ids, drawn.left.scores)
        return jnp.where(residual.dense & (left_scores > -jnp.inf), left_ids, ids)

    def _joined_stats(self, parts: tuple[jax.Array, LogitsStats]) -> LogitsStats:
        highest_nR, of_parts = parts
        return LogitsStats(
            argmax=self._first_of_best(of_parts.argmax, highest_nR)[0],
            log_z=jax.nn.logsumexp(of_parts.log_z, axis=0),
            log_z_tempered=jax.nn.logsumexp(of_parts.log_z_tempered, axis=0),
            finite=of_parts.finite.all(axis=0),
        )

    def _first_of_best(self, columns_nR: jax.Array, values_nR: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Of each device's best column the id of the largest value, of equal ones the lowest, and the value: [R]."""
        ids_nR = columns_nR + jnp.arange(columns_nR.shape[0], dtype=jnp.int32)[:, None] * self.width
        winner_1R = jnp.argmax(values_nR, axis=0)[None]
        ids_R, values_R = (jnp.take_along_axis(each, winner_1R, axis=0)[0] for each in (ids_nR, values_nR))
        # Padding wins in rows alone where nothing may be chosen.
        return jnp.minimum(ids_R, self.vocab - 1), values_R


def _with_highest(logits: jax.Array, own: LogitsStats) -> tuple[jax.Array, LogitsStats]:
    """The largest logit of each row, float32 [R], beside its column and the rest."""
    return jnp.take_along_axis(logits, own.argmax[:, None], axis=1)[:, 0].astype(jnp.float32), own
