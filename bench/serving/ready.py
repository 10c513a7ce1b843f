"""`bench ready`: how long a start takes until a request can be sent, and what requests sent at once meet.

`jaxspec serve` runs in a process of its own, with a folder for compiled steps that is empty at first: the first start is
cold, those after it are warm. The model's files are in the page cache after the first start (cold means: nothing has been
compiled). Of each start:

- listening: from the start of the process to the line with its address;
- ready: to an answer of 200 at /ready;
- all: to the last executable that was still missing (`buckets_pending` is 0);
- late: of each of these, seconds from when the server began to get them, by its log;
- CPU: seconds of all threads of the process, from start to end.

At ready a number of requests is sent at once, and the same number again when nothing is pending any more: "steady". Time
to first token and inter-token latency of both are reported, and the ratio of their 99th percentiles.

With --demo, `jaxspec demo` is timed too, cold and warm. Other work on the machine counts: the load average at the
beginning of each start is recorded.
"""

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.harness import record
from bench.serving.serve import DEFAULT_VOCAB_SIZE, make_requests, summarise
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from bench.serving.endpoint import Endpoint

_ALL_SECONDS = 900.0
_JAX_CACHE = "JAX_COMPILATION_CACHE_DIR"
_LATE = re.compile(r"(?:compiled|loaded) \d+ of \d+ while serving, after ([\d.]+) s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxspec bench ready [options] [-- flags of jaxspec serve]"
    parser.set_defaults(engine_flags=[], tokenizer=None, ignore_eos=True, temperature=0.0, top_p=1.0)
    add = parser.add_argument
    add("--model", default="demo", metavar="NAME", help="what to serve (default: demo)")
    add("--warm-starts", type=int, default=3, metavar="N", help="starts after the cold one (default: 3)")
    add("--num-requests", type=int, default=32, metavar="N", help="sent at once at ready; 0: none (default: 32)")
    add("--input-len", type=int, default=128, metavar="N", help="tokens of a prompt (default: 128)")
    add("--output-len", type=int, default=64, metavar="N", help="tokens of an answer (default: 64)")
    vocab = f"prompts hold ids below N (default: {DEFAULT_VOCAB_SIZE})"
    add("--vocab-size", type=int, default=DEFAULT_VOCAB_SIZE, metavar="N", help=vocab)
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a request (default: 600)")
    cache = (
        "keeps the compiled steps here, for other benchmarks ($JAXSPEC_CACHE); must be empty (default: a temporary one)"
    )
    add("--cache-folder", type=Path, metavar="FOLDER", help=cache)
    add("--demo", action="store_true", help="also time `jaxspec demo`")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        import httpx  # noqa: F401
    except ImportError as e:
        raise ConfigError('bench ready needs httpx: pip install httpx, or pip install -e ".[test]"') from e
    names = ["cold", *(f"warm {i + 1}" for i in range(arguments.warm_starts))]
    with _folder(arguments.cache_folder) as cache:
        env = _environment(str(cache))
        starts = {name: time_server(arguments, env, seed) for seed, name in enumerate(names)}
    result: dict[str, Any] = {"benchmark": "ready", "model": arguments.model, "serve": starts}
    if arguments.demo:
        with tempfile.TemporaryDirectory() as cache:
            env = _environment(cache)
            result["demo"] = {name: time_demo(env) for name in names}
    print_tables(result)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # only to name the device
    record.write(f"ready_{Path(arguments.model).name}", result, arguments)
    return int(any(burst["failed"] for start in starts.values() for burst in start["requests"].values()))


def _environment(cache: str) -> dict[str, str]:
    """Of a server: without jax's own cache, which would warm a cold start, and costs it time where it is empty."""
    return {name: value for name, value in os.environ.items() if name != _JAX_CACHE} | {"JAXSPEC_CACHE": cache}


@contextmanager
def _folder(kept: Path | None) -> Iterator[Path]:
    """
    Raises:
        ConfigError: the folder that is to be kept has something in it, with which no start would be cold.
    """
    if kept is None:
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder)
        return
    if kept.exists() and (not kept.is_dir() or any(kept.iterdir())):
        raise ConfigError(f"--cache-folder {kept} must be a new or an empty folder: the first start is to be cold")
    yield kept


