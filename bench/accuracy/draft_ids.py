"""`bench draft_ids`: does jaxspec propose the draft tokens that vLLM proposes?

Two random checkpoints, one of each kind of draft: "mtp", a DeepSeek-V3 model with one NextN layer, and "eagle3", a
Llama model with an EAGLE3 head that proposes half of its vocabulary. Three stages over one folder, since the two
engines may need different environments:

    python -m bench draft_ids make FOLDER       writes the checkpoints
    python -m bench draft_ids vllm FOLDER       runs vLLM over them and writes what it drafted
    python -m bench draft_ids compare FOLDER    drafts the same with jaxspec, and compares

The comparison is teacher-forced: for every step that vLLM made, jaxspec is given the tokens that vLLM knew then, and
drafts from there, so that one differing greedy token does not end the comparison of a whole text. A step's drafts after
its first difference are left out: they follow different tokens.

The engines may differ where bfloat16 cannot tell two tokens apart: a difference counts only if jaxspec's draft prefers
its own token to vLLM's by more than rounding can move the two. That bound is measured: jaxspec drafts once more in
float32, and a near-tie is at most four times the largest change of a first choice's log-probability, because each
engine's rounding may move both tokens. Each difference is listed with its gaps in bfloat16 and in float32: negative in
float32 means that there jaxspec prefers vLLM's token.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.accuracy.draft_ids_checkpoints import COMMON, DRAFTS, make, make_prompts
from bench.accuracy.draft_ids_vllm import NUM_DRAFTS, run_vllm
from bench.harness import record

DTYPES = ("bfloat16", "float32")
# In nats, of the draft's log-probabilities in float32, where both engines are nearly exact.
EXACT = 1e-3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=["make", "vllm", "compare"])
    parser.add_argument("folder", type=Path, help="of the checkpoints and of what vLLM drafted")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations (default: bfloat16)"
    )
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="for vllm (default: 16)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="for vllm: of each output (default: 32)")
    record.add_arguments(parser)


def run_jaxspec(
    folder: Path, name: str, texts: Sequence[Sequence[int]], dtype: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each text, in the order in which they end: its index, the drafts int [k] after it and log q [k, V]."""
    from jaxspec.engine.request import RequestState
    from jaxspec.llm import LLM
    from jaxspec.sampling.params import SamplingParams
    from jaxspec.sampling.rejection import log_probability

    head = DRAFTS[name]
    llm = LLM(
        str(folder / name),
        dtype=dtype,
        num_speculative_tokens=NUM_DRAFTS,
        adaptive_speculation=False,  # every step is looked at
        speculative_model=None if head is None else str(folder / head),
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        readout_depth=0,  # the drafts are looked at between two steps
        enable_prefix_caching=False,  # each text is one of vLLM's cut short: every one is computed whole
    )
    engine = llm.engine
    # Drafts the likeliest tokens, as for a greedy request, for which a step would not write q.
    params = SamplingParams(temperature=1, greedy_drafts=True, ignore_eos=True)
    waiting = {}
    for i, text in enumerate(texts):
        request = llm.make_request(list(text[:-1]), params)
        # As of a preempted request: the token after its prompt is known, and is not sampled again.
        request.tokens.append(text[-1])
        engine.add(request)
        waiting[i] = request
    while waiting:
        engine.step()
        state = engine.runner.state
        drafts = np.asarray(state.drafts)
        ready = {i: request for i, request in waiting.items() if request.state is RequestState.DECODE}
        for i, request in ready.items():
            slot = request.slot
            log_q = log_probability(state.draft_logits[slot], params.temperature, state.draft_log_z[slot, :, None])
            yield i, drafts[slot], np.asarray(log_q)
            engine.abort(request.id)
            del waiting[i]


