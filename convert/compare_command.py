"""`jaxspec compare`: its arguments, its progress and what it prints."""

import argparse
import json
from contextlib import closing
from functools import partial
from pathlib import Path

from convert.compare import Collector, Comparison, Report
from convert.progress import Progress, console
from convert.reference import Reference, write_record
from jaxspec.errors import writing
from jaxspec.progress import LOADING

# dtype -> (largest absolute logit error, least top-1 agreement, greedy continuations must be equal)
THRESHOLDS = {"float32": (2e-4, 1.0, True), "bfloat16": (float("inf"), 0.95, False)}


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


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts to compare (default: 16)")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens per prompt (default: 64)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxspec compare MODEL --reference ...`."""
    parser.epilog = "`jaxspec compare record FOLDER FILE` saves PyTorch's runs for machines without PyTorch."
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
    """Prints the comparison; 1 where a threshold is not met."""
    reference = Reference(args.reference, num_prompts=args.num_prompts, new_tokens=args.new_tokens)
    report = _compare(args, reference)
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
            with writing(args.json):
                args.json.write_text(figures + "\n")
        for failure in failures:
            print(f"FAIL: {failure}")
        if not failures:
            print("PASS")
    return 1 if failures else 0


def _compare(args: argparse.Namespace, reference: Reference) -> Report:
    """Runs both sides in turns and shows how far they are, with the figures so far after each group of prompts."""
    from jaxspec.llm import LLM

    theirs, ours = console(), console()
    collector = Collector()
    with closing(console()) as compiling:
        llm = LLM(
            args.model,
            probe=True,
            observer=collector,
            progress=_Compiling(compiling),
            dtype=args.dtype,
            max_model_len=reference.longest + 1,
            max_num_seqs=min(args.max_num_seqs, args.max_num_batched_tokens),
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_speculative_tokens=0,  # the collector reads one token of each decode row
            enable_prefix_caching=False,  # and every token of every prompt
        )
    comparison = Comparison(llm, collector)
    with closing(theirs), closing(ours):
        for i, runs in enumerate(reference.groups(theirs)):
            if not i:
                ours.start("jaxspec", reference.positions, "tokens")
            before = comparison.report.prompts
            collector.on_positions = partial(ours.advance, f"prompts {before + 1} to {before + len(runs)}")
            comparison.add(runs)
            done, total = comparison.report.prompts, len(reference.prompts)
            if done < total:
                ours.note(f"{done} of {total} prompts: {comparison.report.summary()}")
    return comparison.report


class _Compiling:
    """Shows what `LLM` reports while it compiles."""

    def __init__(self, progress: Progress):
        self._progress = progress
        self._done: int | None = None

    def __call__(self, done: int, total: int, what: str) -> None:
        if what.startswith(LOADING):  # seconds, where the two models' runs take minutes
            return
        if self._done is None:
            self._progress.start("Compiling", total, "buckets")
        self._progress.advance(what, done - (self._done or 0))
        self._done = done


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
    reference = Reference(args.folder, num_prompts=args.num_prompts, new_tokens=args.new_tokens)
    with closing(console()) as progress:
        runs = [run for group in reference.groups(progress) for run in group]
    with writing(args.file):
        write_record(args.file, runs, tokens_only=args.tokens_only)
    print(f"{len(runs)} runs of {args.new_tokens} tokens in {args.file} ({args.file.stat().st_size / 2**20:.1f} MiB)")
    return 0
