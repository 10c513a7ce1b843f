"""Any body up to the limit, valid or not: one error, little memory, and nobody else waits for it."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from serve.body import MAX_BODY_BYTES
from tests.serve.client_checks import check_completions

ROOT = Path(__file__).parents[2]
SIZE = MAX_BODY_BYTES - 1000
COMPLETION, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
TEMPERATURE, EXTRA = b'{"prompt": "x", "temperature": ', b'{"prompt": "x", "metadata": '


def full_text(piece: bytes) -> bytes:
    return b'"%s"' % (piece * (SIZE // len(piece)))


def full_list(element: bytes) -> bytes:
    return b"[" + b",".join([element] * (SIZE // (len(element) + 1) - 1)) + b"]"


def distinct(count: int, form: str) -> bytes:
    return ",".join(form % i for i in range(count)).encode()


def prompt(value: bytes) -> bytes:
    return b'{"prompt": %s}' % value


def content(value: bytes, tail: bytes = b"") -> bytes:
    return b'{"messages": [{"role": "user", "content": %s}%s]}' % (value, tail)


# Each is repeated up to the limit.
TEXTS = {
    "letters": b"a",
    "words": b"word ",
    "spaces": b" ",
    "quotes": rb"\"",
    "backslashes": b"\\\\",
    "escapes": rb"\u00e9",
    "surrogate pairs": rb"\ud83d\ude00",
    "lone surrogates": rb"\ud800",
    "emoji": "😀".encode(),
    "private use": "\ue000\uf8ff".encode(),
    "special tokens": b"<|user|>",
    "brackets": b"[{",
    "no UTF-8": b"\xff",
}
ELEMENTS = {
    "empty texts": b'""',
    "texts": b'"abc"',
    "lists": b"[]",
    "objects": b"{}",
    "objects with a field": b'{"a":1}',
    "nested lists": b"[[[[]]]]",
    "nested objects": b'{"a":{"a":{}}}',
    "ones": b"1",
    "ids": b"123456",
    "booleans": b"true",
    "nulls": b"null",
    "fractions": b"0.12345678901234567",
    "long numbers": b"9" * 4200,
    "too long numbers": b"9" * 5000,
    "powers": b"1e400",
    "NaN": b"NaN",
    "parts": b'{"type":"text","text":"a"}',
    "images": b'{"type":"image_url","image_url":{"url":"x"}}',
    "messages": b'{"role":"user","content":"a"}',
}
A_MESSAGE = '{"role":"user","content":"%d"}'
# Made when they are needed: together they are hundreds of megabytes.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    **{f"prompt: {n}": (COMPLETION, lambda t=t: prompt(full_text(t))) for n, t in TEXTS.items()},
    **{f"content: {n}": (CHAT, lambda t=t: content(full_text(t))) for n, t in TEXTS.items()},
    **{f"tokenize: {n}": (TOKENIZE, lambda t=t: prompt(full_text(t))) for n, t in TEXTS.items()},
    **{f"prompt of {n}": (COMPLETION, lambda e=e: prompt(full_list(e))) for n, e in ELEMENTS.items()},
    **{f"content of {n}": (CHAT, lambda e=e: content(full_list(e))) for n, e in ELEMENTS.items()},
    **{f"messages of {n}": (CHAT, lambda e=e: b'{"messages": %s}' % full_list(e)) for n, e in ELEMENTS.items()},
    **{f"tokens of {n}": (DETOKENIZE, lambda e=e: b'{"tokens": %s}' % full_list(e)) for n, e in ELEMENTS.items()},
    **{f"temperature of {n}": (COMPLETION, lambda e=e: TEMPERATURE + full_list(e) + b"}") for n, e in ELEMENTS.items()},
    **{f"extra field of {n}": (COMPLETION, lambda e=e: EXTRA + full_list(e) + b"}") for n, e in ELEMENTS.items()},
    "prompts of ids": (COMPLETION, lambda: prompt(b"[" + b",".join([b"[" + b"7," * 60_000 + b"7]"] * 32) + b"]")),
    "the same ids for many choices": (COMPLETION, lambda: prompt(b"[" + b"7," * 500_000 + b"7]")[:-1] + b', "n": 16}'),
    "as many ids as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**19 - 9, "%d") + b"]")),
    "as many texts as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**17 - 9, '"%d"') + b"]")),
    "as many objects as are parsed": (CHAT, lambda: b'{"messages": [' + distinct(2**16 - 9, '{"%d":1}') + b"]}"),
    "as many lists as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**16 - 9, "[%d]") + b"]")),
    "as many fields as are parsed": (COMPLETION, lambda: b'{"prompt": "x", ' + distinct(2**16 - 9, '"f%d":1') + b"}"),
    "as many messages as are taken": (CHAT, lambda: b'{"messages": [' + distinct(4096, A_MESSAGE) + b"]}"),
    "too many fields": (COMPLETION, lambda: b'{"prompt": "x", ' + distinct(500_000, '"f%d":1') + b"}"),
    "a long name": (COMPLETION, lambda: b'{"prompt": "x", "%s": 1}' % (b"n" * SIZE)),
    "a long model": (COMPLETION, lambda: b'{"prompt": "x", "model": "%s"}' % (b"m" * SIZE)),
    "a long role": (CHAT, lambda: b'{"messages": [{"role": "%s", "content": "x"}]}' % (b"r" * SIZE)),
    "a long stop": (COMPLETION, lambda: b'{"prompt": "x", "stop": "%s"}' % (b"s" * SIZE)),
    "a long key": (COMPLETION, lambda: b'{"prompt": "x", "logit_bias": {"%s": 1}}' % (b"9" * SIZE)),
    "a long number": (COMPLETION, lambda: b'{"prompt": "x", "max_tokens": %s}' % (b"9" * SIZE)),
    "4300 digits": (COMPLETION, lambda: b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 4300)),
    "4299 digits": (COMPLETION, lambda: b'{"prompt": "x", "seed": -%s}' % (b"9" * 4299)),
    "deep": (COMPLETION, lambda: b"[" * SIZE),
    "deep objects": (COMPLETION, lambda: b'{"a":' * (SIZE // 5)),
    "no end": (COMPLETION, lambda: prompt(b'"' + b"x" * SIZE)[:-2]),
    "zeros": (COMPLETION, lambda: b"\0" * SIZE),
    "white space": (COMPLETION, lambda: b" " * SIZE),
}  # fmt: skip
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


def made(name: str) -> tuple[str, bytes]:
    """The path and the body of a name."""
    path, make = BODIES[name]
    return path, make()


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


@pytest.mark.slow
def test_big_bodies(watched):
    before = watched.peak_mib()
    seconds = send_all(watched, FEW)
    assert watched.peak_mib() - before < 200
    assert seconds[-1] < 1, seconds[-5:]  # on a busy machine; a quiet one takes a twentieth
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
    assert seconds[-1] < 1, seconds[-5:]


@pytest.mark.full
def test_all_big_bodies(watched):
    before = watched.peak_mib()
    seconds = send_all(watched, list(BODIES))
    assert watched.peak_mib() - before < 200
    assert seconds[int(0.99 * len(seconds))] < 0.05, seconds[-20:]
    check_completions(watched.base_url)


@pytest.mark.full
def test_random_big_bodies(watched):
    """JSON of all kinds, mutated: seeds that fail are printed."""
    before = watched.peak_mib()
    pieces = [
        *ELEMENTS.values(),
        b"[",
        b"]",
        b"{",
        b"}",
        b'"',
        b",",
        b":",
        b'"prompt":',
        b'"messages":',
        b"\\",
        b"\xff",
    ]

    def work() -> None:
        for seed in range(100):
            source = random.Random(seed)
            part = b"".join(source.choices(pieces, k=source.randint(1, 30)))
            body = b'{"prompt": [' + part * ((SIZE - 20) // len(part))
            body += source.choice([b"", b"]}", b'"]}'])
            check_answer(f"seed {seed}", post(watched.base_url, source.choice([COMPLETION, CHAT, TOKENIZE]), body))

    seconds = health_while(watched.base_url, work)
    assert watched.peak_mib() - before < 200
    assert seconds[int(0.99 * len(seconds))] < 0.05, seconds[-20:]


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