def compare(
    theirs: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    log_q: Sequence[np.ndarray],
    bound: float,
    exact: tuple[Sequence[Sequence[int]], Sequence[np.ndarray]] | None = None,
) -> dict[str, Any]:
    """Counts of equal drafts and of differences, over steps of k drafts each.

    Args:
        theirs, ours: for each step, the drafts.
        log_q: for each step, float [k, V]: our draft's log-probabilities.
        bound: largest gap of a near-tie, in nats.
        exact: drafts and log-probabilities in float32, used to report each difference's gap there too; null where these
            drafts had differed before, so that they follow other tokens.
    """
    equal, differences = 0, list[dict[str, Any]]()
    for step, (them, us, q) in enumerate(zip(theirs, ours, log_q, strict=True)):
        for i, (a, b) in enumerate(zip(them, us, strict=True)):
            if a == b:
                equal += 1
                continue
            gap = float(q[i, b] - q[i, a])
            found: dict[str, Any] = {"step": step, "draft": i, "vllm": int(a), "jaxspec": int(b), "gap": round(gap, 5)}
            differences.append(found)
            if exact is not None:
                same = list(exact[0][step][:i]) == list(us[:i])
                true = exact[1][step][i]
                found["float32_gap"] = round(float(true[b] - true[a]), 5) if same else None
            break
    real = [d for d in differences if not d["gap"] <= bound]
    return {
        "steps": len(theirs),
        "near_tie_nats": round(bound, 5),
        "positions": equal + len(differences),
        "equal": equal,
        "near_ties": len(differences) - len(real),
        "largest_near_tie": max((d["gap"] for d in differences if d not in real), default=0.0),
        "different": len(real),
        "differences": differences,
    }


def rounding_noise(
    ours: Sequence[Sequence[int]],
    log_q: Sequence[np.ndarray],
    exact: Sequence[Sequence[int]],
    exact_q: Sequence[np.ndarray],
) -> float:
    """How far rounding moves a candidate: the largest change, in nats, of the log-probability of either first choice.

    Args:
        ours, exact: for each step, the drafts in the lower and in the higher precision.
        log_q, exact_q: for each step, float [k, V].
    """
    noise = 0.0
    for us, q, them, true in zip(ours, log_q, exact, exact_q, strict=True):
        for i, (a, b) in enumerate(zip(us, them, strict=True)):
            noise = max(noise, *(abs(float(q[i, token] - true[i, token])) for token in (a, b)))
            if a != b:  # what follows drafts from other tokens
                break
    return noise


def _draft(folder: Path, name: str, texts: Sequence[Sequence[int]], dtype: str) -> tuple[list[Any], list[Any]]:
    """Drafts [k] and log q [k, V] after each text."""
    ids: list[Any] = [None] * len(texts)
    log_q: list[Any] = [None] * len(texts)
    for i, drafts, q in run_jaxspec(folder, name, texts, dtype):
        ids[i], log_q[i] = drafts.tolist(), q
    return ids, log_q


def _compare_model(folder: Path, name: str, theirs: dict[str, Any]) -> dict[str, Any]:
    steps = [(run, step) for run in theirs["runs"] for step in run["steps"]]
    texts = [[*run["prompt"], *run["output"]][: step["known"]] for run, step in steps]
    ours, log_q = _draft(folder, name, texts, theirs["dtype"])
    bound, exact = EXACT, None
    if theirs["dtype"] != "float32":
        exact = _draft(folder, name, texts, "float32")
        bound = 4 * rounding_noise(ours, log_q, *exact)
    result = compare([step["drafts"] for _, step in steps], ours, log_q, bound, exact)
    # What a step of vLLM added to the text: the accepted drafts, and one more token.
    added = [b["known"] - a["known"] for run in theirs["runs"] for a, b in pairwise(run["steps"])]
    return {"prompts": len(theirs["runs"]), "mean_accepted": round(float(np.mean(added)) - 1, 3)} | result


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.stage == "make":
        make(folder)
        return 0
    if arguments.stage == "vllm":
        prompts = make_prompts(arguments.prompts, COMMON["vocab_size"])
        for name, drafted in run_vllm(folder, prompts, arguments.tokens, arguments.dtype).items():
            (folder / f"{name}.json").write_text(record.dumps(drafted))
        return 0

    drafted = {name: json.loads((folder / f"{name}.json").read_text()) for name in DRAFTS}
    figures = {name: _compare_model(folder, name, theirs) for name, theirs in drafted.items()}
    columns = ("steps", "near_tie_nats", "positions", "equal", "near_ties", "largest_near_tie", "different")
    lines = [[name, *(str(f[c]) for c in columns)] for name, f in figures.items()]
    print(record.table(["draft", *(c.replace("_", " ") for c in columns)], lines))
    passed = all(f["different"] == 0 and f["positions"] > 0 for f in figures.values())
    first = next(iter(drafted.values()))
    result = {
        "benchmark": "draft_ids",
        "vllm": first["vllm"],
        "dtype": first["dtype"],
        "drafts_a_step": NUM_DRAFTS,
        "passed": passed,
        **figures,
    }
    record.write("draft_ids", result, arguments)
    return 0 if passed else 1
