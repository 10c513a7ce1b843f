"""`jaxspec compare`: PyTorch and jaxspec on the same prompts, layer by layer, token by token.

jaxspec runs through its real engine: once continuing each prompt greedily (chunked prefill, then decode steps over the
paged cache), and once prefilling prompt and reference continuation together. Both are held against one PyTorch run.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from convert.reference import ReferenceRun, TorchModel, choose_prompts, log_softmax, read_record, write_record
from jaxspec.errors import ConfigError, JaxspecError

# dtype -> (largest absolute logit error, least top-1 agreement, greedy continuations must be equal)
THRESHOLDS = {"float32": (2e-4, 1.0, True), "bfloat16": (float("inf"), 0.95, False)}


@dataclass
class Errors:
    """Running maximum and root mean square of differences."""

    maximum: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, difference: np.ndarray) -> None:
        if difference.size:
            # A NaN must show, and Python's max would drop it.
            self.maximum = float(np.maximum(self.maximum, np.abs(difference).max()))
            self.squares += float(np.square(difference.astype(np.float64)).sum())
            self.count += difference.size

    @property
    def rms(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0


@dataclass(frozen=True)
class Divergence:
    """The first new token that differs; `gap` is how far PyTorch's logit of its own choice is above that of ours."""

    prompt: int
    position: int
    expected: int
    got: int
    gap: float


@dataclass
class Report:
    """All figures of one comparison. `layers[0]` is the embedding, `layers[i]` the residual stream behind layer i."""

    layers: list[Errors] = field(default_factory=list)
    logits: Errors = field(default_factory=Errors)
    kl_mean: float = 0.0
    kl_max: float = 0.0
    top1_agreement: float = 1.0
    positions: int = 0
    prompts: int = 0
    identical: int = 0
    tokens: int = 0
    max_logprob_error: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)

    def failures(self, *, max_logit_error: float, min_top1: float, require_identical: bool) -> list[str]:
        """What is past the thresholds, one line each. Written so that NaN fails."""
        out = []
        if self.positions and not self.logits.maximum <= max_logit_error:
            out.append(f"max logit error {self.logits.maximum:.3g} is over {max_logit_error:g}")
        if self.positions and not self.top1_agreement >= min_top1:
            out.append(f"top-1 agreement {self.top1_agreement:.4f} is under {min_top1:g}")
        if require_identical and self.identical < self.prompts:
            out.append(f"{self.prompts - self.identical} of {self.prompts} greedy continuations differ")
        return out

    def as_json(self) -> dict[str, Any]:
        def errors(e):
            return {"max": e.maximum, "rms": e.rms}

        figures = asdict(self)
        figures["layers"] = [errors(e) for e in self.layers]
        figures["logits"] = errors(self.logits)
        return figures


