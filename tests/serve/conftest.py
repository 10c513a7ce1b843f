"""Servers for the tests: the real application on a real port, with whatever engine a test brings."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import uvicorn

from serve.model import ServedModel
from serve.server import BACKLOG, bind, http_config
from serve.service import ServerSettings, Service
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.server_processes import Servers


@dataclass
class RunningServer:
    base_url: str
    service: Service
    thread: threading.Thread

    def loop_seconds(self) -> float:
        """Processor time of the event loop's thread, which no other load on the machine makes longer."""
        assert self.thread.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.thread.ident))

    def wait_until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.base_url + path, **{"timeout": 30, **options})

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return httpx.post(self.base_url + path, json=json, timeout=30, **options)


SERVICE_OPTIONS = ("log_seconds", "max_unread_bytes", "max_all_unread_bytes")
StartServer = Callable[..., RunningServer]


def serve_in_thread(
    load: Callable[[Any], ServedModel], stops: list[Callable[[], None]], **options: Any
) -> RunningServer:
    service_options = {name: options.pop(name) for name in SERVICE_OPTIONS if name in options}
    wait_ready = options.pop("wait_ready", True)
    service = Service(ServerSettings(**{"model": "mock", **options}), load, **service_options)
    sock = bind("127.0.0.1", 0)
    server = uvicorn.Server(http_config(service))
    thread = threading.Thread(target=server.run, args=([sock],), daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive()

    stops.append(stop)
    running = RunningServer(f"http://127.0.0.1:{sock.getsockname()[1]}", service, thread)
    running.wait_until(lambda: server.started)
    sock.listen(BACKLOG)
    if wait_ready:
        running.wait_until(lambda: running.get("/ready").status_code == 200)
    return running


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """For `loop_seconds`: a collection runs on whatever thread allocates, and looks through what other tests left, too."""
    gc.disable()
    yield
    gc.enable()


@pytest.fixture
def start_server() -> Iterator[StartServer]:
    """`start_server(model, **ServerSettings fields)`; `model` is a `ServedModel` or a function that loads one.

    Also takes the options of the service and of the engine thread in `SERVICE_OPTIONS`, and `wait_ready=False`.
    """
    stops: list[Callable[[], None]] = []

    def start(model: ServedModel | Callable[[Any], ServedModel], **options: Any) -> RunningServer:
        load = (lambda _progress: model) if isinstance(model, ServedModel) else model
        return serve_in_thread(load, stops, **options)

    yield start
    for stop in stops:
        stop()


@pytest.fixture(scope="package")
def servers() -> Iterator[Servers]:
    """For `Process`."""
    with contextlib.closing(Servers()) as made:
        yield made


@pytest.fixture(scope="package")
def mock_server() -> Iterator[RunningServer]:
    """A server that tests share as long as they leave it as it was."""
    stops: list[Callable[[], None]] = []
    yield serve_in_thread(lambda _progress: served(MockEngine(), byte_tokenizer()), stops, log_stats=False)
    for stop in stops:
        stop()
