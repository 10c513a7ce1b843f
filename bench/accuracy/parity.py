"""`bench parity`: is bfloat16 in jaxspec as close to float32 as PyTorch's bfloat16 is?

Held-out text is fed token by token (teacher forcing) to three models with the same weights: PyTorch in float32, which
counts as exact; PyTorch in bfloat16 as Hugging Face loads it; and jaxspec in bfloat16 through its real paged engine. The
figure is how often a bfloat16 model's most likely next token is the float32 model's. The gate: jaxspec agrees at least
as often as PyTorch in bfloat16, minus 0.3 points, in prefill and in decode.

jaxspec runs twice: in "prefill" every position comes from chunked prefill (attention decompressed); in "decode" the
first half of each window is prefilled and the second half comes from decode steps (attention absorbed). PyTorch always
runs the whole window at once.

Held-out files are installed Python files that the demo model's training left out by a hash rule
(bench/demo_training/corpus.py), so every machine has some.
"""

import argparse
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record

# The model is small, and both libraries share the GPU.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

ALLOWED_POINTS = 0.3
LLM_ROWS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--windows", type=int, default=64, metavar="N", help="held-out texts (default: 64)")
    parser.add_argument("--length", type=int, default=1024, metavar="TOKENS", help="of each window (default: 1024)")
    parser.add_argument(
        "--dtype",
        choices=["bfloat16", "float32"],
        default="bfloat16",
        help="of the compared models",
    )
    for what in ("attention", "moe"):
        parser.add_argument(f"--{what}-backend", default="auto", help="of jaxspec, as for serve (default: auto)")
    record.add_arguments(parser)


@dataclass(frozen=True)
class Predictions:
    """For each window, over its positions: most likely next token int [T], and how far it leads the second, [T]."""

    top: list[np.ndarray]
    gap: list[np.ndarray]


def top_and_gap(logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Argmax (the first of equals) and the lead over the second, of logits [T, V]."""
    two = np.partition(logits, -2, axis=-1)[:, -2:]
    return logits.argmax(axis=-1), two[:, 1] - two[:, 0]


def held_out_files() -> list[str]:
    """Texts of files that training left out, in the order of their hashes."""
    from bench.demo_training.corpus import HELD_OUT_ONE_IN, find_files, read_source, strip_licence_header

    found = {}
    for package, path in sorted(set(find_files(stdlib_only=False)[0])):
        # The rule of `Source.held_out` first: parsing every file would be slow.
        try:
            text = Path(path).read_text(encoding="utf-8").replace("\r\n", "\n")
        except (OSError, UnicodeDecodeError):
            continue
        digest = hashlib.sha256((strip_licence_header(text).strip("\n") + "\n").encode()).hexdigest()
        if int(digest[:8], 16) % HELD_OUT_ONE_IN:
            continue
        source = read_source((package, path))
        if source is not None and source.held_out:
            found[source.digest] = source.text
    return [found[digest] for digest in sorted(found)]


def choose_windows(texts: Sequence[str], encode: Any, count: int, length: int) -> list[list[int]]:
    """First windows of the texts, then their second ones, and so on, until there are enough; none shorter than half."""
    encoded = [encode(text) for text in texts]
    windows: list[list[int]] = []
    start = 0
    while len(windows) < count and any(len(ids) > start for ids in encoded):
        windows += [ids[start : start + length] for ids in encoded if len(ids) - start >= length // 2]
        start += length
    return windows[:count]


def run_torch(folder: Path, windows: Sequence[Sequence[int]], dtype: str) -> Predictions:
    """PyTorch's simplest path (eager attention and experts), one window at a time, without TF32."""
    import torch
    import transformers

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model: Any = transformers.DeepseekV3ForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="eager", experts_implementation="eager"
    )
    model = model.to(device).eval()
    out = Predictions([], [])
    with torch.no_grad():
        for window in windows:
            logits = model(torch.tensor([list(window)], device=device), use_cache=False).logits[0].float().cpu().numpy()
            top, gap = top_and_gap(logits)
            out.top.append(top)
            out.gap.append(gap)
    del model
    if device == "cuda":
        torch.cuda.empty_cache()
    return out


