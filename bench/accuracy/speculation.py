"""`bench speculation`: does speculation leave greedy text unchanged, and what does each draft gain?

The embedded demo model continues the recorded prompts, and beginnings of held-out files where this machine has any
(as in bench/accuracy/parity.py), greedily: without speculation, with its NextN layer at several k, and with both EAGLE3 heads.

The reference is plain decoding of each prompt alone, with the logits of every position. Where a text differs from it,
the gap is the reference's logit of its own token less that of the other one, after the same prefix. In float32 no text
may differ. In bfloat16 a batch's shape changes rounding, and near-ties fall either way. By how much is measured without
speculation: the same prompts decode plainly in batches of 4 and of 8 (which also mixes prompts into decode steps), and
the noise is the largest change of a logit of the reference's two best tokens over all positions with equal prefixes. Two
logits can each move by the noise, so a gap of up to twice the noise is a near-tie and a larger one a fault, which sets
exit code 1.

Also reported: accepted drafts by position, tokens a cycle (the bonus token included), and tokens/s of whole runs, prefill
included, at 1 and 8 rows, with each step's output read at once.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness import record

# The model is small, and so is its share of the memory.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

ROWS = 8
NOISE_ROWS = (4, 8)
HELD_OUT_PROMPT = 48


@dataclass(frozen=True)
class Choice:
    """A draft and how many tokens it proposes; model None is the NextN layer, k = 0 plain decoding."""

    name: str
    k: int
    model: str | None = None


PLAIN = Choice("plain", 0)
CHOICES = (
    Choice("MTP", 1),
    Choice("MTP", 3),
    Choice("MTP", 7),
    Choice("EAGLE3 Llama", 3, "demo/eagle3-llama"),
    Choice("EAGLE3 MLA", 3, "demo/eagle3-mla"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--tokens", type=int, default=96, metavar="N", help="generated for each prompt (default: 96)")
    parser.add_argument("--held-out", type=int, default=16, metavar="N", help="held-out prompts (default: 16)")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="timed runs of each draft (default: 2)")
    record.add_arguments(parser)


class Generator:
    """An engine as `LLM` builds it, for greedy requests.

    Args:
        observer: with one, the steps return logits, and it sees them.
    """

    def __init__(self, choice: Choice, dtype: Any, observer: Any = None):
        from jaxspec.config import EngineConfig
        from jaxspec.loading.engine import build_engine
        from jaxspec.loading.resolve import resolve_model

        config = EngineConfig(
            dtype=dtype,
            # Few and small buckets: prompts arrive in several steps, beside rows that decode.
            max_model_len=512,
            max_num_seqs=ROWS,
            max_num_batched_tokens=64,
            num_speculative_tokens=choice.k,
            adaptive_speculation=False,
            readout_depth=0,
            enable_prefix_caching=False,  # the same prompts run again and again
            speculative_model=choice.model,
        )
        self.choice = choice
        probe = observer is not None
        self.engine = build_engine(resolve_model("demo"), config, probe=probe, observer=observer)[0]
        self.engine.warm_up()
        self._runs = 0

    def run(self, prompts: Sequence[Sequence[int]], new_tokens: int, rows: int) -> tuple[list[list[int]], list[str]]:
        """New tokens and request ids of each prompt, `rows` prompts after `rows` prompts."""
        from jaxspec.engine.request import Request
        from jaxspec.sampling.params import SamplingParams

        params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=new_tokens)
        self._runs += 1
        requests = [Request(f"{self._runs}.{i}", ids, params) for i, ids in enumerate(prompts)]
        for start in range(0, len(requests), rows):
            for request in requests[start : start + rows]:
                self.engine.add(request)
            while self.engine.has_work:
                for output in self.engine.step():
                    if output.error:
                        raise RuntimeError(f"{self.choice}: {output.error}")
        return [request.tokens[request.prompt_len :] for request in requests], [request.id for request in requests]

    def accepted(self) -> np.ndarray:
        """Cycles since the start, then accepted drafts by position."""
        total = self.engine.stats().acceptance
        return np.array([total.num_steps, *total.accepted_per_position] if total else [0], np.int64)


@dataclass(frozen=True)
class Truth:
    """Plain greedy decoding of each prompt: new ids, and the logits [tokens, V] that each was chosen from."""

    ids: list[list[int]]
    logits: list[np.ndarray]


def probe_plain(
    generator: Generator, collector: Any, prompts: Sequence[Sequence[int]], tokens: int, rows: int
) -> Truth:
    texts, request_ids = generator.run(prompts, tokens, rows)
    logits = []
    for prompt, request_id in zip(prompts, request_ids, strict=True):
        positions = collector.rows.pop(request_id)
        logits.append(np.stack([positions[len(prompt) - 1 + i][1] for i in range(tokens)]))
    return Truth(texts, logits)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def noise(truth: Truth, other: Truth) -> tuple[float, int]:
    """Largest change of a logit of the truth's two best tokens, over all positions with equal prefixes; how many."""
    largest, positions = 0.0, 0
    for ids, ids_other, ours, theirs in zip(truth.ids, other.ids, truth.logits, other.logits, strict=True):
        end = first_difference(ids, ids_other)
        count = len(ids) if end is None else end + 1  # the first difference still has an equal prefix
        best_two = np.argpartition(ours[:count], -2, axis=1)[:, -2:]
        change = np.abs(np.take_along_axis(ours[:count] - theirs[:count], best_two, axis=1))
        largest, positions = max(largest, float(change.max())), positions + count
    return largest, positions


