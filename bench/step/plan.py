"""`bench plan`: what models too big for one GPU take on several H200s, and how long their steps should take.

Computed from the declared parameters, caches and shardings, as an engine has them: nothing is allocated and no device is
used. Formulas and constants are in `bench.step.predict`. Without --model it prints the tables of docs/large-models.md.
"""

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from bench.harness import record
from bench.harness.arguments import numbers
from bench.harness.models import SHAPES, declare, random_config
from bench.step import predict
from bench.step.predict import Memory, Step
from jaxspec.errors import ConfigError
from jaxspec.loading.quantise import Quantization
from jaxspec.models.cache import KVCacheDtype
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN

DEVICES, ROWS, CONTEXT = (1, 2, 4, 8), (1, 32, 128, 1024), 1024
# A model of which only some layers fit has as many as leave room for this many requests.
REQUESTS_OF_SLICES = 128
MOST_CYCLE_ROWS = max(predict.CYCLE_REST_MS)


@dataclass(frozen=True)
class Case:
    """A model of `SHAPES` and how it is stored."""

    model: str
    quantization: Quantization
    cache: KVCacheDtype = "auto"
    layers: int | None = None

    @property
    def words(self) -> str:
        layers = f", {self.layers} layers" if self.layers else ""
        cache = ", FP8 latents" if self.cache == "fp8" else ""
        return f"{self.model}, {self.quantization}{cache}{layers}"

    def declare(self, layers: int | None = None) -> tuple[CausalLM, NextN | None]:
        hf = random_config(self.model, layers or self.layers)
        return declare(hf, np.dtype(jnp.bfloat16), quantization=self.quantization, kv_cache_dtype=self.cache)


# DeepSeek-V3 as published, with INT4 experts, and as published with FP8 latents; Kimi-K2 and K2.5 as published, K2.5 with FP8
# latents.
CASES = (
    Case("deepseek-v3", "fp8"),
    Case("deepseek-v3", "fp8", "fp8"),
    Case("deepseek-v3", "int4"),
    Case("kimi-k2", "fp8"),
    Case("kimi-k2", "int4"),
    Case("kimi-k2", "int4", "fp8"),
)


@dataclass(frozen=True)
class Figures:
    """Of a case on so many devices.

    Attributes:
        layers: of how many there is room for, with KV of `REQUESTS_OF_SLICES` requests.
        steps: by rows. cycles: likewise, where there is an MTP layer and the rows are not more than were ever measured.
    """

    case: Case
    devices: int
    memory: Memory
    layers: int
    steps: dict[int, Step]
    cycles: dict[int, Step]


def figures(case: Case, devices: Iterable[int], rows: Sequence[int], context: int) -> list[Figures]:
    """Raises:

    ConfigError: one of these numbers of devices does not divide the model, or its cache has no such type.
    """
    whole, two, three = (case.declare(layers) for layers in (None, 2, 3))
    if case.cache == "fp8" and not all(spec.in_fp8 for spec in whole[0].cache_specs()):
        raise ConfigError(f"--kv-cache-dtype fp8 is for latents, and {case.model} has grouped-query attention")
    out = []
    for n in devices:
        of_all, of_two, of_three = (
            predict.memory(*each, devices=n, max_num_seqs=rows[-1]) for each in (whole, two, three)
        )
        layers = whole[0].config.num_layers
        if of_all.kv_tokens < REQUESTS_OF_SLICES * context:
            layers = predict.layers_that_fit(of_two, of_three, most=layers, tokens=REQUESTS_OF_SLICES * context)
        model, nextn = whole
        cycles = predict.cycles(model, nextn, [r for r in rows if r <= MOST_CYCLE_ROWS], context, n) if nextn else {}
        out.append(Figures(case, n, of_all, layers, predict.steps(model, rows, context, n), cycles))
    return out


def memory_table(found: Iterable[Figures]) -> str:
    """In Markdown."""
    header = ["model, scheme", "H200s", "weights, GB", "state, GB", "KV a token, bytes", "KV tokens", "layers that fit"]
    lines = [
        [
            f.case.words, str(f.devices), f"{f.memory.weights / 1e9:.1f}", f"{f.memory.state / 1e9:.2f}",
            f"{f.memory.kv_token:.0f}", f"{f.memory.kv_tokens:,}" if f.memory.kv_tokens else "none", str(f.layers),
        ]
        for f in found
    ]  # fmt: skip
    return _markdown(header, lines)


