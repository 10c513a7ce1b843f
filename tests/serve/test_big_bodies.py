"""Any body up to the limit, valid or not: one error, little memory, and nobody else waits for it."""

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from bench.serving.big_bodies import BODIES, made, random_body
from serve.body import MAX_BODY_BYTES
from tests.serve.client_checks import check_completions

ROOT = Path(__file__).parents[2]
# That /health may take at most, and at the 99th percentile of many bodies, beside other jobs on two cores; parsing on the
# event loop took 18. How long it takes alone is judged by `bench health`.
MOST_SECONDS, P99_SECONDS = 3.0, 0.5
# One of each kind; all of them under -m full.
FEW = [
    "prompt of empty texts", "content: special tokens", "content of images", "messages of messages", "prompt of lists",
    "extra field of objects with a field", "tokens of ids", "the same ids for many choices", "tokenize: words", "deep",
    "as many ids as are parsed", "as many objects as are parsed", "as many fields as are parsed", "a long name",
    "prompt of long numbers", "4300 digits", "a long model", "prompt: emoji", "temperature of empty texts",
]  # fmt: skip


class Watched:
    """A server in a process of its own."""

    def __init__(self, process: subprocess.Popen[str], port: int):
        self.base_url = f"http://127.0.0.1:{port}"
        self._status = Path(f"/proc/{process.pid}/status")

    def peak_mib(self) -> float:
        line = next(line for line in self._status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) / 1024


@pytest.fixture(scope="module")
def watched() -> Iterator[Watched]:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.serve.mock_process"]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            server = Watched(process, int(process.stdout.readline()))
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline:
                with suppress(httpx.TransportError):
                    if httpx.get(f"{server.base_url}/ready").status_code == 200:
                        break
                time.sleep(0.05)
            check_completions(server.base_url)
            yield server
        finally:
            process.terminate()


def post(base_url: str, path: str, body: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(base_url + path, content=body, headers=headers, timeout=60)


def health_while(base_url: str, work: Callable[[], None]) -> list[float]:
    """How long /health took, asked every 10 ms while `work` was done: seconds, sorted."""
    seconds: list[float] = []
    done = threading.Event()

    def poll() -> None:
        with httpx.Client(base_url=base_url, timeout=60) as client:
            while not done.is_set():
                start = time.monotonic()
                assert client.get("/health").status_code == 200
                seconds.append(time.monotonic() - start)
                time.sleep(0.01)

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        work()
    finally:
        done.set()
        poller.join()
    return sorted(seconds)


def check_answer(name: str, response: httpx.Response) -> None:
    assert response.status_code in (200, 400, 404), (name, response.status_code, response.text[:500])
    assert len(response.content) < 50_000, name
    if response.status_code != 200:
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert len(error["message"]) < 400, name
        assert "\n" not in error["message"], name
        assert len(error["param"] or "") <= 64, name


def send_all(server: Watched, names: list[str]) -> list[float]:
    bodies = {name: made(name) for name in names}

    def work() -> None:
        for name, (path, body) in bodies.items():
            check_answer(name, post(server.base_url, path, body))

    return health_while(server.base_url, work)


@pytest.mark.long
def test_big_bodies(watched):
    before = watched.peak_mib()
    seconds = send_all(watched, FEW)
    assert watched.peak_mib() - before < 200
    assert seconds[-1] < MOST_SECONDS, seconds[-5:]
    check_completions(watched.base_url)


def test_many_at_once(watched):
    before = watched.peak_mib()
    path, body = made("as many ids as are parsed")

    def work() -> None:
        def one() -> None:
            check_answer("ids", post(watched.base_url, path, body))

        threads = [threading.Thread(target=one) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    seconds = health_while(watched.base_url, work)
    assert watched.peak_mib() - before < 300  # six bodies of 4 MB, but one of them in parts
    assert seconds[-1] < MOST_SECONDS, seconds[-5:]


@pytest.mark.full
def test_all_big_bodies(watched):
    before = watched.peak_mib()
    seconds = send_all(watched, list(BODIES))
    assert watched.peak_mib() - before < 200
    assert seconds[int(0.99 * len(seconds))] < P99_SECONDS, seconds[-20:]
    check_completions(watched.base_url)


@pytest.mark.full
def test_random_big_bodies(watched):
    """JSON of all kinds, mutated: seeds that fail are printed."""
    before = watched.peak_mib()

    def work() -> None:
        for seed in range(100):
            check_answer(f"seed {seed}", post(watched.base_url, *random_body(seed)))

    seconds = health_while(watched.base_url, work)
    assert watched.peak_mib() - before < 200
    assert seconds[int(0.99 * len(seconds))] < P99_SECONDS, seconds[-20:]


def check_sizes(names: list[str], big: float) -> None:
    """None is refused for its size, and more than this share of them come close."""
    sizes = [len(body) for _, body in map(made, names)]
    assert max(sizes) <= MAX_BODY_BYTES
    assert sum(size > 0.9 * MAX_BODY_BYTES for size in sizes) > big * len(names)


def test_the_bodies_are_as_big_as_they_may_be():
    check_sizes(FEW, 0.5)
    assert json.loads(made("as many messages as are taken")[1])


@pytest.mark.full
def test_all_bodies_are_as_big_as_they_may_be():
    check_sizes(list(BODIES), 0.8)