def differences(truth: Truth, texts: Sequence[Sequence[int]], rows: int) -> list[dict[str, Any]]:
    """The first difference of every text that has one."""
    out = []
    for i, (ids, got) in enumerate(zip(truth.ids, texts, strict=False)):
        at = first_difference(ids, got)
        if at is not None:
            row = truth.logits[i][at]
            gap = round(float(row[ids[at]] - row[got[at]]), 5)
            out.append({"prompt": i, "rows": rows, "position": at, "plain": ids[at], "got": int(got[at]), "gap": gap})
    return out


def held_out_prompts(count: int) -> list[list[int]]:
    from bench.accuracy.parity import choose_windows, held_out_files
    from jaxspec.loading.resolve import resolve_model
    from jaxspec.text import Tokenizer

    if not count:
        return []
    encode = Tokenizer.from_folder(resolve_model("demo")).encode
    return choose_windows(held_out_files(), encode, count, HELD_OUT_PROMPT)


def build(dtype: str, threads: int) -> tuple[Generator, Any, list[Generator]]:
    """The plain engine that returns logits, its collector, and the timed engines; compiled side by side."""
    from convert.compare import Collector

    collector = Collector()
    with ThreadPoolExecutor(threads) as pool:
        probing = pool.submit(Generator, PLAIN, dtype, collector)
        timed = [pool.submit(Generator, choice, dtype) for choice in (PLAIN, *CHOICES)]
        return probing.result(), collector, [future.result() for future in timed]


