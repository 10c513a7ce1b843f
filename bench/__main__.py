"""`jaxspec bench` and `python -m bench`: one entry point for every benchmark of the engine."""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

from jaxspec.errors import JaxspecError, plain

# The commands of each room, each with a module of its name there.
ROOMS = {
    "kernel": {
        "kernel": "one kernel by itself (attention, experts, cache writes, sampling ...), MLA decode also beside "
        "FlashMLA and FlashAttention-3",
        "comm": "sums over the GPUs of this machine, by size and by what makes them",
        "tune": "which candidates of the kernels' measured choices are the fastest on this kind of device",
        "sanitize": "compute-sanitizer over a small GPU test of each kernel",
    },
    "step": {
        "step": "time, dispatch time and byte floor of plain steps and of MTP cycles, through the production runner",
        "step_vllm": "vLLM's steps, cycles and prompt rates on a random checkpoint, for comparison with those of step",
        "readout": "what late readout gains, and what a long prompt costs running decodes, mixed and separate",
        "cycle": "time of a speculative cycle by draft, with and without the catch-up skip, and where it goes",
        "sampling": "steps in which every row has top_p, penalties, alternatives ..., over greedy ones",
        "grammar": "steps of which half the rows have a grammar, over those of the same batch without, by kind of row",
        "lookup": "tokens/s of drafts that are looked up, beside MTP and none, on traces of agents with given answers",
        "adaptive": "throughput of drafting that follows the load, beside no drafts and fixed numbers of them",
        "compiled": "the kernels of a step, counted by compiling it for a GPU that need not be there",
        "plan": "bytes and expected steps of DeepSeek-V3 and Kimi-K2 on 1 to 8 H200s, computed and not measured",
        "timeline": "a step log (jaxspec serve --log-steps FILE) as an SVG picture, with a summary",
    },
    "serving": {
        "serve": "load on an OpenAI-compatible server: latencies at the client, throughput, refusals, acceptance",
        "load": "throughput and time to first token by how many requests run at once, beside another server's",
        "ready": "a server's start, cold and warm, and what requests sent at once meet",
        "events": "processor time that an event of a stream costs the event loop and the engine's thread",
        "health": "how fast /health answers, and what memory the server takes, while it reads the biggest bodies",
        "convert": "conversion and loading of a generated checkpoint: MB/s and peak memory",
    },
    "accuracy": {
        "parity": "next-token agreement with PyTorch in float32, of PyTorch in bfloat16 and of jaxspec in bfloat16",
        "speculation": "greedy text with speculation against plain greedy text, acceptance and tokens/s of each draft",
        "quantised": "what quantising costs the demo model: held-out nats, next tokens, drafts accepted",
        "traces": "drafts accepted on traces of agents (copied and edited code), by what proposes them",
        "draft_ids": "drafted tokens of MTP and EAGLE3 beside vLLM's, on random checkpoints",
    },
}


def parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands. The one that `argv` begins with has its arguments: the others' imports are heavy."""
    whole = argparse.ArgumentParser(
        prog="jaxspec bench", description="Benchmarks; each prints a table and writes JSON."
    )
    subparsers = whole.add_subparsers(dest="command", metavar="COMMAND")
    for room, commands in ROOMS.items():
        for name, text in commands.items():
            sub = subparsers.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
            if argv[:1] == [name]:
                module = importlib.import_module(f"bench.{room}.{name}")
                module.add_arguments(sub)
                sub.set_defaults(run=module.run)
    return whole


def print_commands() -> None:
    """Every command with what it is for, one line each."""
    print("usage: jaxspec bench COMMAND [options]; jaxspec bench COMMAND --help lists a command's options\n")
    width = max(len(name) for commands in ROOMS.values() for name in commands)
    for commands in ROOMS.values():
        for name, text in commands.items():
            print(f"  {name:<{width}}  {text}")
    print(
        "\nEach prints a table and writes JSON to the current folder (in the repository: to bench/results), or to --out."
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one benchmark; returns its exit code.

    1 for an error that the user can fix, and for a check that fails; 2 for a benchmark that there is not.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    known = [name for commands in ROOMS.values() for name in commands]
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        print(f"error: unknown benchmark {plain(argv[0])} (there are {', '.join(known)})", file=sys.stderr)
        return 2
    commands = parser(argv)
    # After `--` come flags for a program that the benchmark starts. Cut here: argparse would read them as positionals.
    cut = argv.index("--") if "--" in argv else len(argv)
    arguments = commands.parse_args(argv[:cut])
    if arguments.command is None:
        print_commands()
        return 0
    if argv[cut + 1 :]:
        if not hasattr(arguments, "engine_flags"):
            commands.error(f"{arguments.command} does not accept flags after --")
        arguments.engine_flags = argv[cut + 1 :]
    # As Ctrl-C does, so that whatever a benchmark has started ends with it.
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