class Collector:
    """An engine observer that keeps residual streams and logits of every position of every request."""

    def __init__(self):
        self.runner: Any = None
        self.rows: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}

    def __call__(self, step: Any) -> None:
        prefill_at, decode_at = self.runner.token_offsets(step.plan)
        spans = [(r.request.id, r.start, at, r.length) for r, at in zip(step.plan.prefill, prefill_at, strict=True)]
        spans += [(r.id, len(r.tokens) - 1, at, 1) for r, at in zip(step.plan.decode, decode_at, strict=True)]
        for request_id, position, at, length in spans:
            rows = self.rows.setdefault(request_id, {})
            for i in range(length):
                rows[position + i] = (step.probe.residuals[:, at + i], step.probe.logits[at + i])

    def arrays(self, request_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Residual streams [layers + 1, T, H] and logits [T, V] by position."""
        rows = self.rows[request_id]
        ordered = [rows[p] for p in range(len(rows))]
        return np.stack([r for r, _ in ordered], axis=1), np.stack([g for _, g in ordered])


def compare(llm: Any, collector: Collector, reference: Sequence[ReferenceRun]) -> Report:
    """Runs an LLM (built with `probe=True` and the collector as observer) over the reference's prompts.

    Raises:
        ConfigError: the LLM accepts drafts at random.
    """
    from jaxspec.sampling.params import SamplingParams

    if llm.engine.settings.synthetic_acceptance_length is not None:
        raise ConfigError("synthetic_acceptance_length makes the text worthless: there is nothing to compare")
    collector.runner = llm.engine.runner
    report = Report(prompts=len(reference))
    greedy = [
        SamplingParams(max_tokens=len(run.new_ids), temperature=0, ignore_eos=True, logprobs=0) for run in reference
    ]
    once = SamplingParams(max_tokens=1, temperature=0, ignore_eos=True)
    decode = [llm.make_request(run.prompt_ids, p) for run, p in zip(reference, greedy, strict=True)]
    completions = llm.run(decode)
    prefill = []
    if reference and reference[0].logits is not None:
        prefill = [llm.make_request((*run.prompt_ids, *run.new_ids[:-1]), once) for run in reference]
        llm.run(prefill)

    kls: list[np.ndarray] = []
    agreements = 0
    for i, run in enumerate(reference):
        got = completions[i].ids
        same = next((j for j, (a, b) in enumerate(zip(run.new_ids, got, strict=True)) if a != b), len(got))
        report.tokens += len(got)
        report.identical += same == len(got)
        if same:
            logprobs = np.array(completions[i].logprobs[:same], np.float32)
            report.max_logprob_error = max(report.max_logprob_error, float(abs(logprobs - run.logprobs[:same]).max()))
        if same < len(got):
            gap = float(run.gaps[same])
            if run.logits is not None:
                row = run.logits[len(run.prompt_ids) - 1 + same]
                gap = float(row[run.new_ids[same]] - row[got[same]])
            report.divergences.append(Divergence(i, same, run.new_ids[same], got[same], gap))
        if run.logits is None or run.residuals is None:
            continue
        # The decode run is comparable as long as it was fed the same tokens: up to its first different one.
        comparable = min(len(run.prompt_ids) + same, len(run.logits))
        for request, length in ((decode[i], comparable), (prefill[i], len(run.logits))):
            residuals, logits = collector.arrays(request.id)
            report.layers = report.layers or [Errors() for _ in residuals]
            for layer, errors in enumerate(report.layers):
                errors.add(residuals[layer, :length] - run.residuals[layer, :length])
            want, have = run.logits[:length], logits[:length]
            report.logits.add(have - want)
            agreements += int((want.argmax(axis=1) == have.argmax(axis=1)).sum())
            report.positions += length
            p, q = log_softmax(want), log_softmax(have)
            kls.append((np.exp(p) * (p - q)).sum(axis=1))
    if kls:
        kl = np.concatenate(kls)
        report.kl_mean, report.kl_max = float(kl.mean()), float(kl.max())
        report.top1_agreement = agreements / report.positions
    return report


def print_report(report: Report) -> None:
    if report.positions:
        print(f"{'residual stream':<18} {'max error':>10} {'RMS error':>10}")
        for i, errors in enumerate(report.layers):
            name = "embedding" if i == 0 else f"after layer {i - 1}"
            print(f"{name:<18} {errors.maximum:>10.2e} {errors.rms:>10.2e}")
        print(f"{'logits':<18} {report.logits.maximum:>10.2e} {report.logits.rms:>10.2e}")
        print(
            f"KL {report.kl_mean:.2e} mean, {report.kl_max:.2e} max; top-1 agreement {100 * report.top1_agreement:.2f} % "
            f"of {report.positions} positions (prefill and decode)"
        )
    print(
        f"greedy: {report.identical} of {report.prompts} continuations identical ({report.tokens} tokens), "
        f"max logprob error {report.max_logprob_error:.2e}"
    )
    for d in report.divergences:
        print(
            f"  prompt {d.prompt}: first differs at new token {d.position}: {d.expected} became {d.got}, logit gap {d.gap:.3g}"
        )


def load_reference(reference: Path, *, num_prompts: int, new_tokens: int) -> list[ReferenceRun]:
    """From a recorded file, or by running PyTorch on a Hugging Face folder."""
    if reference.is_file():
        return read_record(reference)
    if not (reference / "config.json").is_file():
        raise JaxspecError(f"{reference} is neither a recorded run nor a Hugging Face folder (it has no config.json)")
    model = TorchModel(reference)
    return [model.run(ids, new_tokens) for ids in choose_prompts(reference, model.vocab_size, num_prompts)]


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts to compare (default: 16)")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens a prompt (default: 64)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxspec compare MODEL --reference ...`."""
    parser.epilog = "`jaxspec compare record FOLDER FILE` saves PyTorch's side for machines without PyTorch."
    parser.add_argument("model", help="what jaxspec runs: demo, a converted folder, a Hugging Face folder or a hub id")
    parser.add_argument(
        "--reference", type=Path, required=True, help="Hugging Face folder, or a file made by `compare record`"
    )
    parser.add_argument(
        "--dtype", choices=sorted(THRESHOLDS), default="float32", help="dtype of jaxspec; PyTorch is float32"
    )
    parser.add_argument("--max-num-batched-tokens", type=int, default=64, help="prefill chunk size (default: 64)")
    parser.add_argument("--max-num-seqs", type=int, default=4, help="requests at once (default: 4)")
    parser.add_argument(
        "--max-logit-error", type=float, help="fail above (default: 2e-4 for float32, none for bfloat16)"
    )
    parser.add_argument(
        "--min-top1", type=float, help="fail below this top-1 agreement (default: 1, or 0.95 for bfloat16)"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="also write all figures as JSON ('-' for standard output)"
    )
    _add_sizes(parser)


def run(args: argparse.Namespace) -> int:
    """Prints the comparison; 1 where a threshold is passed."""
    from jaxspec.llm import LLM

    reference = load_reference(args.reference, num_prompts=args.num_prompts, new_tokens=args.new_tokens)
    longest = max(len(r.prompt_ids) + len(r.new_ids) for r in reference)
    collector = Collector()
    llm = LLM(
        args.model,
        probe=True,
        observer=collector,
        dtype=args.dtype,
        max_model_len=longest + 1,
        max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),
        max_num_batched_tokens=args.max_num_batched_tokens,
        num_speculative_tokens=0,  # the collector reads one token of each decode row
        enable_prefix_caching=False,  # and every token of every prompt
    )
    report = compare(llm, collector, reference)
    logit_error, top1, identical = THRESHOLDS[args.dtype]
    failures = report.failures(
        max_logit_error=logit_error if args.max_logit_error is None else args.max_logit_error,
        min_top1=top1 if args.min_top1 is None else args.min_top1,
        require_identical=identical,
    )
    figures = json.dumps(report.as_json() | {"dtype": args.dtype, "failures": failures}, indent=1)
    if args.json == Path("-"):
        print(figures)
    else:
        print_report(report)
        if args.json:
            args.json.write_text(figures + "\n")
        for failure in failures:
            print(f"FAIL: {failure}")
        if not failures:
            print("PASS")
    return 1 if failures else 0


def add_record_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxspec compare record FOLDER FILE`; the word `record` is itself the first."""
    parser.add_argument("record", choices=["record"], metavar="record")
    parser.add_argument("folder", type=Path, help="Hugging Face folder that PyTorch runs")
    parser.add_argument("file", type=Path, help="where to save the run (.npz)")
    parser.add_argument(
        "--tokens-only", action="store_true", help="leave out residual streams and logits: a small file"
    )
    _add_sizes(parser)


def run_record(args: argparse.Namespace) -> int:
    runs = load_reference(args.folder, num_prompts=args.num_prompts, new_tokens=args.new_tokens)
    write_record(args.file, runs, tokens_only=args.tokens_only)
    print(f"{len(runs)} runs of {args.new_tokens} tokens in {args.file} ({args.file.stat().st_size / 2**20:.1f} MiB)")
    return 0
