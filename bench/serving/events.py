"""`bench events`: what an event of a stream costs the server's event loop, and its engine's thread, in processor time.

An engine that computes nothing gives every request a token each step, at the pace of a device. Clients in another process
read all streams. Both threads want Python's lock, and a step of a device waits for neither: what they take together for the
tokens of a step must be less than the step. Machines differ by half, so compare two commits side by side, more than once.
"""

import argparse
import json
import multiprocessing
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any

import uvicorn

from bench.harness import record
from bench.harness.arguments import numbers
from jaxspec.engine.engine import EngineStats
from jaxspec.engine.output import RequestOutput
from jaxspec.engine.request import Request
from serve.model import ServedModel
from serve.server import BACKLOG, bind, http_config
from serve.service import ServerSettings, Service

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_PROMPT: dict[str, dict[str, Any]] = {
    "completions": {"prompt": [1, 2, 3]},
    "chat": {"messages": [{"role": "user", "content": "hi"}]},
}
_MOST_TOKENS = 10**6
_STARTED_SECONDS = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--streams", type=numbers, default=[32, 128, 256], metavar="N,N,...", help="at once (default: 32,128,256)")
    add("--step-ms", type=float, default=10.5, metavar="X", help="of a step (default: 10.5)")
    add("--seconds", type=float, default=5.0, metavar="S", help="of a measurement (default: 5)")
    add("--repeats", type=int, default=3, metavar="N", help="of each, of which the least counts (default: 3)")
    record.add_arguments(parser)


class ConstantEngine:
    """Every step adds the same token to all requests.

    Attributes:
        outputs, steps: so far.
        thread_seconds: processor time of its thread.
    """

    max_model_len = _MOST_TOKENS + 2048
    steps_in_flight = 0

    def __init__(self, step_seconds: float):
        self.outputs = self.steps = 0
        self.thread_seconds = 0.0
        self._step_seconds, self._next = step_seconds, 0.0
        self._requests: dict[str, Request] = {}

    @property
    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, *requests: Request) -> None:
        self._requests |= {request.id: request for request in requests}

    def abort(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    def prepare(self) -> bool:
        return False

    def dispatch_ahead(self) -> None:
        """A step begins when it is read."""

    def read_oldest(self) -> list[RequestOutput]:
        now = time.monotonic()
        self._next = max(self._next + self._step_seconds, now)
        time.sleep(self._next - now)
        now = time.monotonic()
        outputs = []
        for request in self._requests.values():
            request.scheduled(now)
            outputs.append(
                RequestOutput(
                    request.id, now, (7,), (-0.5,), new_text=" token", first_scheduled_time=request.first_scheduled_time
                )
            )
        self.outputs, self.steps = self.outputs + len(outputs), self.steps + 1
        self.thread_seconds = time.thread_time()
        return outputs

    def stats(self) -> EngineStats:
        running = len(self._requests)
        return EngineStats(running, 0, 0.0, 0, 0, self.outputs, num_steps=self.steps)


@contextmanager
def served(engine: ConstantEngine) -> Iterator[tuple[int, threading.Thread]]:
    """The server's port, and the thread of its event loop."""
    from jaxspec.loading.resolve import resolve_model
    from jaxspec.loading.tokenizer_files import load_tokenizer

    model = ServedModel(engine, load_tokenizer(resolve_model("demo")))
    service = Service(ServerSettings(model="constant", log_stats=False), lambda _progress: model)
    sock, server = bind("127.0.0.1", 0), uvicorn.Server(http_config(service))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()
    _wait_until(lambda: server.started)
    sock.listen(BACKLOG)
    _wait_until(lambda: service.engine_thread.model is not None)
    try:
        yield sock.getsockname()[1], thread
    finally:
        server.should_exit = True
        thread.join(20)


def _wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _STARTED_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the server does not start")
        time.sleep(0.01)


def _read_streams(port: int, kind: str, streams: int, stop: Event) -> None:
    """In a process of its own: asks for streams, and reads them until it is told to stop."""
    body = {"stream": True, "max_tokens": _MOST_TOKENS, "ignore_eos": True, **_PROMPT[kind]}
    content = json.dumps(body).encode()
    head = f"POST {PATHS[kind]} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}"
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        client = socket.create_connection(("127.0.0.1", port))
        client.sendall(head.encode() + b"\r\n\r\n" + content)
        client.setblocking(False)
        selector.register(client, selectors.EVENT_READ)
    while not stop.is_set():
        for key, _ in selector.select(0.2):
            assert isinstance(key.fileobj, socket.socket)
            if not key.fileobj.recv(1 << 16):
                raise ConnectionError("a stream has ended")


def measure(kind: str, streams: int, *, step_seconds: float, seconds: float) -> dict[str, float]:
    """Microseconds of processor time for an event, and milliseconds of a step, which is longer where the two are too slow."""
    engine, spawn = ConstantEngine(step_seconds), multiprocessing.get_context("spawn")
    stop = spawn.Event()
    with served(engine) as (port, loop):
        assert loop.ident is not None
        clock = time.pthread_getcpuclockid(loop.ident)
        reader = spawn.Process(target=_read_streams, args=(port, kind, streams, stop), daemon=True)
        reader.start()
        try:
            _wait_until(lambda: engine.stats().num_running == streams)
            time.sleep(0.3)
            before = time.clock_gettime(clock), engine.thread_seconds, engine.outputs, engine.steps, time.monotonic()
            time.sleep(seconds)
            after = time.clock_gettime(clock), engine.thread_seconds, engine.outputs, engine.steps, time.monotonic()
            if not reader.is_alive():
                raise RuntimeError("the clients have failed")
        finally:
            stop.set()
            reader.join(10)
    on_loop, on_thread, outputs, steps, passed = (b - a for a, b in zip(before, after, strict=True))
    return {
        "loop_us": round(1e6 * on_loop / outputs, 2),
        "engine_thread_us": round(1e6 * on_thread / outputs, 2),
        "step_ms": round(1e3 * passed / steps, 2),
    }


def run(arguments: argparse.Namespace) -> int:
    results = []
    for kind in PATHS:
        for streams in arguments.streams:
            options = {"step_seconds": arguments.step_ms / 1e3, "seconds": arguments.seconds}
            runs = [measure(kind, streams, **options) for _ in range(arguments.repeats)]
            best = min(runs, key=lambda each: each["loop_us"] + each["engine_thread_us"])
            results.append({"endpoint": kind, "streams": streams, **best, "runs": runs})
    header = ["endpoint", "streams", "event loop, us", "engine's thread, us", "step, ms"]
    names = ("endpoint", "streams", "loop_us", "engine_thread_us", "step_ms")
    print(record.table(header, [[str(each[name]) for name in names] for each in results]))
    result = {"benchmark": "events", "step_ms": arguments.step_ms, "results": results}
    record.write("events", result, arguments, with_device=False)
    return 0