def step_table(found: Sequence[Figures], context: int) -> str:
    """Milliseconds of steps and then of cycles, in Markdown; in brackets where weights or KV do not fit."""

    def cell(f: Figures, step: Step | None, rows: int) -> str:
        text = f"{1e3 * step.seconds:.1f}" if step else ""
        return text if rows * context <= f.memory.kv_tokens or not step else f"({text})"

    rows = list(found[0].steps)
    cycle_rows = sorted({n for f in found for n in f.cycles})
    header = [
        "model, scheme",
        "H200s",
        *(f"{n} row{'s' * (n > 1)}" for n in rows),
        *(f"cycle, {n}" for n in cycle_rows),
    ]
    lines = [
        [
            f.case.words, str(f.devices), *(cell(f, f.steps[n], n) for n in rows),
            *(cell(f, f.cycles.get(n), n) for n in cycle_rows),
        ]
        for f in found
    ]  # fmt: skip
    return _markdown(header, lines)


def parts_table(found: Iterable[Figures]) -> str:
    """Milliseconds of a plain step's parts, in Markdown."""
    header = ["model, scheme", "H200s", "rows", "products", "attention", "sums", "rest", "step"]
    lines = [
        [
            f.case.words, str(f.devices), str(rows),
            *(f"{1e3 * t:.1f}" for t in (s.products, s.attention, s.sums, s.rest, s.seconds)),
        ]
        for f in found
        for rows, s in f.steps.items()
    ]  # fmt: skip
    return _markdown(header, lines)


def _markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rule = ["---"] * len(header)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, rule, *lines))


def tables(cases: Iterable[Case], devices: Sequence[int], rows: Sequence[int], context: int) -> tuple[str, ...]:
    """Memory, steps, and the parts of steps on the most devices: as documents have them."""
    found = [f for case in cases for f in figures(case, devices, rows, context)]
    return (
        memory_table(found),
        step_table(found, context),
        parts_table(f for f in found if f.devices == devices[-1] and f.memory.kv_tokens),
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", choices=list(SHAPES), help="one of the shapes (default: the cases of the documentation)"
    )
    parser.add_argument("--quantization", choices=["bf16", "fp8", "int4"], default="bf16")
    parser.add_argument("--kv-cache-dtype", choices=["auto", "bf16", "fp8"], default="auto")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink the model to N layers")
    parser.add_argument(
        "--tensor-parallel-size", "-tp", type=numbers, default=list(DEVICES), metavar="N,N,...", help="numbers of GPUs"
    )
    parser.add_argument("--rows", type=numbers, default=list(ROWS), metavar="N,N,...", help="decode rows")
    parser.add_argument(
        "--context", type=int, default=CONTEXT, metavar="TOKENS", help=f"of each row (default: {CONTEXT})"
    )
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    cases: Sequence[Case] = CASES
    if arguments.model:
        cases = (Case(arguments.model, arguments.quantization, arguments.kv_cache_dtype, arguments.layers),)
    devices, rows, context = arguments.tensor_parallel_size, arguments.rows, arguments.context
    found = [f for case in cases for f in figures(case, devices, rows, context)]
    print(memory_table(found), step_table(found, context), parts_table(found), sep="\n\n")
    result: dict[str, Any] = {"benchmark": "plan", "context": context, "rows": [_recorded(f) for f in found]}
    record.write("plan", result, arguments, with_device=False)
    return 0


def _recorded(f: Figures) -> dict[str, Any]:
    return {
        "case": f.case.words,
        "tensor_parallel_size": f.devices,
        "weight_bytes": f.memory.weights,
        "state_bytes": f.memory.state,
        "kv_bytes_per_token": f.memory.kv_token,
        "kv_tokens": f.memory.kv_tokens,
        "layers_that_fit": f.layers,
        "step_ms": {str(rows): round(1e3 * step.seconds, 3) for rows, step in f.steps.items()},
        "cycle_ms": {str(rows): round(1e3 * step.seconds, 3) for rows, step in f.cycles.items()},
    }
