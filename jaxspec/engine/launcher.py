"""Everything that runs on the devices after the start: executables, launched one after the other on the donated state.

A launch follows from an `Order` alone: an executable and the host's arrays for it. A process that launches the orders of
another has the same state; see `group.py`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.counts import CountUpload
from jaxspec.engine.handoff import Forwarded
from jaxspec.engine.masks import Masked, MaskUpload
from jaxspec.engine.orders import Kind, Order
from jaxspec.engine.state import StepState
from jaxspec.engine.state_copies import StateCopies
from jaxspec.engine.step import StepArrays


def laid_out(value: np.ndarray, sharding: Sharding) -> jax.Array:
    """A copy of a host array on every device, those of other processes too: each process brings the same."""
    return jax.make_array_from_callback(value.shape, sharding, lambda index: value[index].copy())


class Launcher:
    """
    Attributes:
        leaves: the parameters, flattened.
        state: given to each executable and taken from it.
        steps: compiled, by bucket or part of one; `scores`: by the number of prompt tokens.
        send: gets every order before it is launched: other processes launch it too.

    Args:
        table: the buckets and parts that orders name by their place.
        reads_parameters: which of them are given the parameters.
    """

    def __init__(
        self,
        table: tuple[Bucket, ...],
        state: StepState,
        masks: MaskUpload,
        counts: CountUpload,
        copies: StateCopies,
        reads_parameters: Callable[[Bucket], bool],
        send: Callable[[Order], None] | None = None,
    ):
        self._table = table
        self._places = {bucket: place for place, bucket in enumerate(table)}
        self._masks, self._counts, self._copies = masks, counts, copies
        self._reads_parameters = reads_parameters
        self._handed: dict[Bucket, Forwarded] = {}  # of each split bucket, by its last run
        self._filled: Callable[[jax.Array, np.int32], jax.Array] | None = None
        self.leaves: tuple[Any, ...] = ()
        self.state = state
        self.steps: dict[Bucket, jax.stages.Compiled] = {}
        self.scores: dict[int, jax.stages.Compiled] = {}
        self.send = send

    def step_order(self, bucket: Bucket, inputs: np.ndarray) -> Order:
        """Of a step, or of a part of one: the second gets from the first what that was given."""
        return Order(Kind.STEP, self._places[bucket], () if bucket.part == "choose" else (inputs,))

    def launch(self, order: Order, hidden: jax.Array | None = None) -> Any:
        """Launches an order.

        Args:
            hidden: of the step before, where the order is a SCORE.

        Returns:
            `StepArrays` of a step, `Forwarded` of the first part of one, scores, otherwise None.
        """
        if self.send is not None:
            self.send(order)
        match order.kind:
            case Kind.STEP:
                return self._step(self._table[order.which], *order.arrays)
            case Kind.MASKS:
                masked = self._masks(Masked(self.state.masks, self.state.held), *order.arrays)
                self.state = self.state._replace(**masked._asdict())
            case Kind.COUNTS:
                self.state = self.state._replace(counts=self._counts(self.state.counts, *order.arrays))
            case Kind.STATES:
                self.state = self._copies(self.state, *order.arrays)
            case Kind.SCORE:
                return self.scores[order.which](self.leaves, hidden, *order.arrays)
            case Kind.PUT:
                self._put(StepState._fields[order.which], *order.arrays)
            case Kind.HOLD:
                self._hold(order.which)
        return None

    def _step(self, bucket: Bucket, *inputs: np.ndarray) -> StepArrays | Forwarded:
        # NumPy arrays: the call itself copies them, with less host time than a separate `device_put`.
        if bucket.part == "forward":
            return self._forward(bucket, *inputs)
        given = inputs if bucket.part == "whole" else (self._handed[replace(bucket, part="whole")],)
        leaves = self.leaves if self._reads_parameters(bucket) else ()
        self.state, arrays = self.steps[bucket](leaves, self.state, *given)
        return arrays

    def _forward(self, bucket: Bucket, inputs: np.ndarray) -> Forwarded:
        forward, whole = self.steps[bucket], replace(bucket, part="whole")
        # In the place of the last run's: a recorded graph is changed wherever an array lies elsewhere than before.
        before = self._handed.pop(whole, None) or self._zeros(forward)
        self.state, self._handed[whole] = forward(self.leaves, self.state, inputs, before)
        return self._handed[whole]

    def _zeros(self, forward: jax.stages.Compiled) -> Forwarded:
        shapes, shardings = forward.args_info[0][3], forward.input_shardings[0][3]
        return jax.tree.map(lambda s, at: laid_out(np.zeros(s.shape, s.dtype), at), shapes, shardings)

    def _put(self, name: str, value: np.ndarray) -> None:
        fields: dict[str, Any] = {name: laid_out(value, getattr(self.state, name).sharding)}
        self.state = self.state._replace(**fields)

    def _hold(self, drafts: int) -> None:
        held = self.state.held
        if self._filled is None:
            # In its place: a recorded graph is changed wherever an array lies elsewhere than before.
            self._filled = jax.jit(jnp.full_like, donate_argnums=0, keep_unused=True, out_shardings=held.sharding)
        self.state = self.state._replace(held=self._filled(held, np.int32(drafts)))
