"""Tokens that the prefix cache had, in the counts of penalties: no step reads them, so they are counted before one does.

Only for requests whose penalties see these tokens; others keep their prefix hits without any of this.
"""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.plan import PrefillRow
from jaxspec.models.params import num_ranks, of_ranks
from jaxspec.sampling.columns import Columns
from pallas_kernels.logit_rules.reference import PROMPT_BIT

# An upload counts at most so many tokens of one slot; longer texts take several.
UPLOAD_TOKENS = (256, 4096)
# Before its ids: slot, position of the first id, how many ids there are, length of the prompt.
HEADER = 4


class CountUpload:
    """Compiled additions to one slot's counts, for a few numbers of tokens. They hold the donated counts for a moment.

    Args:
        counts: the state's, int32 [S, V], for their shape and sharding.
        max_tokens: most tokens that a request can have.
        mesh: that the counts lie on, with a part of each slot's on every device of its rank.
    """

    def __init__(self, counts: jax.Array | jax.ShapeDtypeStruct, max_tokens: int, mesh: Mesh):
        self._mesh, self._ranks = mesh, num_ranks(mesh)
        self._max_slots = counts.shape[0] // self._ranks
        self._shape = jax.ShapeDtypeStruct(counts.shape, counts.dtype, sharding=counts.sharding)
        self._sizes = sorted({min(size, max_tokens) for size in UPLOAD_TOKENS})
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, counts: jax.Array, store: ExecutableStore) -> jax.Array:
        """Compiles every size and runs it on padding; returns the counts for further use."""
        for size in self._sizes:
            key = store.key("counts", self._shape, size)
            self._compiled[size] = store.load_or_make(key, functools.partial(self._compile, size))
            counts = self(counts, np.zeros(self._ranks * (HEADER + size), np.int32))
        return counts

    def packed(self, row: PrefillRow) -> Iterator[np.ndarray]:
        """The uploads, int32 [ranks * (HEADER + size)], that replace the counts of the row's slot by its first `row.cached`
        tokens. Other ranks count nothing, in their padding slots."""
        request = row.request
        rank, slot = divmod(request.slot, self._max_slots)
        most = self._sizes[-1]
        for start in range(0, row.cached, most):
            ids = request.tokens[start : min(start + most, row.cached)]
            size = next(s for s in self._sizes if s >= len(ids))
            packed = np.zeros((self._ranks, HEADER + size), np.int32)
            packed[rank, :HEADER] = slot, start, len(ids), request.prompt_len
            packed[rank, HEADER : HEADER + len(ids)] = ids
            yield packed.reshape(-1)

    def __call__(self, counts: jax.Array, packed: np.ndarray) -> jax.Array:
        """The counts [S, V] after an upload that `packed` gave."""
        return self._compiled[len(packed) // self._ranks - HEADER](counts, packed)

    def _compile(self, size: int) -> jax.stages.Compiled:
        number = self._ranks * (HEADER + size)
        packed = jax.ShapeDtypeStruct((number,), jnp.int32, sharding=of_ranks(self._mesh))
        given = (self._shape, packed)
        count = functools.partial(_count, columns=Columns(self._shape.shape[1]))
        mapped = on_mesh(count, self._mesh, specs(given), specs(self._shape))
        return jax.jit(mapped, donate_argnums=0, out_shardings=self._shape.sharding).lower(*given).compile()


def _count(counts: jax.Array, packed: jax.Array, columns: Columns) -> jax.Array:
    """Counts [S, V] of these columns after an upload, int32 [HEADER + size].

    The first one of a text begins by clearing its slot.
    """
    slot, start, length, prompt_len = packed[:HEADER]
    ids = columns.find(packed[HEADER:])
    index = jnp.arange(ids.shape[0], dtype=jnp.int32)
    nowhere = counts.shape[1]  # the scatter drops it
    row = jnp.where(start == 0, 0, counts[slot])
    in_prompt = start + index < prompt_len
    live = index < length
    # As in a step: a prompt comes before all output, so its ids are at 0 or marked already.
    row = row.at[jnp.where(live & in_prompt, ids, nowhere)].max(PROMPT_BIT, mode="drop")
    row = row.at[jnp.where(live & ~in_prompt, ids, nowhere)].add(1, mode="drop")
    return counts.at[slot].set(row)
