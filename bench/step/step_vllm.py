"""`bench step_vllm`: vLLM's step, cycle and prompt rates on a random checkpoint, to compare with in `bench step --peer`.

    python -m bench step_vllm make FOLDER       writes the checkpoint
    python -m bench step_vllm vllm FOLDER       times vLLM over it: vllm_plain.json and vllm_mtp.json
    python -m bench step --model FOLDER --peer FOLDER/vllm_plain.json FOLDER/vllm_mtp.json

The stages may run in different environments. The checkpoint has Hugging Face layout and, where the shape has one, a NextN
(MTP) layer, with its copies of embedding and head if checkpoints of the family have such; without one only vllm_plain.json
is made. Projections and experts are N(0, 0.02), embeddings N(0, 1), norms 1 (written as 0 where centred), biases 0: so
routing spreads over all experts, where constant weights would send every token to the same ones. With `--quantization fp8`
or `int4` the same weights are quantised as DeepSeek and Kimi publish theirs (`bench.harness.published`), so that vLLM and
jaxspec read one folder. A made-up tokenizer of as many ids lets servers take and give text.

The figures of a row count come from greedy requests, each time with the prompts that `bench step` gives its own, because
texts differ in how many experts they reach: the time for one token each, and the time for N + 1 tokens each. Their
difference over N is the time per output token; the prompts' tokens over the first time are the prompt rate. Medians of the
repeats. Prefix caching is off, CUDA graphs are on, and everything else is vLLM's default.

With MTP a cycle yields one token and the drafts that were accepted, so that the time per token is at most the time of a
cycle: with random weights hardly any draft is accepted (`bench step` says how many).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record
from bench.harness.arguments import numbers
from bench.harness.shapes import SHAPES

ROWS = (1, 4, 16, 32, 64, 128)
CONTEXT = 1024
# Drafted tokens of each method, and the output tokens after the first one that are timed: `bench step` times the same
# number of steps, so that contexts grow alike.
DRAFTED = {"plain": 0, "mtp": 3}
OUTPUT_TOKENS = {"plain": 128, "mtp": 64}
WARM_UP_TOKENS = 8

# Generates exactly so many tokens for each prompt.
Generate = Callable[[Sequence[Sequence[int]], int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=["make", "vllm"])
    parser.add_argument("folder", type=Path, help="of the checkpoint")
    parser.add_argument("--model", choices=list(SHAPES), default="moonlight", help="for make: the shape")
    parser.add_argument("--layers", type=int, metavar="N", help="for make: shrink the model to N layers")
    parser.add_argument(
        "--quantization",
        choices=["bf16", "fp8", "int4"],
        default="bf16",
        help="for make: FP8 as DeepSeek publishes it, or INT4 experts as Kimi does (default: bf16)",
    )
    parser.add_argument("--no-mtp", action="store_true", help="for make: without the MTP layer")
    parser.add_argument("--only", choices=list(DRAFTED), help="for vllm: one of the two (default: both)")
    parser.add_argument(
        "--rows", type=numbers, default=list(ROWS), metavar="N,N,...", help="for vllm: requests at once"
    )
    parser.add_argument("--context", type=int, default=CONTEXT, metavar="TOKENS", help="for vllm: prompt length")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="for vllm: of each time (default: 3)")
    parser.add_argument("--gpu-memory-utilization", type=float, default=0.85, metavar="PART", help="for vllm")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", help="for vllm: where to write JSON (default: beside the checkpoint)"
    )
    parser.add_argument("--commit", metavar="ID", help="commit of this code, where there is no git")


def random_prompts(rows: int, context: int, vocab_size: int) -> list[list[int]]:
    """Of `context` tokens each; the same for every engine, and the first ones of more rows."""
    rng = np.random.default_rng(0)
    return [rng.integers(3, vocab_size, context).tolist() for _ in range(rows)]


def measure(
    generate: Generate,
    rows: int,
    *,
    context: int,
    steps: int,
    repeats: int,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Figures of `rows` requests of `context` tokens, and `steps` output tokens after the first one.

    Returns:
        Seconds of the first token and of all of them, medians; "step_ms", the median of the runs' time per output token,
        "of_each_run_ms" these; and prompt tokens a second.
    """
    prompts = random_prompts(rows, context, vocab_size)

    def timed(tokens: int) -> float:
        started = clock()
        generate(prompts, tokens)
        return clock() - started

    timed(1)
    timed(WARM_UP_TOKENS)
    first, whole = [], []
    for _ in range(repeats):
        first.append(timed(1))
        whole.append(timed(steps + 1))
    each = [1e3 * (b - a) / steps for a, b in zip(first, whole, strict=True)]
    return {
        "rows": rows,
        "first_token_s": round(statistics.median(first), 5),
        "all_tokens_s": round(statistics.median(whole), 5),
        "step_ms": round(statistics.median(each), 4),
        "of_each_run_ms": [round(ms, 4) for ms in each],
        "prefill_tokens_per_s": round(rows * context / statistics.median(first)),
    }


