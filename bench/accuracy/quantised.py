"""`bench quantised`: what quantising costs the embedded demo model.

The model is converted with each scheme of `jaxspec convert --quantization`, and served in float32, so that what differs is
the weights; in FP8 also with activations in FP8, which is the arithmetic of Hopper's kernels (`backend.W8A8`); and
unquantised with FP8 latents, where what differs is the cache. Held-out files (as in bench/accuracy/parity.py) are scored
as prompts: nats a token, and how often the likeliest next token is that of the unquantised model. Beginnings of them are
continued greedily with the quantised NextN layer's drafts; tokens a cycle count the bonus token.
"""

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from bench.harness import record


class Case(NamedTuple):
    """What is measured: the scheme of the weights, --kv-cache-dtype and --moe-backend."""

    weights: Literal["bf16", "fp8", "int4"]
    cache: Literal["auto", "fp8"] = "auto"
    moe: Literal["auto", "reference_w8a8"] = "auto"


# The first is what the others are held against.
CASES = {
    "bf16": Case("bf16"),
    "fp8": Case("fp8"),
    "fp8, activations too": Case("fp8", moe="reference_w8a8"),
    "int4": Case("int4"),
    "fp8 cache": Case("bf16", cache="fp8"),
}
# Most that each may cost: nats a token, and the part of the tokens a cycle.
_FP8 = {"nats": 0.01, "tokens_a_cycle": 0.03}
BOUNDS = {"fp8": _FP8, "fp8, activations too": _FP8, "int4": {"nats": 0.05}, "fp8 cache": {"nats": 0.05}}
LENGTH, PROMPT, ROWS = 128, 48, 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--windows", type=int, default=48, metavar="N", help=f"scored, of {LENGTH} tokens (default: 48)"
    )
    parser.add_argument("--prompts", type=int, default=32, metavar="N", help="continued (default: 32)")
    parser.add_argument("--tokens", type=int, default=64, metavar="N", help="generated for each prompt (default: 64)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="drafted tokens (default: 3)")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from bench.accuracy.parity import choose_windows, held_out_files
    from convert.convert import convert_checkpoint
    from jaxspec.loading.resolve import resolve_model
    from jaxspec.text import Tokenizer

    source = resolve_model("demo")
    encode = Tokenizer.from_folder(source).encode
    windows = choose_windows(held_out_files(), encode, max(arguments.windows, arguments.prompts), LENGTH)
    rows: list[dict[str, Any]] = []
    chosen: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in CASES.items():
            converted = Path(folder) / case.weights
            if not converted.exists():
                convert_checkpoint(source, converted, quantization=case.weights)
            figures, chosen[name] = measure(converted, windows, arguments, case)
            agreement = round(float((chosen[name] == chosen["bf16"]).mean()), 4)
            rows.append({"scheme": name, **figures, "agreement": agreement})
            print(f"{name}: measured", flush=True)
    cells = [
        [r["scheme"], f"{r['nats']:.4f}", f"{r['agreement']:.2%}", f"{r['tokens_a_cycle']:.3f}", str(r["cycles"])]
        for r in rows
    ]
    print(record.table(["scheme", "nats a token", "agreement", "tokens a cycle", "cycles"], cells))
    result = {
        "dtype": "float32", "k": arguments.steps, "prompts": min(arguments.prompts, len(windows)),
        "new_tokens": arguments.tokens, "scored_tokens": len(chosen["bf16"]), "schemes": rows, "gates": gates(rows),
    }  # fmt: skip
    record.write("quantised_demo", result, arguments)
    for gate in result["gates"]:
        if not gate["met"]:
            print(f"NOT met: {gate['gate']} ({gate['lost']}; bound {gate['bound']})")
    return 0


def gates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What each scheme loses against the first row, beside its bound."""
    base, *others = rows
    out: list[dict[str, Any]] = []
    for row in others:
        lost = {
            "nats": row["nats"] - base["nats"], "tokens_a_cycle": 1 - row["tokens_a_cycle"] / base["tokens_a_cycle"],
        }  # fmt: skip
        for what, bound in BOUNDS[row["scheme"]].items():
            met = lost[what] <= bound
            out.append({"gate": f"{what} of {row['scheme']}", "lost": round(lost[what], 4), "bound": bound, "met": met})
    return out


def measure(
    folder: Path, windows: Sequence[Sequence[int]], arguments: argparse.Namespace, case: Case
) -> tuple[dict[str, Any], np.ndarray]:
    """Figures of one model, and the likeliest token at each scored position."""
    from jaxspec.config import EngineConfig
    from jaxspec.engine.request import Request
    from jaxspec.loading.engine import build_engine
    from jaxspec.sampling.params import SamplingParams

    config = EngineConfig(
        dtype="float32", max_model_len=256, max_num_seqs=ROWS, max_num_batched_tokens=128,
        num_speculative_tokens=arguments.steps, adaptive_speculation=False, enable_prefix_caching=False,
        kv_cache_dtype=case.cache, moe_backend=case.moe,
    )  # fmt: skip
    engine = build_engine(folder, config)[0]
    engine.warm_up()
    scores: list[Any] = []

    def finish(requests: Sequence[Request]) -> None:
        for request in requests:
            engine.add(request)
        while engine.has_work:
            for output in engine.step():
                if output.error:
                    raise RuntimeError(output.error)
                scores.extend(output.prompt_logprobs or ())

    score = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    for i, window in enumerate(windows[: arguments.windows]):  # one by one: scores in the order of the windows
        finish([Request(f"score.{i}", list(window), score)])
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=arguments.tokens)
    prompts = windows[: arguments.prompts]
    finish([Request(f"text.{i}", list(window[:PROMPT]), greedy) for i, window in enumerate(prompts)])
    acceptance = engine.stats().acceptance  # of the texts: a scored prompt has no window
    assert acceptance is not None
    assert acceptance.mean_length is not None
    best = np.array([s.alternatives[0][0] for s in scores])
    return {
        "nats": round(-float(np.mean([s.logprob for s in scores])), 4),
        "tokens_a_cycle": round(acceptance.mean_length, 4), "cycles": acceptance.num_steps,
    }, best  # fmt: skip
