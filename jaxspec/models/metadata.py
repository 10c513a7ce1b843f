"""The positions, pages and rows of a step's tokens, as attention needs them."""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class StepMetadata(NamedTuple):
    """The layout of a step's T = P + D·n tokens: P prompt tokens of E rows first, then D windows of n tokens.

    Attributes:
        positions: int32 [T] absolute positions.
        pages, offsets: int32 [T] where each token's KV goes; padding tokens go to page 0.
        live: bool [T], false for padding tokens, and for drafts that cannot be accepted: their KV is written, but they need
            no experts, as nobody reads what comes of them.
        prefill_tables: int32 [E, max_pages] page tables of the prompt rows.
        prefill_rows: int32 [P] the row of each prompt token; E for padding.
        prefill_ends: int32 [E] tokens of each row with this chunk; 0 for padding.
        decode_tables: int32 [D, max_pages].
        decode_bounds: int32 [D, n] exclusive causal bounds, at least 1.
        prefill_slots, decode_slots: int32 [E], [D] the slot of each row, for caches that keep a state a slot; 0 for
            padding. A slot still holds its previous request's state: a chunk with start 0 must ignore it.
        prefill_starts: int32 [E] position of each chunk's first token.
        choices: while a forward pass is traced whose layers may share a choice of keys, those that its layers have made so
            far (see `sparse_mla`).
    """

    positions: jax.Array
    pages: jax.Array
    offsets: jax.Array
    live: jax.Array
    prefill_tables: jax.Array
    prefill_rows: jax.Array
    prefill_ends: jax.Array
    decode_tables: jax.Array
    decode_bounds: jax.Array
    prefill_slots: jax.Array
    prefill_starts: jax.Array
    decode_slots: jax.Array
    choices: list[jax.Array] | None = None

    @property
    def num_prefill_tokens(self) -> int:
        return self.prefill_rows.shape[0]

    def queries(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """All T tokens alike: page tables [E + D, max_pages], the table of each and its exclusive causal bound, int32 [T].

        The bound of a padding token of a prompt is 0.
        """
        (E, D), n, P = (
            (len(self.prefill_tables), len(self.decode_tables)),
            self.decode_bounds.shape[1],
            self.num_prefill_tokens,
        )
        prompt_rows = jnp.minimum(self.prefill_rows, max(E - 1, 0))
        prompt_bounds = jnp.where(self.prefill_rows < E, self.positions[:P] + 1, 0)
        return (
            jnp.concatenate([self.prefill_tables, self.decode_tables]),
            jnp.concatenate([prompt_rows, E + jnp.repeat(jnp.arange(D, dtype=jnp.int32), n)]),
            jnp.concatenate([prompt_bounds, self.decode_bounds.reshape(-1)]),
        )


class LiveRows(NamedTuple):
    """The R tokens out of T that a draft's catch-up attends for.

    Attributes:
        tokens: int32 [R] their indices.
        tables: int32 [R, max_pages] their requests' page tables.
        bounds: int32 [R] their exclusive causal bounds, at least 1.
    """

    tokens: jax.Array
    tables: jax.Array
    bounds: jax.Array


def window_bounds(ends: jax.Array, n: int) -> jax.Array:
    """Exclusive causal bounds [D, n] of windows that end at `ends` [D], their last token included.

    Counts back: row r of a window of n sees the keys at positions < end - (n - 1) + r. Padding rows may have
    end < n; their bounds are clamped to 1, which only ever reads the padding page.
    """
    return jnp.maximum(ends[:, None] - (n - 1) + jnp.arange(n, dtype=jnp.int32), 1)