def run_vllm(arguments: argparse.Namespace, method: str) -> dict[str, Any]:
    """All row counts in one engine of this process."""
    import torch
    import vllm

    drafted, steps = DRAFTED[method], OUTPUT_TOKENS[method]
    started = time.perf_counter()
    engine = vllm.LLM(
        model=str(arguments.folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        speculative_config={"method": "mtp", "num_speculative_tokens": drafted} if drafted else None,
        max_model_len=arguments.context + steps + 64,
        max_num_seqs=max(arguments.rows),
        gpu_memory_utilization=arguments.gpu_memory_utilization,
        enable_prefix_caching=False,
    )
    start_seconds = time.perf_counter() - started
    hf = json.loads((arguments.folder / "config.json").read_text())

    def generate(prompts: Sequence[Sequence[int]], tokens: int) -> None:
        params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        results = engine.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
        got = [len(result.outputs[0].token_ids) for result in results]
        if got != [tokens] * len(prompts):
            raise RuntimeError(f"{tokens} tokens were asked of each request, and came: {got}")

    figures = []
    for rows in arguments.rows:
        figures.append(
            measure(
                generate,
                rows,
                context=arguments.context,
                steps=steps,
                repeats=arguments.repeats,
                vocab_size=hf["vocab_size"],
            )
        )
        print(figures[-1], flush=True)
    return {
        "benchmark": "step_vllm",
        "vllm": vllm.__version__,
        "device_name": torch.cuda.get_device_name(),
        "quant_method": hf.get("quantization_config", {}).get("quant_method"),
        "method": method,
        "num_speculative_tokens": drafted,
        "context": arguments.context,
        "output_tokens": steps,
        "repeats": arguments.repeats,
        "max_num_batched_tokens": engine.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens,
        "gpu_memory_utilization": arguments.gpu_memory_utilization,
        "start_seconds": round(start_seconds, 1),
        "seconds": round(time.perf_counter() - started, 1),
        "rows": figures,
    }


def run(arguments: argparse.Namespace) -> int:
    if arguments.stage == "make":
        # These import jax, which need not be where vLLM runs.
        from bench.harness.published import published
        from bench.step.checkpoint import checkpoint_config, make

        started = time.perf_counter()
        hf = checkpoint_config(arguments.model, arguments.layers, mtp=not arguments.no_mtp)
        size = make(arguments.folder, hf, published(arguments.quantization, hf))
        print(f"wrote {size / 1e9:.1f} GB in {time.perf_counter() - started:.1f} s")
        return 0
    if arguments.only:
        _time_vllm(arguments, arguments.only)
        return 0
    words = sys.argv[2:] if sys.argv[1:2] == ["bench"] else sys.argv[1:]  # through the script `jaxspec`, or not
    hf = json.loads((arguments.folder / "config.json").read_text())
    has_draft = hf.get("num_nextn_predict_layers") or hf.get("mtp_num_hidden_layers")
    for method in DRAFTED if has_draft else ["plain"]:
        # A process each: only its end frees the device's memory for certain.
        code = subprocess.run([sys.executable, "-m", "bench", *words, "--only", method], check=False).returncode
        if code:
            return code
    return 0


def _time_vllm(arguments: argparse.Namespace, method: str) -> None:
    result = run_vllm(arguments, method)
    out = (arguments.results or arguments.folder) / f"vllm_{method}.json"
    where = argparse.Namespace(out=out, commit=arguments.commit)
    record.write(out.stem, result, where, with_device=False)  # jax does not run here