def time_server(arguments: argparse.Namespace, env: Mapping[str, str], seed: int) -> dict[str, Any]:
    """One start of the server."""
    from bench.serving.endpoint import Endpoint, local_server, server_command

    before, load, started = _cpu_seconds(), os.getloadavg()[0], time.perf_counter()
    listening: list[float] = []
    late: list[float] = []

    def look_for_late(line: str) -> None:
        if found := _LATE.search(line):
            late.append(float(found[1]))

    command = server_command(arguments.model, arguments.engine_flags)
    with local_server(command, env, lambda: listening.append(time.perf_counter()), look_for_late) as server:
        ready = time.perf_counter() - started
        endpoint = Endpoint(server.url, trust_env=False)
        bursts = {}
        if arguments.num_requests:
            bursts["at ready"] = _burst(endpoint, arguments, 2 * seed)
        wait_for_all(endpoint)
        everything = time.perf_counter() - started
        if arguments.num_requests:
            bursts["steady"] = _burst(endpoint, arguments, 2 * seed + 1)
    return {
        "listening_s": round(listening[0] - started, 2),
        "ready_s": round(ready, 2),
        "all_s": round(everything, 2),
        "late_s": late,
        "cpu_s": round(_cpu_seconds() - before, 2),
        "load_average": round(load, 2),
        "requests": bursts,
    }


def time_demo(env: Mapping[str, str]) -> dict[str, float]:
    """One run of `jaxspec demo`.

    Raises:
        ConfigError: it failed.
    """
    before, load, started = _cpu_seconds(), os.getloadavg()[0], time.perf_counter()
    code = "import sys; from serve.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, "demo"], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"jaxspec demo ended with code {done.returncode}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}"
        )
    seconds = time.perf_counter() - started
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(_cpu_seconds() - before, 2),
        "load_average": round(load, 2),
    }


def _cpu_seconds() -> float:
    """Of all processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _burst(endpoint: "Endpoint", arguments: argparse.Namespace, seed: int) -> dict[str, Any]:
    from bench.serving.client import run_load

    lengths = {"input_len": (arguments.input_len,) * 2, "output_len": (arguments.output_len,) * 2}
    options = argparse.Namespace(**vars(arguments) | lengths | {"seed": seed})
    bodies = make_requests(options, endpoint.first_model())
    arrivals = [0.0] * len(bodies)
    outcomes = asyncio.run(
        run_load(
            endpoint.url, endpoint.headers, bodies, arrivals=arrivals, concurrency=None, timeout=arguments.timeout,
            trust_env=False,
        )
    )  # fmt: skip
    return summarise(outcomes)


def wait_for_all(endpoint: "Endpoint") -> None:
    """
    Raises:
        ConfigError: it takes too long, or the server does not say.
    """
    started = time.perf_counter()
    while (pending := endpoint.value("buckets_pending")) != 0:
        if pending is None:
            raise ConfigError("/metrics does not say how many steps are still compiled (buckets_pending)")
        if time.perf_counter() - started > _ALL_SECONDS:
            raise ConfigError(f"the server still compiles {_ALL_SECONDS:.0f} s after it was ready")
        time.sleep(0.1)


def print_tables(result: Mapping[str, Any]) -> None:
    header = ["s", "listening", "ready", "all", "CPU", "load average"]
    keys = ("listening_s", "ready_s", "all_s", "cpu_s", "load_average")
    rows = [[name, *(f"{start[key]:.2f}" for key in keys)] for name, start in result["serve"].items()]
    print(f"jaxspec serve {result['model']}\n{record.table(header, rows)}")
    latencies = {"time_to_first_token": "first token", "inter_token": "between tokens"}
    rows = [
        [name, what, *_compared(start["requests"], latency)]
        for name, start in result["serve"].items()
        if start["requests"]
        for latency, what in latencies.items()
    ]
    if rows:
        print(record.table(["", "ms", "at ready p50", "p99", "steady p50", "p99", "p99 of steady"], rows))
    if "demo" in result:
        rows = [[name, *(f"{value:.2f}" for value in each.values())] for name, each in result["demo"].items()]
        print(f"jaxspec demo\n{record.table(['s', 'whole run', 'CPU', 'load average'], rows)}")


def _compared(bursts: Mapping[str, Any], latency: str) -> list[str]:
    first, steady = (bursts[name]["latency_ms"][latency] for name in ("at ready", "steady"))
    if first is None or steady is None:
        return ["-"] * 5
    ratio = f"{first['p99'] / steady['p99']:.2f}x" if steady["p99"] else "-"
    return [*(f"{each[column]:.1f}" for each in (first, steady) for column in ("p50", "p99")), ratio]