def run(arguments: argparse.Namespace) -> int:
    import jax

    from convert.reference import read_record
    from serve.demo import RECORD

    began = time.perf_counter()
    tokens = arguments.tokens
    recorded = [list(run.prompt_ids) for run in read_record(RECORD)]
    prompts = recorded + held_out_prompts(arguments.held_out)
    print(f"{len(prompts)} prompts, {len(recorded)} of them recorded, {tokens} tokens each", flush=True)
    gpu = jax.devices()[0].platform == "gpu"
    probing, collector, generators = build(arguments.dtype, len(CHOICES) + 2 if gpu else os.cpu_count() or 1)
    print(f"{len(generators) + 1} engines ready after {time.perf_counter() - began:.1f} s", flush=True)

    truth = probe_plain(probing, collector, prompts, tokens, 1)
    others = {rows: probe_plain(probing, collector, prompts, tokens, rows) for rows in NOISE_ROWS}
    noises = {rows: noise(truth, other) for rows, other in others.items()}
    bound = 2 * max(largest for largest, _ in noises.values())
    print(
        f"largest change of a logit between batches: {bound / 2:.4g}; near-ties are gaps up to {bound:.4g}", flush=True
    )

    figures = [_measure(generator, truth, prompts, tokens, arguments.repeats) for generator in generators]
    # Written so that NaN is a fault.
    faults = [
        d | {"draft": f["draft"], "k": f["k"]} for f in figures for d in f["differences"] if not d["gap"] <= bound
    ]
    result = {
        "benchmark": "speculation",
        "model": "demo",
        "dtype": arguments.dtype,
        "prompts": len(prompts),
        "recorded_prompts": len(recorded),
        "tokens": tokens,
        "noise": [
            {
                "rows": rows,
                "largest_change": noises[rows][0],
                "positions": noises[rows][1],
                "differences": differences(truth, others[rows].ids, rows),
            }
            for rows in NOISE_ROWS
        ],
        "bound": bound,
        "passed": not faults,
        "faults": faults,
        "seconds": round(time.perf_counter() - began, 1),
        "drafts": figures,
    }
    print_table(result)
    record.write("speculation_demo", result, arguments)
    return 1 if faults else 0


def _measure(
    generator: Generator, truth: Truth, prompts: Sequence[Sequence[int]], tokens: int, repeats: int
) -> dict[str, Any]:
    """One draft: texts against the truth, acceptance, and speed at 1 row (a few prompts) and at 8 (all prompts)."""
    few = prompts[:ROWS]
    found: list[dict[str, Any]] = []
    speed = {}
    before = generator.accepted()
    for rows, chosen in ((1, few), (ROWS, prompts)):
        rates = []
        for _ in range(repeats):
            started = time.perf_counter()
            texts, _ = generator.run(chosen, tokens, rows)
            rates.append(tokens * len(chosen) / (time.perf_counter() - started))
        found += differences(truth, texts, rows)
        speed[f"tokens_per_s_{rows}"] = round(statistics.median(rates), 1)
    cycles, *accepted = (generator.accepted() - before).tolist()
    print(f"{generator.choice.name}, k = {generator.choice.k}: measured", flush=True)
    return {
        "draft": generator.choice.name,
        "k": generator.choice.k,
        "texts": len(few) + len(prompts),
        "identical": len(few) + len(prompts) - len(found),
        "differences": found,
        "cycles": cycles,
        "tokens_per_cycle": round(1 + sum(accepted) / cycles, 4) if cycles else 1.0,
        "accepted_by_position": [round(a / cycles, 4) for a in accepted] if cycles else [],
        **speed,
    }


def print_table(result: dict[str, Any]) -> None:
    plain = result["drafts"][0]
    header = ["draft", "k", "identical", "largest gap", "tokens a cycle", "accepted by position"]
    header += ["tok/s, 1 row", "", f"{ROWS} rows", ""]
    lines = []
    for f in result["drafts"]:
        gaps = [d["gap"] for d in f["differences"]]
        lines.append(
            [
                f["draft"],
                str(f["k"]),
                f"{f['identical']}/{f['texts']}",
                f"{max(gaps):.4f}" if gaps else "",
                f"{f['tokens_per_cycle']:.2f}",
                " ".join(f"{rate:.2f}" for rate in f["accepted_by_position"]),
                *(
                    cell
                    for rows in (1, ROWS)
                    for cell in (
                        f"{f[f'tokens_per_s_{rows}']:.0f}",
                        f"{f[f'tokens_per_s_{rows}'] / plain[f'tokens_per_s_{rows}']:.2f}x",
                    )
                ),
            ]
        )
    print(
        f"demo model, {result['dtype']}: greedy texts of {result['tokens']} tokens against plain decoding alone; near-ties "
        f"are gaps up to {result['bound']:.4g}: {'passed' if result['passed'] else 'FAILED'}"
    )
    for n in result["noise"]:
        print(
            f"plain in batches of {n['rows']}: {len(n['differences'])} texts differ, logits by up to "
            f"{n['largest_change']:.4g} over {n['positions']} positions with equal prefixes"
        )
    print(record.table(header, lines))
