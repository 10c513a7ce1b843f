"""`jaxspec demo`: the embedded model, decoded plainly and with each of its three drafts, and compared with PyTorch.

Speculation must not change the text, so every decoder has to write what PyTorch wrote, in however few steps.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxspec
from serve.terminal.colors import BOLD, GREEN, PLAIN, wants_escapes

if TYPE_CHECKING:
    from convert.reference import ReferenceRun
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.llm import LLM, Completion
    from jaxspec.text import Tokenizer

# PyTorch's greedy continuations, made by:
#   jaxspec compare record jaxspec/demo/target jaxspec/demo/reference.npz --tokens-only
RECORD = Path(jaxspec.__file__).parent / "demo" / "reference.npz"
SHOWN = 2
RULE = "-" * 80
# One request at a time: that is what a single user sees, and few rows need few and small buckets. float32, because
# texts are compared token by token. Every step has all drafts, which is what is shown.
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 512, "max_num_seqs": 1, "max_num_batched_tokens": 64, "adaptive_speculation": False,
}  # fmt: skip
DECODERS: dict[str, dict[str, Any]] = {
    "plain decoding": {"num_speculative_tokens": 0},
    "MTP layer": {"num_speculative_tokens": 3},
    "EAGLE3, Llama layer": {"num_speculative_tokens": 3, "speculative_model": "demo/eagle3-llama"},
    "EAGLE3, MLA layer": {"num_speculative_tokens": 3, "speculative_model": "demo/eagle3-mla"},
}


@dataclass(frozen=True)
class Result:
    """What one decoder did with all prompts.

    Attributes:
        steps: decode steps, over all prompts.
        acceptance: None without speculation.
        seconds: time to generate.
        equal: continuations that are the same as PyTorch's.
        error: largest difference of a log-probability.
    """

    name: str
    completions: "Sequence[Completion]"
    steps: int
    acceptance: "Acceptance | None"
    seconds: float
    equal: int
    error: float

    @property
    def tokens(self) -> int:
        return sum(len(c.ids) for c in self.completions)


def run(_arguments: argparse.Namespace) -> int:
    """Prints texts, a table of the decoders and their parity; returns 1 if one of them differs from PyTorch."""
    from convert.reference import read_record
    from jaxspec.llm import LLM

    started = time.monotonic()
    reference = read_record(RECORD)
    print(
        "Loading and compiling the embedded demo model, for four decoders (a minute and a half on two CPU cores):",
        flush=True,
    )
    results = []
    for name, options in DECODERS.items():
        began = time.monotonic()
        llm = LLM("demo", **OPTIONS, **options, use_tqdm=False)
        print(f"  {name}: ready after {time.monotonic() - began:.1f} s, ", end="", flush=True)
        results.append(decode(name, llm, reference))
        print(f"{results[-1].tokens} tokens in {results[-1].seconds:.1f} s", flush=True)
    print()
    for label in ("Architecture", "Dtype", "Device", "Kernels"):
        print(f"{label}: {llm.describe()[label]}")
    assert llm.tokenizer is not None
    _print_texts(results, llm.tokenizer)
    print(f"{RULE}\n{table(results)}\n")
    for result in results:
        print(
            f"Parity with PyTorch ({result.name}): {result.equal} of {len(reference)} greedy continuations identical, "
            f"largest difference of a log-probability {result.error:.1e}."
        )
    print(f"Took {time.monotonic() - started:.0f} s in all. Next: jaxspec serve demo")
    return 0 if all(result.equal == len(reference) for result in results) else 1


def decode(name: str, llm: "LLM", reference: "Sequence[ReferenceRun]") -> Result:
    """Continues the reference's prompts greedily."""
    from jaxspec.sampling.params import SamplingParams

    params = [SamplingParams(max_tokens=len(r.new_ids), temperature=0, ignore_eos=True, logprobs=0) for r in reference]
    began = time.monotonic()
    completions = llm.generate([r.prompt_ids for r in reference], params, use_tqdm=False)
    return Result(
        name,
        completions,
        steps=sum(map(_steps, completions)),
        acceptance=llm.engine.stats().acceptance,
        seconds=time.monotonic() - began,
        equal=sum(c.ids == r.new_ids for c, r in zip(completions, reference, strict=True)),
        error=max(
            abs(ours - theirs)
            for c, r in zip(completions, reference, strict=True)
            for ours, theirs, a, b in zip(c.logprobs or (), r.logprobs, c.ids, r.new_ids, strict=True)
            if a == b
        ),
    )


def _print_texts(results: Sequence[Result], tokenizer: "Tokenizer") -> None:
    """The first prompts as each decoder continued them; a text that repeats is named, not printed again."""
    color = wants_escapes(sys.stdout)
    print("\nThe same prompts with each decoder" + (f"; {GREEN}accepted drafts{PLAIN} are green." if color else "."))
    for prompt in range(SHOWN):
        print(RULE)
        shown = None
        for result in results:
            completion = result.completions[prompt]
            text = show(completion, tokenizer, color=color)
            same = "; the same text" if text == shown else ""
            print(f"[{result.name}: {_figures(completion)}{same}]" + ("" if same else f"\n{text}"))
            shown = text


def _steps(completion: "Completion") -> int:
    """Decode steps of one completion; prefill yields its first token."""
    return completion.acceptance.num_steps if completion.acceptance else len(completion.ids) - 1


def _figures(completion: "Completion") -> str:
    text = f"{len(completion.ids)} tokens in {_steps(completion)} decode steps"
    if completion.acceptance is None or completion.acceptance.mean_length is None:
        return text
    return f"{text}, acceptance length {completion.acceptance.mean_length:.2f}"


def show(completion: "Completion", tokenizer: "Tokenizer", *, color: bool) -> str:
    """Prompt and text; with colour, the prompt bold and accepted drafts green."""
    prompt, text = tokenizer.decode(completion.prompt_ids), completion.text or ""
    if not color:
        return prompt + text
    borders = [*completion.text_offsets, len(text)]
    pieces = [f"{BOLD}{prompt}{PLAIN}"]
    for accepted, run_ in itertools.groupby(range(len(completion.ids)), key=completion.accepted.__getitem__):
        indices = list(run_)
        piece = text[borders[indices[0]] : borders[indices[-1] + 1]]
        pieces.append(f"{GREEN}{piece}{PLAIN}" if accepted else piece)
    return "".join(pieces)


def table(results: Sequence[Result]) -> str:
    """One line per decoder; plain decoding is the first of `results`."""
    plain = results[0]
    lines = [("decoder", "acceptance length", "drafts accepted", "decode steps", "of plain", "tokens/s", "as PyTorch")]
    for result in results:
        stats = result.acceptance
        lines.append(
            (
                result.name,
                f"{stats.mean_length:.2f}" if stats else "1",
                f"{100 * (stats.rate or 0):.0f} %" if stats else "-",
                str(result.steps),
                f"{100 * result.steps / plain.steps:.0f} %",
                f"{result.tokens / result.seconds:.0f}",
                f"{result.equal} of {len(result.completions)}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"{first:<{widths[0]}}  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths[1:], strict=True))
        for first, *cells in lines
    )
