"""Masks of constrained requests: filled on the host before a step lets them choose, uploaded to their slots."""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.host_rule import Constraint, FilledMasks
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.plan import NO_ID, StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.models.params import num_ranks, of_ranks

# An upload copies so many masks of a rank, or all.
UPLOAD_MASKS = (1, 4, 16, 32, 64, 128, 256)


class MaskStore(Protocol):
    """Where masks go: a `Runner`, or what stands in for one."""

    @property
    def mask_shape(self) -> tuple[int, int]:
        """(n, words) of a slot's masks."""
        ...

    def write_masks(self, slots: np.ndarray, verified: np.ndarray, counts: np.ndarray, words: np.ndarray) -> None:
        """What the next step's constrained rows go by.

        Args:
            slots: int32 [X] distinct.
            verified: int32 [X] how many drafts each verifies at most.
            counts: int32 [X] how many masks each gets, from the first on; its others allow everything.
            words: int32 [sum of the counts, words] these masks, one slot's after the other's.
        """
        ...


def write_masks(store: MaskStore, plan: StepPlan, may_begin: Callable[[int], bool] = lambda _rows: True) -> None:
    """Uploads the masks of the plan's constrained rows that choose a token, if there are any.

    Args:
        may_begin: whether masks after drafts of so many rows may be begun. Otherwise these verify fewer drafts.
    """
    rows = constrained_rows(plan)
    if not rows:
        return
    words = np.empty((len(rows), *store.mask_shape), np.int32)
    filled: list[FilledMasks] = []
    rows.sort(key=lambda row: id(type(row[1])))
    for kind, group in itertools.groupby(rows, key=lambda row: type(row[1])):
        members = [(constraint, drafts) for _, constraint, drafts in group]
        first = len(filled)
        filled += kind.fill_many(members, words[first : first + len(members)], may_begin)
    slots = np.array([request.slot for request, _, _ in rows], np.int32)
    counts, verified = np.array(filled, np.int32).T
    store.write_masks(slots, verified, counts, words[np.arange(words.shape[1]) < counts[:, None]])


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


# Columns that say where a mask goes: slot, position, how many drafts the slot verifies at most.
PLACES = 3


class Masked(NamedTuple):
    """What an upload changes of the state.

    Attributes:
        masks: int32 [S, n, words]. held: int32 [S], or () without speculation; see `StepState`.
    """

    masks: Any
    held: Any


class MaskUpload:
    """Compiled copies of masks to the device, for a few numbers of masks. They hold the donated arrays for a moment.

    What a slot holds falls to the drafts that its masks are for. The next step says anew what it holds.

    Args:
        shapes: the state's, with their shardings.
        mesh: that they lie on; each rank has its slots'.
    """

    def __init__(self, shapes: Masked, mesh: Mesh):
        self._mesh, self._ranks = mesh, num_ranks(mesh)
        self._shapes = shapes
        self._shape = shape = shapes.masks
        self._max_slots = shape.shape[0] // self._ranks
        most = (self._max_slots - 1) * shape.shape[1]
        self._sizes = sorted({size for size in UPLOAD_MASKS if size < most} | {most})
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, masked: Masked, store: ExecutableStore) -> Masked:
        """Compiles every size and runs it on padding; returns what it was given for further use."""
        for size in self._sizes:
            key = store.key("masks", self._shapes, size)
            self._compiled[size] = store.load_or_make(key, functools.partial(self._compile, size))
            masked = self(masked, np.zeros(self._given(size).shape, np.int32))
        return masked

    def padded(self, slots: np.ndarray, verified: np.ndarray, counts: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The smallest upload, of each rank the same; see `MaskStore.write_masks`. Slot 0 is padding: nobody reads its masks.

        Returns:
            int32 [ranks * size, PLACES + words] of each mask where it goes, and the mask.
        """
        row = np.repeat(np.arange(len(slots)), counts)
        position = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
        ranks, own_slots = np.divmod(slots[row], self._max_slots)
        per_rank = np.bincount(ranks, minlength=self._ranks)
        size = next(s for s in self._sizes if s >= per_rank.max())
        padded = np.zeros(self._given(size).shape, np.int32)
        for rank, count in enumerate(per_rank.tolist()):
            own = slice(None) if count == len(row) else ranks == rank
            places, masks = np.split(padded[rank * size :][:count], [PLACES], axis=1)
            places[:, 0], places[:, 1], places[:, 2] = own_slots[own], position[own], verified[row[own]]
            masks[:] = words[own]
        return padded

    def __call__(self, masked: Masked, upload: np.ndarray) -> Masked:
        """The state's arrays after an upload that `padded` gave."""
        return self._compiled[len(upload) // self._ranks](masked, upload)

    def _given(self, size: int) -> jax.ShapeDtypeStruct:
        columns = PLACES + self._shape.shape[2]
        return jax.ShapeDtypeStruct((self._ranks * size, columns), jnp.int32, sharding=of_ranks(self._mesh))

    def _compile(self, size: int) -> jax.stages.Compiled:
        given = (self._shapes, self._given(size))
        copy = on_mesh(_copy, self._mesh, specs(given), specs(self._shapes))
        out = jax.tree.map(lambda shape: shape.sharding, self._shapes)
        return jax.jit(copy, donate_argnums=0, out_shardings=out).lower(*given).compile()


def _copy(masked: Masked, upload: jax.Array) -> Masked:
    slots, positions, verified = upload[:, :PLACES].T
    held = masked.held if isinstance(masked.held, tuple) else masked.held.at[slots].min(verified)
    masks = masked.masks if masked.masks.shape[1] == 1 else masked.masks.at[slots].set(-1)
    return Masked(masks.at[slots, positions].set(upload[:, PLACES:]), held)
