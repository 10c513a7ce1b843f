"""Masks of constrained requests: filled on the host before a step lets them choose, uploaded to their slots."""

import functools
import itertools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.host_rule import Constraint
from jaxspec.engine.plan import NO_ID, StepPlan
from jaxspec.engine.request import Request, RequestState

# An upload copies the masks of so many slots, or of all.
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
    """

    def __init__(self, masks: jax.Array | jax.ShapeDtypeStruct):
        self._shape = shape = jax.ShapeDtypeStruct(masks.shape, masks.dtype, sharding=masks.sharding)
        most = shape.shape[0] - 1
        self._sizes = sorted({size for size in UPLOAD_SLOTS if size < most} | {most})
        self._compiled: dict[int, jax.stages.Compiled] = {}

    def warm_up(self, masks: jax.Array, store: ExecutableStore) -> jax.Array:
        """Compiles every size and runs it on padding; returns the masks for further use."""
        sharding = self._shape.sharding
        row = self._shape.shape[1:]
        for size in self._sizes:
            slots = jax.ShapeDtypeStruct((size,), jnp.int32, sharding=sharding)
            words = jax.ShapeDtypeStruct((size, *row), jnp.int32, sharding=sharding)
            copy = jax.jit(_copy, donate_argnums=0, out_shardings=sharding)
            self._compiled[size] = store.load_or_make(
                store.key("masks", self._shape, size), functools.partial(_compile, copy, self._shape, slots, words)
            )
            masks = self(masks, np.zeros(size, np.int32), np.zeros((size, *row), np.int32))
        return masks

    def padded(self, slots: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The smallest upload that replaces the masks of `slots`; see `MaskStore.write_masks`."""
        pad = next(s for s in self._sizes if s >= len(slots)) - len(slots)
        if pad:  # slot 0 is padding: nobody reads its masks
            slots, words = np.pad(slots, (0, pad)), np.concatenate([words, np.zeros((pad, *words.shape[1:]), np.int32)])
        return slots, words

    def __call__(self, masks: jax.Array, slots: np.ndarray, words: np.ndarray) -> jax.Array:
        """The masks after an upload that `padded` gave."""
        return self._compiled[len(slots)](masks, slots, words)


def _compile(function: Any, *shapes: jax.ShapeDtypeStruct) -> jax.stages.Compiled:
    return function.lower(*shapes).compile()


def _copy(masks: jax.Array, slots: jax.Array, words: jax.Array) -> jax.Array:
    return masks.at[slots].set(words)
