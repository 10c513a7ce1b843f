"""`jaxspec compare`: its arguments, its progress and what it prints."""

import argparse
import json
from contextlib import closing
from functools import partial
from pathlib import Path

from convert.compare import Collector, Comparison, Report
from convert.compare_drafts import DraftsReport
from convert.progress import Progress, console
from convert.reference import Reference, write_record
from convert.torch_drafts import DraftChoice
from jaxspec.config import DEFAULT_SPECULATIVE_TOKENS
from jaxspec.errors import JaxspecError, writing
from jaxspec.loading.resolve import resolve_model
from jaxspec.progress import LOADING

# dtype -> (largest absolute logit error, least top-1 agreement, greedy continuations must be equal)
THRESHOLDS = {"float32": (2e-4, 1.0, True), "bfloat16": (float("inf"), 0.95, False)}

# Of drafts that differ.
MOST_SHOWN = 10


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
    if report.drafts is not None:
        _print_drafts(report.drafts)


def _print_drafts(drafts: DraftsReport) -> None:
    if drafts.input.errors.count:
        print(f"{'draft':<22} {'max error':>10} {'RMS error':>10} {'RMS value':>10}")
        for stage in drafts.stages:
            errors = stage.errors
            print(f"{stage.name:<22} {errors.maximum:>10.2e} {errors.rms:>10.2e} {stage.values.rms:>10.2e}")
    print(
        f"drafts: {drafts.identical} of {drafts.windows} identical, {drafts.agreed} of {drafts.tokens} ids that follow "
        "equal ones"
    )
    for d in drafts.divergences[:MOST_SHOWN]:
        gap = "" if d.gap is None else f", logit gap {d.gap:.3g}"
        print(f"  prompt {d.prompt}, after new token {d.new_token}: draft {d.step} of {d.expected} became {d.got}{gap}")
    if len(drafts.divergences) > MOST_SHOWN:
        print(f"  and {len(drafts.divergences) - MOST_SHOWN} others")


def _add_sizes(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--num-prompts", type=int, default=16, help="prompts to compare (default: 16)")
    parser.add_argument("--new-tokens", type=int, default=64, help="greedy tokens per prompt (default: 64)")
    parser.add_argument(
        "--speculative-model", metavar="DRAFT", help="also compare this EAGLE3 draft: its hidden states, logits and ids"
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="steps of the draft, which without --speculative-model is the model's MTP layer "
        f"(default: {DEFAULT_SPECULATIVE_TOKENS} with --speculative-model, else no draft)",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `jaxspec compare MODEL --reference ...`."""
    parser.epilog = "`jaxspec compare record FOLDER FILE` saves PyTorch's runs for machines without PyTorch."
    parser.add_argument("model", help="what jaxspec runs: demo, a converted folder, a Hugging Face folder or a hub id")
    parser.add_argument(
        "--reference", type=Path, required=True, help="Hugging Face folder, or a file made by `compare record`"
    )
    parser.add_argument(
        "--draft-reference",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder of the draft that PyTorch runs (default: that of --speculative-model)",
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
    draft = _draft_choice(args, args.draft_reference)
    reference = Reference(args.reference, num_prompts=args.num_prompts, new_tokens=args.new_tokens, draft=draft)
    report = _compare(args, reference, draft.steps if draft else 0)
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


def _draft_choice(args: argparse.Namespace, folder: Path | None) -> DraftChoice | None:
    """The draft that PyTorch runs, and for how many steps; None without one.

    Args:
        folder: of the draft, where it is not that of --speculative-model.
    """
    steps = args.num_speculative_tokens
    if steps is None:
        steps = DEFAULT_SPECULATIVE_TOKENS if args.speculative_model else 0
    if steps < 0 or (not steps and (args.speculative_model or folder)):
        raise JaxspecError(f"--num-speculative-tokens {steps}: a draft is compared in at least one step")
    if not steps:
        return None
    if args.speculative_model is None:
        if folder:
            raise JaxspecError("--draft-reference is for EAGLE3 drafts: name the draft with --speculative-model")
        return DraftChoice(None, steps)
    return DraftChoice(folder or resolve_model(args.speculative_model), steps)


def _compare(args: argparse.Namespace, reference: Reference, drafts: int) -> Report:
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
            max_model_len=reference.longest + drafts + 1,  # drafts after the last token have pages too
            max_num_seqs=max(min(args.max_num_seqs, args.max_num_batched_tokens // (drafts + 1)), 1),
            max_num_batched_tokens=args.max_num_batched_tokens,
            num_speculative_tokens=drafts,
            speculative_model=args.speculative_model,
            adaptive_speculation=False,  # every step has all drafts
            enable_prefix_caching=False,  # the collector reads every token of every prompt
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
    reference = Reference(
        args.folder, num_prompts=args.num_prompts, new_tokens=args.new_tokens, draft=_draft_choice(args, None)
    )
    with closing(console()) as progress:
        runs = [run for group in reference.groups(progress) for run in group]
    with writing(args.file):
        write_record(args.file, runs, tokens_only=args.tokens_only)
    print(f"{len(runs)} runs of {args.new_tokens} tokens in {args.file} ({args.file.stat().st_size / 2**20:.1f} MiB)")
    return 0
