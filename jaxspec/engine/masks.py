"""Masks of constrained requests: filled on the host before a step lets them choose, uploaded to their slots."""

import functools
import itertools
import math
from typing import Any, NamedTuple, Protocol

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

    def write_masks(self, slots: np.ndarray, words: np.ndarray, verified: np.ndarray) -> None:
        """int32 [X] distinct slots get the masks int32 [X, n, words], and verify at most int32 [X] drafts, in the next step."""
        ...


def write_masks(store: MaskStore, plan: StepPlan, until: float = math.inf) -> None:
    """Uploads the masks of the plan's constrained rows that choose a token, if there are any.

    Args:
        until: the `time.monotonic()` after which rows verify fewer drafts rather than wait for the masks after them.
    """
    rows = constrained_rows(plan)
    if not rows:
        return
    words = np.empty((len(rows), *store.mask_shape), np.int32)
    verified: list[int] = []
    rows.sort(key=lambda row: id(type(row[1])))
    for kind, group in itertools.groupby(rows, key=lambda row: type(row[1])):
        members = [(constraint, drafts) for _, constraint, drafts in group]
        first = len(verified)
        verified += kind.fill_many(members, words[first : first + len(members)], until)
    slots = np.array([request.slot for request, _, _ in rows], np.int32)
    store.write_masks(slots, words, np.array(verified, np.int32))


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


class Masked(NamedTuple):
    """What an upload changes of the state.

    Attributes:
        masks: int32 [S, n, words]. held: int32 [S], or () without speculation; see `StepState`.
    """

    masks: Any
    held: Any


class MaskUpload:
    """Compiled copies of masks to the device, for a few numbers of slots. They hold the donated arrays for a moment.

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
        most = self._max_slots - 1
        self._sizes = sorted({size for size in UPLOAD_SLOTS if size < most} | {most})
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, masked: Masked, store: ExecutableStore) -> Masked:
        """Compiles every size and runs it on padding; returns what it was given for further use."""
        for size in self._sizes:
            key = store.key("masks", self._shapes, size)
            self._compiled[size] = store.load_or_make(key, functools.partial(self._compile, size))
            masked = self(masked, *(np.zeros(each.shape, each.dtype) for each in self._given(size)))
        return masked

    def padded(self, slots: np.ndarray, words: np.ndarray, verified: np.ndarray) -> tuple[np.ndarray, ...]:
        """The smallest upload for `slots`, of each rank the same; see `MaskStore.write_masks`. Slot 0 is padding: nobody reads
        its masks."""
        ranks, own_slots = np.divmod(slots, self._max_slots)
        counts = np.bincount(ranks, minlength=self._ranks)
        size = next(s for s in self._sizes if s >= counts.max())
        if len(slots) == self._ranks * size == size:
            return slots, words, verified
        arrays = []
        for values in (own_slots.astype(np.int32), words, verified):
            padded = np.zeros((self._ranks, size, *values.shape[1:]), np.int32)
            for rank, count in enumerate(counts):
                padded[rank, :count] = values[ranks == rank]
            arrays.append(padded.reshape(-1, *values.shape[1:]))
        return tuple(arrays)

    def __call__(self, masked: Masked, slots: np.ndarray, words: np.ndarray, verified: np.ndarray) -> Masked:
        """The state's arrays after an upload that `padded` gave."""
        return self._compiled[len(slots) // self._ranks](masked, slots, words, verified)

    def _given(self, size: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        number, sharding = self._ranks * size, of_ranks(self._mesh)
        dims = ((number,), (number, *self._shape.shape[1:]), (number,))
        return tuple(jax.ShapeDtypeStruct(each, jnp.int32, sharding=sharding) for each in dims)

    def _compile(self, size: int) -> jax.stages.Compiled:
        given = (self._shapes, *self._given(size))
        copy = on_mesh(_copy, self._mesh, specs(given), specs(self._shapes))
        out = jax.tree.map(lambda shape: shape.sharding, self._shapes)
        return jax.jit(copy, donate_argnums=0, out_shardings=out).lower(*given).compile()


def _copy(masked: Masked, slots: jax.Array, words: jax.Array, verified: jax.Array) -> Masked:
    held = masked.held if isinstance(masked.held, tuple) else masked.held.at[slots].min(verified)
    return Masked(masked.masks.at[slots].set(words), held)
