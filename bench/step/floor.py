"""The least bytes that each device has to move in a decode step or a speculative cycle: the floor of its time.

Weights and KV are read. States of recurrent layers, and what these keep of a window to bring them up to date, are read and
written.
"""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from flax import nnx

from bench.harness.models import Weights
from jaxspec.config import PAGE_SIZE
from jaxspec.models.cache import CacheArray, CacheSpec, page_bytes, slot_bytes
from jaxspec.models.config import AttentionSpec, ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.gated_shared import GatedSharedSpec
from jaxspec.models.moe import MoESpec
from jaxspec.models.mtp import NextN
from jaxspec.models.params import AXIS_RULES, TENSOR_AXIS, declarations
from jaxspec.models.sparse_mla import INDEX_KEYS

# What `declarations` gives.
Declarations = Mapping[tuple[str | int, ...], nnx.Variable]
# Tokens that are drawn to see how many experts the busiest device touches.
_DRAWS = 4096


@dataclass(frozen=True)
class Traffic:
    """The least bytes that one decode step has to move on each device.

    Attributes:
        weights, kv: read. kv: with the index keys of layers that choose what they read.
        state: of recurrent layers, read and written.
        experts: expected number of routed experts touched in a layer, on the device with the most of them.
    """

    weights: float
    kv: float
    state: float
    experts: float

    @property
    def total(self) -> float:
        return self.weights + self.kv + self.state


