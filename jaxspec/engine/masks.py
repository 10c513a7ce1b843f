"""Masks of constrained requests: filled on the host before a step lets them choose, uploaded to their slots."""

import functools
import itertools
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.host_rule import Constraint
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.plan import NO_ID, StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.models.params import num_ranks, of_ranks

# An upload copies the masks of so many slots of a rank, or of all.
UPLOAD_SLOTS = (1, 4, 16, 32, 64)


class MaskStore(Protocol):
    """Where masks go: a `Runner`, or what stands in for one."""

    @property
    def mask_shape(self) -> tuple[int, int]:
        """(n, words) of a slot's masks."""
        ...

    def write_masks(self, slots: np.ndarray, words: np.ndarray) -> None:
        """int32 [X] distinct slots get the masks int32 [X, n, words] before the next step."""
        ...


def write_masks(store: MaskStore, plan: StepPlan) -> None:
    """Uploads the masks of the plan's constrained rows that choose a token, if there are any."""
    rows = constrained_rows(plan)
    if not rows:
        return
    words, first = np.empty((len(rows), *store.mask_shape), np.int32), 0
    rows.sort(key=lambda row: id(type(row[1])))
    for kind, group in itertools.groupby(rows, key=lambda row: type(row[1])):
        members = [(constraint, drafts) for _, constraint, drafts in group]
        kind.fill_many(members, words[first : first + len(members)])
        first += len(members)
    store.write_masks(np.array([request.slot for request, _, _ in rows], np.int32), words)


def constrained_rows(plan: StepPlan) -> list[tuple[Request, Constraint, tuple[int, ...]]]:
    """Requests with their rules and the drafts that they verify: a mask takes time, and those of drafts beyond are not read.

    A chunk in the middle chooses nothing; a request that resumes is told its next token. Of a split plan some requests may
    have ended since: what their rows choose is dropped.
    """
    sampled = [row.request for row in plan.prefill if row.final and row.forced == NO_ID]
    rows: list[tuple[Request, tuple[int, ...]]] = [(request, ()) for request in sampled]
    rows += [(request, request.drafts[:count]) for request, count in zip(plan.decode, plan.verified, strict=True)]
    return [
        (request, request.constraint, drafts)
        for request, drafts in rows
        if request.constraint and request.state is not RequestState.FINISHED
    ]


class MaskUpload:
    """Compiled copies of masks to the device, for a few numbers of slots. They hold the donated masks for a moment.

    Args:
        masks: the state's, int32 [S, n, words], for their shape and sharding.
        mesh: that they lie on; each rank has its slots'.
    """

    def __init__(self, masks: jax.Array | jax.ShapeDtypeStruct, mesh: Mesh):
        self._mesh, self._ranks = mesh, num_ranks(mesh)
        self._shape = shape = jax.ShapeDtypeStruct(masks.shape, masks.dtype, sharding=masks.sharding)
        self._max_slots = shape.shape[0] // self._ranks
        most = self._max_slots - 1
        self._sizes = sorted({size for size in UPLOAD_SLOTS if size < most} | {most})
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, masks: jax.Array, store: ExecutableStore) -> jax.Array:
        """Compiles every size and runs it on padding; returns the masks for further use."""
        for size in self._sizes:
            key = store.key("masks", self._shape, size)
            self._compiled[size] = store.load_or_make(key, functools.partial(self._compile, size))
            number = self._ranks * size
            masks = self(masks, np.zeros(number, np.int32), np.zeros((number, *self._shape.shape[1:]), np.int32))
        return masks

    def padded(self, slots: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The smallest upload that replaces the masks of `slots`, of each rank the same; see `MaskStore.write_masks`."""
        ranks, own_slots = np.divmod(slots, self._max_slots)
        size = next(s for s in self._sizes if s >= np.bincount(ranks).max())
        if self._ranks == 1:
            return _padded(slots, words, size)
        each = [_padded(own_slots[ranks == rank], words[ranks == rank], size) for rank in range(self._ranks)]
        return np.concatenate([slots for slots, _ in each]), np.concatenate([words for _, words in each])

    def __call__(self, masks: jax.Array, slots: np.ndarray, words: np.ndarray) -> jax.Array:
        """The masks after an upload that `padded` gave."""
        return self._compiled[len(slots) // self._ranks](masks, slots, words)

    def _compile(self, size: int) -> jax.stages.Compiled:
        number, sharding = self._ranks * size, of_ranks(self._mesh)
        slots = jax.ShapeDtypeStruct((number,), jnp.int32, sharding=sharding)
        words = jax.ShapeDtypeStruct((number, *self._shape.shape[1:]), jnp.int32, sharding=sharding)
        given = (self._shape, slots, words)
        copy = on_mesh(_copy, self._mesh, specs(given), specs(self._shape))
        return jax.jit(copy, donate_argnums=0, out_shardings=self._shape.sharding).lower(*given).compile()


def _padded(slots: np.ndarray, words: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """So many slots with their masks. Slot 0 is padding: nobody reads its masks."""
    pad = size - len(slots)
    if pad:
        slots, words = np.pad(slots, (0, pad)), np.concatenate([words, np.zeros((pad, *words.shape[1:]), np.int32)])
    return slots, words


def _copy(masks: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    return masks.at[slots].set(words)
