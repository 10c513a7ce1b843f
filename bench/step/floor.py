"""The least bytes that a decode step or a speculative cycle has to read: the floor of its time."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flax import nnx

from bench.harness.models import Weights
from jaxspec.config import PAGE_SIZE
from jaxspec.models.cache import CacheSpec, page_bytes
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import TENSOR_AXIS, declarations


@dataclass(frozen=True)
class Traffic:
    """The least bytes that one decode step has to read."""

    weights: float
    kv: float
    experts: float  # expected number of routed experts touched in a layer

    @property
    def total(self) -> float:
        return self.weights + self.kv


def traffic(model: CausalLM, rows: int, context: float, *, tokens: int | None = None) -> Traffic:
    """Of a step of `rows` rows and, with windows, `tokens` tokens in all (default: one a row)."""
    tokens = tokens or rows
    weights = weight_bytes(model, model.config, tokens)
    moe = routed_experts(model.config)
    experts = touched_share(moe, tokens) * moe.num_experts if moe else 0.0
    return Traffic(weights, rows * kv_bytes(model, context), experts)


def kv_bytes(model: CausalLM, context: float) -> float:
    """Bytes of KV that a row of so many tokens reads; of a layer with a sliding window those of the window."""
    windows = (getattr(layer.attention, "window", None) for layer in model.config.layers)
    tokens = (min(context, window or context) for window in windows)
    return sum(n * _token_bytes([spec]) for n, spec in zip(tokens, model.cache_specs(), strict=True))


def routed_experts(config: ModelConfig) -> MoESpec | None:
    """The routed experts of a model's layers; None in a dense model."""
    return next((layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)), None)


def touched_share(moe: MoESpec, tokens: int) -> float:
    """Expected part of a layer's routed experts that a step touches: tokens choose k of E independently."""
    return 1 - (1 - moe.top_k / moe.num_experts) ** tokens


def weight_bytes(module: Any, config: ModelConfig, tokens: int) -> float:
    """Bytes of a module's weights that a pass over `tokens` tokens reads.

    Each weight counts once; of the embedding only the tokens' rows count, of the routed experts those that are touched.
    """
    total = 0.0
    moe = routed_experts(config)
    for path, variable in declarations(module).items():
        value = variable.get_value()
        size = float(np.prod(value.shape)) * value.dtype.itemsize
        if moe and "experts" in variable.get_metadata()["axes"]:
            size *= touched_share(moe, tokens)
        if path[0] == "embed" and not config.tie_embeddings:
            size *= tokens / config.vocab_size
        total += size
    return total


def cycle_bytes(
    target: CausalLM, draft: Draft, rows: int, k: int, context: float, draft_token_bytes: float
) -> dict[str, float]:
    """The least bytes that one cycle has to read: the target's pass, and the draft's k passes (skip on).

    Each pass needs the result of the last one, so weights that no cache holds are read k times; `fc` once.
    """
    verify = traffic(target, rows, context, tokens=rows * (k + 1)).total
    declared = declarations(cast(nnx.Module, draft))
    once = float(sum(_nbytes(variable) for path, variable in declared.items() if path[0] == "fc"))
    each = weight_bytes(draft, target.config, rows) - once + rows * context * draft_token_bytes
    if not any(path[0] == "head" for path in declared):
        each += _nbytes(target.head.weight)
    return {"target": verify, "draft": once + k * each}


def _nbytes(variable: Any) -> int:
    value = variable.get_value()
    return int(np.prod(value.shape)) * value.dtype.itemsize


def _token_bytes(specs: Sequence[CacheSpec]) -> float:
    return page_bytes(specs, PAGE_SIZE, {TENSOR_AXIS: 1}) / PAGE_SIZE


class Floor:
    """The least bytes of a step and of a cycle of one target and draft, and the time of reading them.

    Attributes:
        kv_token, draft_token: bytes of a token's KV, of all the target's layers and of the draft's.
    """

    def __init__(self, weights: Weights, bandwidth: float):
        self._weights, self._bandwidth = weights, bandwidth
        self.kv_token = _token_bytes(weights.model.cache_specs())
        self.draft_token = _token_bytes([weights.draft[0].cache_spec] if weights.draft else [])

    def of_step(self, rows: int, context: float) -> Traffic:
        return traffic(self._weights.model, rows, context)

    def of_cycle(self, rows: int, k: int, context: float) -> dict[str, float]:
        assert self._weights.draft is not None
        return cycle_bytes(self._weights.model, self._weights.draft[0], rows, k, context, self.draft_token)

    def seconds(self, size: float) -> float:
        return size / self._bandwidth