class TeacherForced:
    """jaxspec's engine over given texts: the next token that it is fed is the text's, not the sampled one."""

    def __init__(self, dtype: str, length: int, attention_backend: str, moe_backend: str):
        from jaxspec.llm import LLM

        self.llm = LLM(
            "demo",
            dtype=dtype,
            attention_backend=attention_backend,
            moe_backend=moe_backend,
            max_model_len=length + 1,
            max_num_seqs=LLM_ROWS,
            num_speculative_tokens=0,  # every text's own tokens are fed, one a step
            readout_depth=0,
            enable_prefix_caching=False,
            probe=True,
            observer=self._observe,
        )
        self._top: dict[str, dict[int, int]] = {}
        self._gap: dict[str, dict[int, float]] = {}

    def _observe(self, step: Any) -> None:
        prefill_at, decode_at = step.token_offsets()
        spans = [(r.request.id, r.start, at, r.length) for r, at in zip(step.plan.prefill, prefill_at, strict=True)]
        spans += [(r.id, len(r.tokens) - 1, at, 1) for r, at in zip(step.plan.decode, decode_at, strict=True)]
        for request_id, position, at, length in spans:
            top, gap = top_and_gap(step.probe.logits[at : at + length])
            positions = range(position, position + length)
            self._top.setdefault(request_id, {}).update(zip(positions, top.tolist(), strict=True))
            self._gap.setdefault(request_id, {}).update(zip(positions, gap.tolist(), strict=True))

    def run(self, windows: Sequence[Sequence[int]], *, decode_half: bool) -> Predictions:
        """Predictions at every position, the second half of each window from decode steps if `decode_half`."""
        out = Predictions([], [])
        for i in range(0, len(windows), LLM_ROWS):
            group = windows[i : i + LLM_ROWS]
            requests = self._run_group(group, decode_half)
            for window, request in zip(group, requests, strict=True):
                top, gap = self._top.pop(request.id), self._gap.pop(request.id)
                out.top.append(np.array([top[p] for p in range(len(window))]))
                out.gap.append(np.array([gap[p] for p in range(len(window))]))
        return out

    def _run_group(self, group: Sequence[Sequence[int]], decode_half: bool) -> list[Any]:
        from jaxspec.sampling.params import SamplingParams

        engine = self.llm.engine
        texts, requests = {}, []
        for window in group:
            known = len(window) // 2 if decode_half else len(window)
            # One token more than is fed: the last prediction needs no successor.
            params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=len(window) - known + 1)
            request = self.llm.make_request(list(window[:known]), params)
            texts[request.id] = window
            requests.append(request)
            engine.add(request)
        while engine.has_work:
            engine.step()
            self._force(requests, texts)
        return requests

    def _force(self, requests: Sequence[Any], texts: dict[str, Sequence[int]]) -> None:
        """Replaces each newest sampled token with the text's, on the host and on the device."""
        import jax

        runner = self.llm.engine.runner
        newest = np.array(runner.state.last_token)
        for request in requests:
            text, position = texts[request.id], len(request.tokens) - 1
            if request.slot and request.num_output and position < len(text):
                request.tokens[-1] = newest[request.slot] = text[position]
        sharding = runner.state.last_token.sharding
        runner.state = runner.state._replace(last_token=jax.device_put(newest, sharding))


def compare(truth: Predictions, trial: Predictions, first: Sequence[int]) -> dict[str, Any]:
    """Agreement over each window's positions from `first` on, and every disagreement with the truth's own lead."""
    positions = agreed = 0
    disagreements = []
    for w, start in enumerate(first):
        same = truth.top[w][start:] == trial.top[w][start:]
        positions += same.size
        agreed += int(same.sum())
        for p in start + np.flatnonzero(~same):
            disagreements.append(
                {
                    "window": w,
                    "position": int(p),
                    "float32": int(truth.top[w][p]),
                    "got": int(trial.top[w][p]),
                    "gap": round(float(truth.gap[w][p]), 5),
                }
            )
    return {
        "positions": positions,
        "agreed": agreed,
        "percent": 100 * agreed / positions,
        "largest_gap": max((d["gap"] for d in disagreements), default=0.0),
        "disagreements": disagreements,
    }


def run(arguments: argparse.Namespace) -> int:
    import jaxspec.demo
    from jaxspec.text import Tokenizer

    folder = Path(jaxspec.demo.__path__[0]) / "target"
    texts = held_out_files()
    windows = choose_windows(texts, Tokenizer.from_folder(folder).encode, arguments.windows, arguments.length)
    tokens = sum(map(len, windows))
    print(f"{len(windows)} windows of {len(texts)} held-out files, {tokens} tokens", flush=True)
    truth = run_torch(folder, windows, "float32")
    peer = run_torch(folder, windows, arguments.dtype)
    engine = TeacherForced(arguments.dtype, arguments.length, arguments.attention_backend, arguments.moe_backend)
    prefill = engine.run(windows, decode_half=False)
    decode = engine.run(windows, decode_half=True)

    everywhere, halves = [0] * len(windows), [len(w) // 2 for w in windows]
    figures: dict[str, Any] = {}
    for mode, ours, first in (("prefill", prefill, everywhere), ("decode", decode, halves)):
        pytorch, jaxspec_ = compare(truth, peer, first), compare(truth, ours, first)
        passed = jaxspec_["percent"] >= pytorch["percent"] - ALLOWED_POINTS
        figures[mode] = {"pytorch": pytorch, "jaxspec": jaxspec_, "passed": passed}
    header = [
        "",
        "positions",
        f"PyTorch {arguments.dtype}",
        "largest gap",
        f"jaxspec {arguments.dtype}",
        "largest gap",
        "",
    ]
    lines = [
        [
            mode,
            str(f["pytorch"]["positions"]),
            *(
                cell
                for side in ("pytorch", "jaxspec")
                for cell in (
                    f"{f[side]['percent']:.3f} % ({f[side]['positions'] - f[side]['agreed']} differ)",
                    f"{f[side]['largest_gap']:.4f}",
                )
            ),
            "ok" if f["passed"] else "FAILED",
        ]
        for mode, f in figures.items()
    ]
    print("next-token agreement with PyTorch in float32; gap: the float32 model's lead where the other one differs")
    print(record.table(header, lines))
    passed = all(f["passed"] for f in figures.values())
    result = {
        "benchmark": "parity",
        "model": "demo",
        "dtype": arguments.dtype,
        "kernels": engine.llm.describe()["Kernels"],
        "windows": len(windows),
        "window_tokens": arguments.length,
        "tokens": tokens,
        "held_out_files": len(texts),
        "allowed_points": ALLOWED_POINTS,
        "passed": passed,
        **figures,
    }
    record.write("parity", result, arguments)
    return 0 if passed else 1
