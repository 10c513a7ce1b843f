"""Slots: which expert works on which tokens. Dispatch makes these tables from the routing; the matmuls read them.

A slot is one expert and a block of token rows. An expert with n tokens has ceil(n / rows) slots. An expert without tokens
has none, so its weights are never read.
"""

from typing import NamedTuple

import jax


class SlotTables(NamedTuple):
    """Slots in the order of their experts; only the first `num_slots` exist. Entries past them are undefined.

    Attributes:
        num_slots: int32 [1].
        expert: int32 [at least slots], the expert of each slot.
        used: int32 [at least slots], how many rows of each slot have a token: its first ones. Undefined where every slot has
            all tokens.
        token: int32 [slots * rows], the row of x in each row of a slot; undefined where every slot has all tokens.
        place: int32 [>= T, >= k], the row among all slots' rows of each assignment; 0 for tokens that are not live. Rows
            and columns past T and k are padding.
    """

    num_slots: jax.Array
    expert: jax.Array
    used: jax.Array
    token: jax.Array
    place: jax.Array


def max_slots(T: int, k: int, E: int, rows: int, *, all_tokens: bool) -> int:
    """The most slots that T tokens with k of E experts can need: one for each expert reached and one for each full block.

    Args:
        rows: token rows of a slot.
        all_tokens: every slot has all T <= rows tokens.
    """
    return min(E, T * k) + (0 if all_tokens else T * k // rows)
