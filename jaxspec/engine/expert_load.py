"""How many tokens each mixture layer has sent to each of its experts: counted in the steps, where it was asked for.

The counts stay on the devices and pass from step to step. Each step also gives a copy that outlives it, so that whoever
wants the numbers reads the copy of a step that is over, and no step waits.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.models.decoder import CausalLM

# A count is two words of so many bits: one word is full after hours of prompts.
WORD_BITS = 30


def load_dims(model: CausalLM, ranks: int) -> tuple[int, int, int, int]:
    """[ranks, 2, L, E] of the low and the high words of each rank's counts, for L mixture layers of E experts."""
    numbers = set(model.mixtures.values())
    assert len(numbers) == 1, "see `check_expert_load`; no family has mixtures of several sizes"
    return ranks, 2, len(model.mixtures), numbers.pop()


def add_load(words: jax.Array, ids: Sequence[jax.Array], live_T: jax.Array) -> jax.Array:
    """The counts after a step.

    A sum of comparisons and no scatter, so that one fused kernel adds up all layers.

    Args:
        words: int32 [1, 2, L, E] of this rank, see `load_dims`.
        ids: of each mixture layer, the experts that it chose, int32 [T, top_k].
        live_T: bool [T], false for tokens that reach no expert.
    """
    low, high = words[:, 0], words[:, 1]
    ids_LTk = jnp.where(live_T[:, None], jnp.stack(ids), -1)
    chosen_LTkE = ids_LTk[..., None] == jnp.arange(words.shape[3], dtype=jnp.int32)
    low = low + chosen_LTkE.sum(axis=(1, 2), dtype=jnp.int32)
    return jnp.stack([low & (1 << WORD_BITS) - 1, high + (low >> WORD_BITS)], axis=1)


@dataclass(frozen=True)
class ExpertLoad:
    """The counts since the start, of the target's layers and of all tokens that they computed: prompts, windows with those
    drafts that could be accepted, and what a preempted request computes again.

    Attributes:
        words: int32 [ranks, 2, L, E], see `load_dims`; on the devices until a count is read.
        layers: the numbers of the L mixture layers.
        devices: that the experts are split over, in order and evenly.
    """

    words: Any
    layers: tuple[int, ...]
    devices: int

    @classmethod
    def zero(cls, model: CausalLM, devices: int) -> "ExpertLoad":
        """Before the first step."""
        return cls(np.zeros(load_dims(model, 1), np.int32), tuple(model.mixtures), devices)

    @functools.cached_property
    def counts(self) -> np.ndarray:
        """int64 [L, E] of all ranks."""
        low_LE, high_LE = np.asarray(self.words).astype(np.int64).sum(axis=0)
        return (high_LE << WORD_BITS) + low_LE

    @property
    def by_device(self) -> np.ndarray:
        """int64 [L, devices]: the sums over each device's experts."""
        return self.counts.reshape(len(self.layers), self.devices, -1).sum(axis=2)

    @property
    def busiest_over_mean(self) -> np.ndarray:
        """float64 [L]: the largest count of a layer's experts over their mean: 1 if all are alike, E if one has all; 1 before
        the first token."""
        counts = np.maximum(self.counts, ~self.counts.any(axis=1, keepdims=True))
        return counts.max(axis=1) / counts.mean(axis=1)
