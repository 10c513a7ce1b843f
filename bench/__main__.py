"""`jaxspec bench` and `python -m bench`: one entry point for every benchmark of the engine."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from jaxspec.errors import JaxspecError

COMMANDS = {
    "kernel": "one kernel by itself: MLA decode beside FlashMLA and FlashAttention-3, MLA prefill, GQA, experts, cache writes",
    "tune": "candidates for what measurements decide in the kernels, on this kind of device",
    "sanitize": "compute-sanitizer over a small GPU test of each kernel",
    "step": "time, dispatch time and byte floor of plain steps and of MTP cycles, through the production runner",
    "step_vllm": "vLLM's steps, cycles and prompt rates on a random checkpoint, to stand beside those of step",
    "readout": "what reading steps late gains, and what a long prompt costs running decodes, mixed and separate",
    "cycle": "time of a speculative cycle by draft, with and without the catch-up skip, and where it goes",
    "speculation": "greedy text with speculation against plain greedy text, acceptance and tokens/s of each draft",
    "convert": "conversion and loading of a generated checkpoint: MB/s and peak memory",
    "parity": "next-token agreement with PyTorch in float32, of PyTorch in bfloat16 and of jaxspec in bfloat16",
    "serve": "load on an OpenAI-compatible server: latencies at the client, throughput, refusals, acceptance",
    "timeline": "a step log (jaxspec serve --log-steps FILE) as an SVG picture, with a summary",
    "draft_ids": "drafted tokens of MTP and EAGLE3 beside vLLM's, on random checkpoints",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark and returns its exit code: 1 for an error that the user can mend, and for what it finds wrong."""
    parser = argparse.ArgumentParser(
        prog="jaxspec bench", description="Benchmarks; each prints a table and writes JSON."
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    argv = list(sys.argv[1:] if argv is None else argv)
    for name, text in COMMANDS.items():
        sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if argv[:1] == [name]:  # the others' imports are heavy
            module = importlib.import_module(f"bench.{name}")
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    # Behind `--` are flags for a program that the benchmark starts. Cut here: argparse would take them for positionals.
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = parser.parse_args(argv[:cut])
    if argv[cut + 1 :]:
        if not hasattr(arguments, "engine_flags"):
            parser.error(f"{arguments.command} takes no flags after --")
        arguments.engine_flags = argv[cut + 1 :]
    # As Ctrl-C does, so that what a benchmark has started ends with it.
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        return arguments.run(arguments)
    except JaxspecError as e:
        print(f"error: {e}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
