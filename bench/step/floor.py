"""Bytes that a decode step or a speculative cycle has to read at least: the floor under its time."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import declarations


@dataclass(frozen=True)
class Traffic:
    """Bytes that one decode step of `rows` rows has to read at least."""

    weights: float
    kv: float
    experts: float  # expected number of routed experts touched in a layer

    @property
    def total(self) -> float:
        return self.weights + self.kv


def traffic(model: CausalLM, rows: int, context: float, kv_token_bytes: float, *, tokens: int | None = None) -> Traffic:
    """What a step of `rows` rows and, in windows, `tokens` tokens (default: one a row) reads."""
    tokens = tokens or rows
    weights = weight_bytes(model, model.config, tokens)
    moe = routed_experts(model.config)
    experts = touched_share(moe, tokens) * moe.num_experts if moe else 0.0
    return Traffic(weights, rows * context * kv_token_bytes, experts)


def routed_experts(config: ModelConfig) -> MoESpec | None:
    """The routed experts of a model's layers; None in a dense model."""
    return next((layer.mlp for layer in config.layers if isinstance(layer.mlp, MoESpec)), None)


def touched_share(moe: MoESpec, tokens: int) -> float:
    """Expected part of a layer's routed experts that a step touches: tokens choose k of E independently."""
    return 1 - (1 - moe.top_k / moe.num_experts) ** tokens


def weight_bytes(module: Any, config: ModelConfig, tokens: int) -> float:
    """Bytes of a module's weights that a pass over `tokens` tokens reads.

    Counts each weight once, of the embedding the tokens' own lines, and of the routed experts those that are touched.
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
    target: CausalLM, draft: Draft, rows: int, k: int, context: float, kv_token_bytes: float, draft_token_bytes: float
) -> dict[str, float]:
    """Bytes that one cycle has to read at least: the target's pass, and the draft's k passes (skip on).

    A pass needs what the last one made, so weights that do not fit in a cache are read k times; `fc` once.
    """
    verify = traffic(target, rows, context, kv_token_bytes, tokens=rows * (k + 1)).total
    once = float(sum(_nbytes(v) for path, v in declarations(draft).items() if path[0] == "fc"))  # type: ignore[arg-type]
    each = weight_bytes(draft, target.config, rows) - once + rows * context * draft_token_bytes
    if not any(path[0] == "head" for path in declarations(draft)):  # type: ignore[arg-type]
        each += _nbytes(target.head.weight)
    return {"target": verify, "draft": once + k * each}


def _nbytes(variable: Any) -> int:
    value = variable.get_value()
    return int(np.prod(value.shape)) * value.dtype.itemsize
