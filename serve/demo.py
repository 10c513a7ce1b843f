"""`jaxspec demo`: converts the embedded model, generates from three prompts and checks the text against PyTorch's."""

import argparse
import os
import sys
import time
from pathlib import Path

import jaxspec

# PyTorch's greedy continuations, made by:
#   jaxspec compare record jaxspec/demo/target jaxspec/demo/reference.npz --tokens-only
RECORD = Path(jaxspec.__file__).parent / "demo" / "reference.npz"
SHOWN = 3
RULE = "-" * 80


def run(_arguments: argparse.Namespace) -> int:
    """Prints prompts, texts, speed and the parity line; 1 where jaxspec and PyTorch differ."""
    from convert.reference import read_record
    from jaxspec.llm import LLM
    from jaxspec.sampling.params import SamplingParams

    started = time.monotonic()
    reference = read_record(RECORD)
    print("Converting and compiling the embedded demo model (about half a minute on two CPU cores) ...", flush=True)
    # float32, because parity is checked token by token.
    llm = LLM(
        "demo",
        dtype="float32",
        max_model_len=512,
        progress=lambda done, total, what: print(f"  [{done}/{total}] {what}", flush=True),
    )
    print(f"Ready after {time.monotonic() - started:.1f} s.\n")
    for label, value in llm.describe().items():
        print(f"{label}: {value}")

    assert llm.tokenizer is not None
    params = [SamplingParams(max_tokens=len(r.new_ids), temperature=0, ignore_eos=True, logprobs=0) for r in reference]
    began = time.monotonic()
    completions = llm.generate([r.prompt_ids for r in reference], params)
    seconds = time.monotonic() - began
    for completion in completions[:SHOWN]:
        prompt = llm.tokenizer.decode(completion.prompt_ids)
        print(f"\n{RULE}\n{prompt}{_bold(completion.text or '')}")
    tokens = sum(len(c.ids) for c in completions)
    print(f"{RULE}\n{tokens} tokens of {len(completions)} prompts in {seconds:.2f} s: {tokens / seconds:.0f} tokens/s")

    equal = sum(c.ids == r.new_ids for c, r in zip(completions, reference, strict=True))
    error = max(
        abs(ours - theirs)
        for c, r in zip(completions, reference, strict=True)
        for ours, theirs, a, b in zip(c.logprobs or (), r.logprobs, c.ids, r.new_ids, strict=True)
        if a == b
    )
    print(
        f"Parity with PyTorch: {equal} of {len(reference)} greedy continuations identical, "
        f"largest difference of a log-probability {error:.1e}."
    )
    print(f"Took {time.monotonic() - started:.0f} s in all. Next: jaxspec serve demo")
    return 0 if equal == len(reference) else 1


def _bold(text: str) -> str:
    """What the model wrote, set apart from the prompt on a terminal."""
    return f"\033[1m{text}\033[0m" if sys.stdout.isatty() and "NO_COLOR" not in os.environ else text