def traffic(
    model: CausalLM,
    rows: int,
    context: float,
    *,
    tokens: int | None = None,
    devices: int = 1,
    touched: float | None = None,
) -> Traffic:
    """Of a step of `rows` rows and, with windows, `tokens` tokens in all (default: one a row).

    Args:
        touched: routed experts of a layer that the tokens reach, where they were counted (default: `touched_share`).
    """
    tokens = tokens or rows
    moe = routed_experts(model.config)
    share = touched_share(moe, tokens, devices) if moe else 0.0
    if moe and touched is not None:
        share = touched * devices / moe.num_experts
    read = read_bytes(declarations(model), model.config, tokens, devices, share)
    weights, experts = float(sum(read.values())), share * moe.num_experts / devices if moe else 0.0
    state = rows * state_bytes(model, tokens // rows, devices)
    return Traffic(weights, rows * kv_bytes(model, context, devices), state, experts)


def kv_bytes(model: CausalLM, context: float, devices: int = 1) -> float:
    """Bytes of KV that a row of so many tokens reads: see `row_bytes`."""
    layers = zip(model.config.layers, model.cache_specs(), strict=True)
    return sum(row_bytes(layer.attention, spec, context, devices) for layer, spec in layers)


def row_bytes(attention: AttentionSpec | None, spec: CacheSpec, context: float, devices: int = 1) -> float:
    """Bytes of one layer's KV that a row of so many tokens reads.

    Of a layer with a sliding window those of the window; of one that chooses its keys all index keys, and the latents of as
    many as it chooses.
    """
    longest = getattr(attention, "window", None) or getattr(attention, "count", None) or context
    mesh = {TENSOR_AXIS: devices}

    def tokens(array: CacheArray) -> float:
        return context if array.name == INDEX_KEYS else min(context, longest)

    return sum(tokens(array) * array.device_bytes(mesh) for array in spec.arrays if array.per == "token")


def state_bytes(model: CausalLM, window: int, devices: int = 1) -> float:
    """Bytes of the states of one row, with windows of so many tokens, that a step reads and writes."""
    return 2.0 * slot_bytes(model.cache_specs(), window, {TENSOR_AXIS: devices})


def routed_experts(config: ModelConfig) -> MoESpec | None:
    """The routed experts of a model's layers; None in a dense model."""
    mlps = (layer.mlp for layer in config.layers)
    routed = (mlp.routed if isinstance(mlp, GatedSharedSpec) else mlp for mlp in mlps)
    return next((mlp for mlp in routed if isinstance(mlp, MoESpec)), None)


@functools.lru_cache(maxsize=256)
def touched_share(moe: MoESpec, tokens: int, devices: int = 1) -> float:
    """Expected part of its routed experts that a device touches in a step, of the device that touches most.

    Tokens choose k of E independently, and every choice is as likely as another. One device touches 1 - (1 - k/E)^tokens of
    the experts; over several the busiest one's part is a mean of draws, in which tokens choose among groups as the router
    does.
    """
    if devices == 1:
        return 1 - (1 - moe.top_k / moe.num_experts) ** tokens
    rng, E, most = np.random.default_rng(0), moe.num_experts, []
    for _ in range(-(-_DRAWS // tokens)):
        score_TGe = rng.random((tokens, moe.num_groups, E // moe.num_groups), np.float32)
        if moe.top_groups < moe.num_groups:
            best = 2 if moe.scoring == "sigmoid" else 1
            group_TG = np.sort(score_TGe)[:, :, -best:].sum(axis=2)
            score_TGe[group_TG < np.sort(group_TG)[:, [-moe.top_groups]]] = -1
        chosen = np.argpartition(score_TGe.reshape(tokens, E), E - moe.top_k)[:, E - moe.top_k :]
        touched_E = np.zeros(E, bool)
        touched_E[chosen] = True
        most.append(touched_E.reshape(devices, -1).sum(axis=1).max())
    return float(np.mean(most)) * devices / E


def weight_bytes(module: Any, config: ModelConfig, tokens: int, devices: int = 1) -> float:
    """Bytes of a module's weights that each device reads in a pass over `tokens` tokens."""
    return float(sum(read_bytes(declarations(module), config, tokens, devices).values()))


def read_bytes(
    declared: Declarations, config: ModelConfig, tokens: int, devices: int = 1, share: float | None = None
) -> dict[tuple[str | int, ...], float]:
    """The same of the weights that a module declares, by their paths.

    Each weight counts once; of the embedding only the tokens' rows count, of the routed experts those that are touched.

    Args:
        share: touched part of the routed experts (default: `touched_share`).
    """
    moe, found = routed_experts(config), {}
    for path, variable in declared.items():
        size = _nbytes(variable, devices)
        if moe and "experts" in variable.get_metadata()["axes"]:
            size *= touched_share(moe, tokens, devices) if share is None else share
        if path[0] == "embed" and not config.tie_embeddings:
            size *= tokens / config.vocab_size
        found[path] = size
    return found


def cycle_bytes(
    target: CausalLM, draft: Draft, rows: int, k: int, context: float, draft_row_bytes: float, devices: int = 1
) -> dict[str, float]:
    """The least bytes that one cycle has to move: the target's pass, and the draft's k passes (skip on).

    Each pass needs the result of the last one, so weights that no cache holds are read k times; `fc` once.
    """
    verify = traffic(target, rows, context, tokens=rows * (k + 1), devices=devices).total
    declared = declarations(cast(nnx.Module, draft))
    once = float(sum(_nbytes(variable, devices) for path, variable in declared.items() if path[0] == "fc"))
    each = weight_bytes(draft, target.config, rows, devices) - once + rows * draft_row_bytes
    if not any(path[0] == "head" for path in declared):
        each += _nbytes(target.head.weight, devices)
    return {"target": verify, "draft": once + k * each}


def elements(variable: Any, devices: int) -> float:
    """Of a declared parameter, on each device."""
    split = any(axis in AXIS_RULES for axis in variable.get_metadata()["axes"])
    return float(np.prod(variable.get_value().shape)) / (devices if split else 1)


def _nbytes(variable: Any, devices: int) -> float:
    return elements(variable, devices) * variable.get_value().dtype.itemsize


def token_bytes(specs: Sequence[CacheSpec], devices: int = 1) -> float:
    """Bytes of a token's KV in these caches, on each device."""
    return page_bytes(specs, PAGE_SIZE, {TENSOR_AXIS: devices}) / PAGE_SIZE


class Floor:
    """The least bytes of a step and of a cycle of one target and draft on each device, and the time of moving them.

    Attributes:
        kv_token: bytes of a token's KV, of all the target's layers.
    """

    def __init__(self, weights: Weights, bandwidth: float, devices: int = 1):
        self._weights, self._bandwidth, self._devices = weights, bandwidth, devices
        self.kv_token = token_bytes(weights.model.cache_specs(), devices)

    def of_step(self, rows: int, context: float, touched: float | None = None) -> Traffic:
        return traffic(self._weights.model, rows, context, devices=self._devices, touched=touched)

    def of_cycle(self, rows: int, k: int, context: float) -> dict[str, float]:
        assert self._weights.draft is not None
        target, draft = self._weights.model, self._weights.draft[0]
        # A NextN layer attends as the config says; other drafts read all their keys.
        attention = target.config.nextn_layers[0].attention if isinstance(draft, NextN) else None
        row = row_bytes(attention, draft.cache_spec, context, self._devices)
        return cycle_bytes(target, draft, rows, k, context, row, self._devices)

    def seconds(self, size: float) -> float:
        return size / self._bandwidth
