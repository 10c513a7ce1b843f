"""What a model takes and how long its decode steps should take on several H200s: from declarations, without a device.

Of the constants those of one GPU and of two are measured; each says where.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh

from bench.harness.device_bytes import declared_bytes
from bench.step.floor import Declarations, elements, kv_bytes, read_bytes, routed_experts, state_bytes, token_bytes
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
# bench/results/kernel_moe_int4_h200.json); FP8 blocks are what docs/kernels/moe.md predicts; the others are taken to be like
# what has as many bits.
READ_SHARE = {None: 0.9, "fp8_block": 0.85, "fp8_channel": 0.85, "int4_g32": 0.57, "nvfp4": 0.57, "mxfp4": 0.57}
# The part of MATMUL that matmuls of many tokens and attention over many heads reach (docs/performance.md).
MATMUL_SHARE, ATTENTION_SHARE = 0.6, 0.79
# A sum through mailboxes, over two H200s (`bench comm`): what it takes whatever its size, and bytes a second that a device
# writes, of which every other word is the number of a call. Up to MAILED bytes.
MAIL_SECONDS, MAIL_LINK, MAILED = 4.1e-6, 322e9, 2 << 20
# Larger ones as XLA makes them: 14 to 21 us up to 512 KB; bytes a second of a link, one way.
SUM_SECONDS, LINK = 18e-6, 392e9
# What samplers exchange in a pass: statistics of logits, what each device would draw, the chosen tokens' logits, and of windows
# the drafts' probabilities; a draft's statistics and draws at once. Bytes a token of the largest of these.
EXCHANGES, DRAFT_EXCHANGES, EXCHANGED_BYTES = 3, 1, 28
# What a step takes beyond its reads, by its rows: launches and small kernels of the 27 layers of the Moonlight shape
# (bench/results/step_vllm_h200.json). The last is estimated.
REST_MS, REST_LAYERS = {1: 0.88, 32: 0.94, 128: 1.78, 1024: 2.5}, 27
# The same of cycles of `DRAFTED` tokens.
CYCLE_REST_MS = {1: 1.08, 4: 1.09, 16: 1.28, 32: 1.87, 128: 2.65}
# Of activations: bfloat16.
ITEMSIZE = 2
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
            adaptive_speculation=False,
        ),
        model_max_position=model.config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=True,
    )
    weights = sum(declared_bytes(with_shardings(module, mesh).values()) for module in modules)
    state = declared_bytes(jax.tree.leaves(state_shapes(model, settings, mesh, draft=nextn)))
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
    [rows, hidden] a layer, one for the embedding, and what samplers exchange: see `sum_seconds`.
    """
    target, layers = _Pass(model, declarations(model), context, devices), model.config.num_layers
    return {n: Step(*target.seconds(n), 1e-3 * _between(REST_MS, n) * layers / REST_LAYERS) for n in rows}


def cycles(model: CausalLM, nextn: NextN, rows: Iterable[int], context: float, devices: int) -> dict[int, Step]:
    """Of cycles of `DRAFTED` tokens: the target's pass over windows, and as many passes of the MTP layer with its head."""
    k, layers = DRAFTED, model.config.num_layers
    target = _Pass(model, declarations(model), context, devices)
    head = {path: variable for path, variable in target.declared.items() if path[0] == "head"}
    draft = _Pass(nextn, declarations(nextn) | head, context, devices)
    out = {}
    for n in rows:
        verify, each = target.seconds(n, window=k + 1), draft.seconds(n)
        products, attention, sums = (a + k * b for a, b in zip(verify, each, strict=True))
        rest = 1e-3 * _between(CYCLE_REST_MS, n) * (layers + k) / (REST_LAYERS + k)
        out[n] = Step(products, attention, sums, rest)
    return out


class _Pass:
    """A pass of a model or of an MTP layer over the windows of requests.

    Attributes:
        declared: the parameters that it reads.
    """

    def __init__(self, module: CausalLM | NextN, declared: Declarations, context: float, devices: int):
        self.declared, self._context, self._devices = declared, context, devices
        config = self._config = module.config
        layers = config.nextn_layers[:1] if isinstance(module, NextN) else config.layers
        specs = [module.cache_spec] if isinstance(module, NextN) else module.cache_specs()
        self._num_layers, self._drafts = len(layers), isinstance(module, NextN)
        self._row_bytes = (
            kv_bytes(module, context, devices) + state_bytes(module, 1, devices)
            if isinstance(module, CausalLM)
            else context * token_bytes(specs, devices)
        )
        # Of one query token and one key: products with keys and with values, of absorbed MLA's heads. Of grouped-query heads
        # 0: reading their keys takes longer.
        mla = [layer.attention for layer in layers if isinstance(layer.attention, MLASpec)]
        self._key_flops = sum(2 * each.num_heads * (each.cache_dim + each.kv_lora_rank) for each in mla) / devices

    def seconds(self, rows: int, window: int = 1) -> tuple[float, float, float]:
        """Of products, attention and sums, over `window` tokens of each row."""
        config, moe, devices, tokens = self._config, routed_experts(self._config), self._devices, rows * window
        products = 0.0
        for path, size in read_bytes(self.declared, config, tokens, devices).items():
            metadata = self.declared[path].get_metadata()
            scheme = metadata.get("scheme")
            multiplies = path[0] != "embed" and metadata["init"] in ("normal", "codes")
            flops = 2 * tokens * elements(self.declared[path], devices) if multiplies else 0.0
            flops *= scheme.packed if scheme else 1
            if moe and "experts" in metadata["axes"]:
                flops *= moe.top_k / moe.num_experts
            share = READ_SHARE[scheme.name if scheme else None]
            products += max(size / (share * READ), flops / (MATMUL_SHARE * MATMUL))
        attention = max(
            rows * self._row_bytes / (READ_SHARE[None] * READ),
            tokens * self._context * self._key_flops / (ATTENTION_SHARE * MATMUL),
        )
        sums = (2 * self._num_layers + 1) * sum_seconds(tokens * config.hidden_size * ITEMSIZE, devices)
        exchanges = DRAFT_EXCHANGES if self._drafts else EXCHANGES + (window > 1)
        return products, attention, sums + exchanges * sum_seconds(tokens * EXCHANGED_BYTES, devices)


def sum_seconds(size: float, devices: int) -> float:
    """Of one sum of `size` bytes over devices."""
    if devices == 1:
        return 0.0
    others = devices - 1
    if size > MAILED:
        # A ring, in which each link carries two parts of all but one device.
        return SUM_SECONDS + 2 * others / devices * size / LINK
    # At once, or in two phases.
    return min(
        MAIL_SECONDS + 2 * others * size / MAIL_LINK, 2 * (MAIL_SECONDS + 2 * others / devices * size / MAIL_LINK)
    )


def _between(measured: Mapping[int, float], rows: int) -> float:
    """Of any number of rows, straight lines between those over the rows' logarithm."""
    return float(np.interp(math.log2(rows), [math.log2(n) for n in measured], list(measured.values())))
