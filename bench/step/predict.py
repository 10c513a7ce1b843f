"""What a model takes and how long its decode steps should take on several H200s: from declarations, without a device.

Of the constants those of one GPU and of two are measured; each says where.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from bench.harness.device_bytes import declared_bytes
from bench.step.floor import Declarations, elements, kv_bytes, read_bytes, routed_experts
from jaxspec.config import PAGE_SIZE, EngineConfig, resolve
from jaxspec.engine.memory import MARGIN_BYTES
from jaxspec.engine.state import state_shapes
from jaxspec.models.cache import page_bytes
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mla import MLASpec
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, declarations, with_shardings

# Of an H200: memory (nvidia-smi), and of docs/performance.md the rates of reading and of bf16 matmuls.
MEMORY = 143771 << 20
READ, MATMUL = 4.41e12, 680e12
# The part of READ that kernels reach, by the weights' scheme: bf16 experts measured (0.88 to 0.93), INT4 too (0.54 to 0.58,
# bench/results/kernel_moe_int4_h200.json); FP8 is what docs/kernels/moe.md predicts.
READ_SHARE = {None: 0.9, "fp8_block": 0.85, "int4_g32": 0.57}
# The part of MATMUL that matmuls of many tokens and attention over many heads reach (docs/performance.md).
MATMUL_SHARE, ATTENTION_SHARE = 0.6, 0.79
# A sum over devices as XLA makes it now: 14 to 21 us up to 512 KB over two H200s; bytes a second of a link, one way.
SUM_SECONDS, LINK = 18e-6, 392e9
# What a step takes beyond its reads, by its rows: launches and small kernels of the 27 layers of the Moonlight shape
# (bench/results/step_vllm_h200.json). The last is estimated.
REST_MS, REST_LAYERS = {1: 0.88, 32: 0.94, 128: 1.78, 1024: 2.5}, 27
# What temporaries of steps of 8192 tokens may take, besides `MARGIN_BYTES`: estimated; an engine measures it when it starts.
TEMPORARIES = 4e9
UTILIZATION = EngineConfig().gpu_memory_utilization
DRAFTED = 3


@dataclass(frozen=True)
class Memory:
    """Bytes on each device.

    Attributes:
        weights: of the model, and of its MTP layer.
        state: of `max_num_seqs` requests, without KV. kv_token: of one token's KV.
    """

    weights: int
    state: int
    kv_token: float

    @property
    def room(self) -> float:
        """What is left for KV; negative where the weights do not fit."""
        return UTILIZATION * MEMORY - self.weights - self.state - TEMPORARIES - MARGIN_BYTES

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV that fit, in whole pages; the pages of every device hold all tokens."""
        return max(0, math.floor(self.room / (self.kv_token * PAGE_SIZE))) * PAGE_SIZE


def memory(model: CausalLM, nextn: NextN | None, *, devices: int, max_num_seqs: int) -> Memory:
    """Of a model and of the MTP layer that drafts for it, if any.

    Raises:
        ConfigError: so many devices do not divide the model.
    """
    mesh: Any = AbstractMesh((devices,), (TENSOR_AXIS,))
    modules: list[Any] = [model, *([nextn] if nextn else [])]
    specs = (*model.cache_specs(), *([nextn.cache_spec] if nextn else []))
    page = page_bytes(specs, PAGE_SIZE, mesh.shape)
    settings = resolve(
        EngineConfig(
            max_model_len=PAGE_SIZE,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=8192,
            num_gpu_blocks_override=2,
            num_speculative_tokens=DRAFTED if nextn else 0,
        ),
        model_max_position=model.config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=True,
    )
    state = declared_bytes(jax.tree.leaves(state_shapes(model, settings, mesh, draft=nextn)))
    weights = sum(declared_bytes(with_shardings(module, mesh).values()) for module in modules)
    return Memory(weights, state - settings.num_pages * page, page / PAGE_SIZE)


def layers_that_fit(two: Memory, three: Memory, *, most: int, tokens: int) -> int:
    """How many layers leave room for so many tokens of KV; 0 if not even two do.

    Args:
        two, three: of the model with so many layers, the first of them dense: all others are alike.
    """

    def room(layers: int) -> float:
        more = layers - 2
        kv_token = two.kv_token + more * (three.kv_token - two.kv_token)
        return two.room - more * (three.weights - two.weights) - tokens * kv_token

    return max((n for n in range(2, most + 1) if room(n) >= 0), default=0)


@dataclass(frozen=True)
class Step:
    """Seconds of a decode step: of its matrix products, of attention, of what the devices tell each other, and the rest."""

    products: float
    attention: float
    sums: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.products + self.attention + self.sums + self.rest


def steps(model: CausalLM, rows: Iterable[int], context: float, devices: int) -> dict[int, Step]:
    """Of plain decode steps of so many requests, on the device that has most to do.

    A product takes as long as reading its weights, or as its arithmetic if that is longer; attention likewise. Two sums of
    [rows, hidden] a layer, one for the embedding, and the logits are gathered: see `sum_seconds`.
    """
    declared = declarations(model)
    return {n: _step(model, declared, n, context, devices) for n in rows}


def _step(model: CausalLM, declared: Declarations, rows: int, context: float, devices: int) -> Step:
    config, moe = model.config, routed_experts(model.config)
    products = 0.0
    for path, size in read_bytes(declared, config, rows, devices).items():
        metadata = declared[path].get_metadata()
        scheme = metadata.get("scheme")
        multiplies = path[0] != "embed" and metadata["init"] in ("normal", "codes")
        flops = 2 * rows * elements(declared[path], devices) if multiplies else 0.0
        flops *= scheme.packed if scheme else 1
        if moe and "experts" in metadata["axes"]:
            flops *= moe.top_k / moe.num_experts
        share = READ_SHARE[scheme.name if scheme else None]
        products += max(size / (share * READ), flops / (MATMUL_SHARE * MATMUL))
    attention = max(
        rows * kv_bytes(model, context, devices) / (READ_SHARE[None] * READ),
        rows * context * _attention_flops(model) / devices / (ATTENTION_SHARE * MATMUL),
    )
    itemsize = model.embed.weight.get_value().dtype.itemsize
    sums = (2 * config.num_layers + 1) * sum_seconds(rows * config.hidden_size * itemsize, devices)
    gather = sum_seconds(rows * config.vocab_size * itemsize / 2, devices)  # half a sum: nothing is scattered
    return Step(products, attention, sums + gather, 1e-3 * rest_ms(rows) * config.num_layers / REST_LAYERS)


def sum_seconds(size: float, devices: int) -> float:
    """Of one sum of `size` bytes over devices: a start, and what a ring sends over each link."""
    return SUM_SECONDS + 2 * (devices - 1) / devices * size / LINK if devices > 1 else 0.0


def rest_ms(rows: int) -> float:
    """`REST_MS` of any number of rows, straight lines between those over the rows' logarithm."""
    return float(np.interp(math.log2(rows), [math.log2(n) for n in REST_MS], list(REST_MS.values())))


def _attention_flops(model: CausalLM) -> float:
    """Of one query token and one key, over all layers: products with keys and with values, of absorbed MLA's heads.

    Of grouped-query heads 0: reading their keys takes longer.
    """
    specs = [layer.attention for layer in model.config.layers if isinstance(layer.attention, MLASpec)]
    return sum(2 * mla.num_heads * (mla.cache_dim + mla.kv_lora_rank) for mla in specs)
