"""`bench health`: how fast /health answers, and what memory the server takes, while it reads the biggest bodies.

A `jaxspec serve` of this checkout (flags after `--`) is sent every body of bench/serving/big_bodies.py, valid or not, then
random ones, each after the answer to the one before, then some at once. Meanwhile another process asks for /health every
10 ms over one connection; first it does so while nothing else happens, which tells what the machine itself is good for.

Memory is the process's peak beyond what it held before the first body, as the kernel counts it (VmHWM and VmRSS of /proc,
Linux only): what stays with it after a body counts for all later ones.

The exit code is 1 if, of bodies one at a time, the 99th percentile of /health is over --most-ms, a body takes over
--most-mib, or an answer is none that the API describes. Bodies at once are reported only.
"""

import argparse
import http.client
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from bench.harness import record
from bench.serving.big_bodies import BODIES, made, random_body
from bench.serving.poll import TIMEOUT, poll_health
from jaxspec.errors import ConfigError

Body = tuple[str, Callable[[], tuple[str, bytes]]]  # its name, and what makes its path and content
_IDLE_SECONDS = 3.0
_AT_ONCE = 6
_DESCRIBED = {200, 400, 404, 413, 429, 503}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxspec bench health [options] [-- flags of jaxspec serve]"
    parser.set_defaults(engine_flags=[])
    add = parser.add_argument
    add("--model", default="demo", metavar="NAME", help="what to serve (default: demo)")
    add("--only", metavar="WORD", default="", help="bodies with this in their names (default: all)")
    add("--random", type=int, default=100, metavar="N", help="random bodies (default: 100)")
    add("--repeats", type=int, default=3, metavar="N", help="rounds over all of it (default: 3)")
    add("--most-ms", type=float, default=50.0, metavar="X", help="for /health, at the 99th percentile (default: 50)")
    add("--most-mib", type=float, default=200.0, metavar="X", help="of memory for a body (default: 200)")
    record.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from bench.serving import endpoint

    bodies: list[Body] = [(name, partial(made, name)) for name in BODIES if arguments.only in name]
    bodies_at_random: list[Body] = [(f"seed {seed}", partial(random_body, seed)) for seed in range(arguments.random)]
    if not bodies:
        raise ConfigError(f"--only {arguments.only}: no body has that in its name")
    rounds = []
    with endpoint.local_server(endpoint.server_command(arguments.model, arguments.engine_flags)) as local:
        server = Server(local.url, local.pid)
        for path in {BODIES[name][0] for name, _ in bodies}:
            server.send(path, b"{}")  # what the first request of a kind loads is no body's share
        server.begin()
        for _ in range(arguments.repeats):
            began = os.getloadavg()[0]
            parts = {
                "idle": measure(server, []),
                "one at a time": measure(server, bodies),
                "random": measure(server, bodies_at_random),
                "at once": measure(server, bodies, at_once=_AT_ONCE),
            }
            rounds.append({"load_average": [round(began, 2), round(os.getloadavg()[0], 2)], "parts": parts})
    print_table(rounds)
    wrong = failures(rounds, arguments.most_ms, arguments.most_mib)
    for line in wrong:
        print(line)
    result = {"model": arguments.model, "rounds": rounds, "failures": wrong}
    record.write(f"health_{Path(arguments.model).name}", result, arguments, with_device=False)
    return 1 if wrong else 0


class Server:
    """The server under test, by its address and its process."""

    def __init__(self, url: str, pid: int):
        parts = urlsplit(url)
        self.address = (str(parts.hostname), int(parts.port or 80))
        self._proc = Path(f"/proc/{pid}")
        self._before = 0.0

    def begin(self) -> None:
        """Memory is counted from here on."""
        self._before = self._mib("VmRSS")

    def send(self, path: str, content: bytes) -> int:
        """The status of the answer, which is read to its end; 0 without one."""
        with closing(http.client.HTTPConnection(*self.address, timeout=TIMEOUT)) as connection:
            try:
                connection.request("POST", path, content, {"content-type": "application/json"})
                response = connection.getresponse()
                response.read()
            except (OSError, http.client.HTTPException):
                return 0
            return response.status

    def forget_peak(self) -> None:
        (self._proc / "clear_refs").write_text("5")

    def peak(self) -> float:
        """MiB since it was forgotten, beyond what there was at the beginning."""
        return self._mib("VmHWM") - self._before

    def _mib(self, name: str) -> float:
        lines = (self._proc / "status").read_text().splitlines()
        return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1024


def measure(server: Server, bodies: Sequence[Body], *, at_once: int = 1) -> dict[str, Any]:
    """Latencies of /health while the bodies are sent, the most memory while one of them was, and the answers."""
    answers: Counter[int] = Counter()
    most = (0.0, "")

    def work() -> None:
        nonlocal most
        if not bodies:
            time.sleep(_IDLE_SECONDS)
        for start in range(0, len(bodies), at_once):
            group = [make() for _, make in bodies[start : start + at_once]]
            server.forget_peak()
            with ThreadPoolExecutor(at_once) as pool:
                answers.update(pool.map(server.send, *zip(*group, strict=True)))
            most = max(most, (server.peak(), bodies[start][0]))

    milliseconds = 1e3 * np.array(health_while(server.address, work))
    p50, p90, p99 = np.percentile(milliseconds, [50, 90, 99])
    return {
        "health_requests": len(milliseconds),
        "p50_ms": round(float(p50), 2),
        "p90_ms": round(float(p90), 2),
        "p99_ms": round(float(p99), 2),
        "max_ms": round(float(milliseconds.max()), 2),
        "most_mib": round(most[0], 1),
        "most_mib_by": most[1],
        "answers": {str(status): count for status, count in sorted(answers.items())},
    }


def health_while(address: tuple[str, int], work: Callable[[], None]) -> list[float]:
    """Seconds of every /health while `work` is done, asked by a process of its own: `work` may keep this one busy."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    done = context.Event()
    process = context.Process(target=poll_health, args=(address, done, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        mine.recv()  # it has begun
        work()
        done.set()
        return mine.recv()
    except EOFError as e:
        raise ConfigError("/health did not answer") from e
    finally:
        process.join(1)
        process.kill()


def failures(rounds: Sequence[dict[str, Any]], most_ms: float, most_mib: float) -> list[str]:
    wrong = []
    for i, each in enumerate(rounds):
        for name, part in each["parts"].items():
            where = f"round {i + 1}, {name}"
            if unknown := set(map(int, part["answers"])) - _DESCRIBED:
                wrong.append(f"{where}: answers {sorted(unknown)}")
            if name not in ("one at a time", "random"):
                continue
            if part["p99_ms"] > most_ms:
                wrong.append(f"{where}: /health takes {part['p99_ms']} ms at the 99th percentile")
            if part["most_mib"] > most_mib:
                wrong.append(f"{where}: {part['most_mib']} MiB for {part['most_mib_by']}")
    return wrong


def print_table(rounds: Sequence[dict[str, Any]]) -> None:
    rows = [
        [
            str(i + 1), "-".join(map(str, each["load_average"])), name, str(part["health_requests"]),
            *(f"{part[key]:.1f}" for key in ("p50_ms", "p90_ms", "p99_ms", "max_ms", "most_mib")),
        ]
        for i, each in enumerate(rounds)
        for name, part in each["parts"].items()
    ]  # fmt: skip
    header = ["round", "load", "bodies", "/health", "p50 ms", "p90 ms", "p99 ms", "max ms", "MiB"]
    print(record.table(header, rows))
