"""Copies of states between slots: kept for later requests, and restored for them. See `snapshots`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.state import StepState
from jaxspec.models.cache import CacheSpec
from jaxspec.models.params import num_ranks, of_ranks


class StateCopies:
    """A compiled copy of states from slots to others, in all layers that keep one a slot.

    Args:
        state: shapes and shardings.
        target, draft: the caches of the layers.
        most: copies at once, of a rank.
        mesh: that the state lies on.
    """

    def __init__(self, state: StepState, target: Sequence[CacheSpec], draft: CacheSpec | None, most: int, mesh: Mesh):
        caches = (*target, *(() if draft is None else (draft,)))
        self._most, self._mesh = most, mesh
        # (layer, array) of those that are copied.
        self._places = [
            (layer, i)
            for layer, spec in enumerate(caches)
            for i, array in enumerate(spec.arrays)
            if array.per == "slot"
        ]
        self._shapes = self._of(state)
        self._compiled: jax.stages.Compiled | None = None

    def warm_up(self, state: StepState, store: ExecutableStore) -> StepState:
        """Compiles the copy and runs it on padding; returns the state for further use."""
        key = store.key("states", self._shapes, self._most)
        self._compiled = store.load_or_make(key, self._compile)
        return self(state, self.packed([[]] * num_ranks(self._mesh)))

    def packed(self, ranks: Sequence[Sequence[tuple[int, int]]]) -> np.ndarray:
        """int32 [ranks * 2, most] from (from, to) pairs of each rank's slots; the rest copies the padding slot to itself."""
        pairs = np.zeros((len(ranks), 2, self._most), np.int32)
        for rank, copies in enumerate(ranks):
            if copies:
                pairs[rank, :, : len(copies)] = np.array(copies, np.int32).T
        return pairs.reshape(-1, self._most)

    def __call__(self, state: StepState, pairs: np.ndarray) -> StepState:
        """The state after the copies that `packed` gave; all read before any writes."""
        assert self._compiled is not None
        layers = [list(layer) for layer in (*state.kv, state.draft_kv)]
        for (layer, i), array in zip(self._places, self._compiled(self._of(state), pairs), strict=True):
            layers[layer][i] = array
        *kv, draft_kv = map(tuple, layers)
        return state._replace(kv=tuple(kv), draft_kv=draft_kv)

    def _of(self, state: StepState) -> tuple[jax.Array, ...]:
        layers = (*state.kv, state.draft_kv)
        return tuple(layers[layer][i] for layer, i in self._places)

    def _compile(self) -> jax.stages.Compiled:
        shardings = tuple(s.sharding for s in self._shapes)
        shape = (2 * num_ranks(self._mesh), self._most)
        given = (self._shapes, jax.ShapeDtypeStruct(shape, jnp.int32, sharding=of_ranks(self._mesh)))
        copy = on_mesh(_copy, self._mesh, specs(given), specs(self._shapes))
        return jax.jit(copy, donate_argnums=0, out_shardings=shardings).lower(*given).compile()


def _copy(arrays: tuple[jax.Array, ...], pairs: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays [slots, ...] after the copies of pairs int32 [2, X]."""
    return tuple(array.at[pairs[1]].set(array[pairs[0]]) for array in arrays)
