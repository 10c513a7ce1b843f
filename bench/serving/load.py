"""`bench load`: throughput and time to first token by how many requests run at once, beside another server's.

The server is the one at --url, or a `jaxspec serve` of this checkout with the flags after `--`, measured once all its
steps are compiled. A closed loop: each number of --concurrency is kept running until --rounds times as many requests
(but at least 8) have been answered in full. Prompts are random ids, and the same for every server, but other ones in each
repeat, so that no prefix cache helps. The first pass is not counted.

Reported of each number are medians over the repeats. To compare, measure both servers on one machine, one after the
other, and give the second run the first one's record as --peer. Then ratios are judged at every number of requests: output
tokens a second, and the time to first token; the command fails where a gate is not met.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import record
from bench.harness.arguments import numbers
from bench.serving import serve
from bench.serving.senders import Senders, default_count
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from bench.serving.endpoint import Endpoint

_FEWEST_REQUESTS = 8
# Headings and where a run's summary has them.
_COLUMNS = {
    "tokens/s": ("output_tokens_per_s",),
    "first token p50": ("latency_ms", "time_to_first_token", "p50"),
    "first token p99": ("latency_ms", "time_to_first_token", "p99"),
    "between p50": ("latency_ms", "inter_token", "p50"),
    "between p99": ("latency_ms", "inter_token", "p99"),
}
# Of our figures over the peer's: at least, or at most, the gate; and the goal.
_GATES = {
    "tokens/s": ("at least", 1.15, 1.3),
    "first token p50": ("at most", 1.0, 1.0),
    "first token p99": ("at most", 1.0, 1.0),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxspec bench load [options] [-- flags of jaxspec serve]"
    parser.set_defaults(engine_flags=[], tokenizer=None, ignore_eos=True)
    add = parser.add_argument
    add("--url", metavar="URL", help="a running server (default: start `jaxspec serve MODEL`, and stop it afterwards)")
    add("--model", metavar="NAME", help="with --url the name in requests, else what to serve (default: demo)")
    add("--device", metavar="TEXT", help="with --url: what the server runs on, for the record")
    add("--concurrency", type=numbers, default=[1, 8, 32, 64, 128], metavar="N,N,...", help="default: 1,8,32,64,128")
    add("--repeats", type=int, default=3, metavar="N", help="of each number (default: 3)")
    add("--rounds", type=int, default=3, metavar="N", help="requests over those at once (default: 3)")
    add("--input-len", type=serve.lengths, default=(1024, 1024), metavar="N|MIN:MAX", help="default: 1024")
    add("--output-len", type=serve.lengths, default=(256, 256), metavar="N|MIN:MAX", help="default: 256")
    add("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    add("--top-p", type=float, default=1.0, metavar="X", help="default: 1")
    vocab = f"prompts hold ids below N (default: {serve.DEFAULT_VOCAB_SIZE})"
    add("--vocab-size", type=int, default=serve.DEFAULT_VOCAB_SIZE, metavar="N", help=vocab)
    processes = "processes that send them (default: half of the cores, at most 8)"
    add("--senders", type=int, default=default_count(), metavar="N", help=processes)
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a request (default: 600)")
    add("--peer", type=Path, metavar="FILE", help="another server's record, to show ratios to")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.senders < 1:
        raise ConfigError("--senders must be at least 1")
    try:
        import httpx  # noqa: F401
    except ImportError as e:
        raise ConfigError('bench load needs httpx: pip install httpx, or pip install -e ".[test]"') from e
    from bench.serving import endpoint as server
    from bench.serving.ready import wait_for_all

    peer = read_peer(arguments.peer, load_of(arguments)) if arguments.peer else None
    if arguments.url:
        if arguments.engine_flags:
            raise ConfigError("flags after -- are for a server that the benchmark starts: leave them or --url out")
        endpoint = server.Endpoint(arguments.url)
        result = measure(endpoint, arguments, arguments.model or endpoint.first_model())
    else:
        with server.local_server(server.server_command(arguments.model or "demo", arguments.engine_flags)) as local:
            endpoint = server.Endpoint(local.url, trust_env=False)
            wait_for_all(endpoint)
            result = measure(endpoint, arguments, endpoint.first_model())
        # Only to name the device in the record: this process needs hardly any of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if peer is not None:
        result["gates"] = gates(result["medians"], peer["medians"])
    print_table(result, peer)
    record.write(f"load_{Path(result['model']).name}", result, arguments, with_device=not arguments.url)
    wrong = any(run["failed"] or run["refused"] for runs in result["runs"].values() for run in runs)
    return int(wrong or not all(gate["met"] for gate in result.get("gates", [])))


def gates(
    ours: Mapping[str, Mapping[str, float | None]], theirs: Mapping[str, Mapping[str, float | None]]
) -> list[dict[str, Any]]:
    """Each gate: the worst ratio over the numbers of requests at once that both have, where it is, and whether it is met.

    A figure that one of the two lacks, since no answer was complete, meets no gate.

    Args:
        ours, theirs: `medians` by the number of requests at once, as text.
    """
    both = [count for count in ours if count in theirs]
    out = []
    for name, (sense, bound, goal) in _GATES.items():
        ratios: list[tuple[float, str]] = []
        for count in both:
            our, their = ours[count][name], theirs[count][name]
            missing = 0.0 if sense == "at least" else math.inf
            ratios.append((our / their if our is not None and their else missing, count))
        if ratios:
            worst, at = (min if sense == "at least" else max)(ratios)
            met = worst >= bound if sense == "at least" else worst <= bound
            figure = round(worst, 4) if math.isfinite(worst) else None
            of_counts = {"worst": figure, "at_once": int(at), "numbers_at_once": len(ratios)}
            out.append({"gate": f"{name} over the peer's", **of_counts, "bound": bound, "goal": goal, "met": met})
    return out


def load_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """What two records must have in common to be compared."""
    lengths = {name: list(getattr(arguments, name)) for name in ("input_len", "output_len")}
    return {"rounds": arguments.rounds, "temperature": arguments.temperature, "top_p": arguments.top_p, **lengths}


def read_peer(path: Path, load: Mapping[str, Any]) -> dict[str, Any]:
    """
    Raises:
        ConfigError: the file is no record of this benchmark, or of another load.
    """
    try:
        peer = json.loads(path.read_text())
        theirs = {name: peer["load"][name] for name in load}
    except OSError as e:
        raise ConfigError(f"cannot read --peer {path}: {e.strerror}") from e
    except (ValueError, LookupError, TypeError) as e:
        raise ConfigError(f"--peer {path} is not a record of bench load") from e
    if different := [f"{name} {theirs[name]}, here {load[name]}" for name in load if theirs[name] != load[name]]:
        raise ConfigError(f"--peer {path} has another load: {'; '.join(different)}")
    return peer


def measure(endpoint: "Endpoint", arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """All runs against a server that is ready, by number of requests at once (as text, as in JSON)."""
    runs: dict[str, list[dict[str, Any]]] = {str(count): [] for count in arguments.concurrency}
    with Senders(arguments.senders) as senders:
        for count in arguments.concurrency:
            _once(senders, endpoint, arguments, model, count, seed=0, rounds=1)
        for repeat in range(arguments.repeats):
            for count in arguments.concurrency:
                runs[str(count)].append(_once(senders, endpoint, arguments, model, count, 1 + repeat, arguments.rounds))
    return {
        "benchmark": "load",
        "model": model,
        "server": endpoint.version(),
        "device_of_server": arguments.device,
        "load": load_of(arguments),
        "senders": arguments.senders,
        "medians": {count: medians(each) for count, each in runs.items()},
        "runs": runs,
    }


def _once(
    senders: Senders,
    endpoint: "Endpoint",
    arguments: argparse.Namespace,
    model: str,
    count: int,
    seed: int,
    rounds: int,
) -> dict[str, Any]:
    # Other prompts for each number too: seeds of requests follow each other.
    requests = {"num_requests": max(_FEWEST_REQUESTS, rounds * count), "seed": 1_000_000 * seed + 1000 * count}
    bodies = serve.make_requests(argparse.Namespace(**vars(arguments) | requests), model)
    return serve.summarise(senders.send(endpoint, bodies, count, arguments.timeout))


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """The figures of the table; None where a run has none, since no answer was complete."""

    def value(run: Mapping[str, Any], path: Sequence[str]) -> float | None:
        found: Any = run
        for name in path:
            found = None if found is None else found[name]
        return found

    figures = {name: [value(run, path) for run in runs] for name, path in _COLUMNS.items()}
    return {
        name: None if None in each else statistics.median(number for number in each if number is not None)
        for name, each in figures.items()
    }


def print_table(result: Mapping[str, Any], peer: Mapping[str, Any] | None) -> None:
    names = list(next(iter(result["medians"].values())))
    rows = [[count, *map(_shown, figures.values())] for count, figures in result["medians"].items()]
    print(f"{result['model']}, medians of {len(next(iter(result['runs'].values())))}; ms")
    print(record.table(["at once", *names], rows))
    if peer is None:
        return
    both = [count for count in result["medians"] if count in peer["medians"]]
    ratios = [
        [count, *(_ratio(result["medians"][count][n], peer["medians"][count][n]) for n in names)] for count in both
    ]
    print(f"over {peer['model']} of --peer\n{record.table(['at once', *names], ratios)}")
    for gate in result["gates"]:
        worst = "a figure is missing" if gate["worst"] is None else f"{gate['worst']:g}"
        where = f"{worst} at {gate['at_once']} at once, bound {gate['bound']:g}, goal {gate['goal']:g}"
        print(f"{'met' if gate['met'] else 'NOT met'}: {gate['gate']} ({where}, {gate['numbers_at_once']} numbers)")


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.1f}"


def _ratio(ours: float | None, theirs: float | None) -> str:
    return f"{ours / theirs:.2f}" if ours and theirs else "-"
