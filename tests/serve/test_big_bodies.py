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


def full_list(element: bytes) -> bytes:
    return b"[" + b",".join([element] * (SIZE // (len(element) + 1) - 1)) + b"]"


def distinct(count: int, form: str) -> bytes:
    return ",".join(form % i for i in range(count)).encode()


def prompt(value: bytes) -> bytes:
    return b'{"prompt": %s}' % value


def content(value: bytes, tail: bytes = b"") -> bytes:
    return b'{"messages": [{"role": "user", "content": %s}%s]}' % (value, tail)


TEXTS = {
    "letters": b"a" * SIZE,
    "words": b"word " * (SIZE // 5),
    "spaces": b" " * SIZE,
    "quotes": rb"\"" * (SIZE // 2),
    "backslashes": b"\\\\" * (SIZE // 2),
    "escapes": rb"\u00e9" * (SIZE // 6),
    "surrogate pairs": rb"\ud83d\ude00" * (SIZE // 12),
    "lone surrogates": rb"\ud800" * (SIZE // 6),
    "emoji": "😀".encode() * (SIZE // 4),
    "private use": "\ue000\uf8ff".encode() * (SIZE // 6),
    "special tokens": b"<|user|>" * (SIZE // 8),
    "brackets": b"[{" * (SIZE // 2),
    "no UTF-8": b"\xff" * SIZE,
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
BODIES: dict[str, tuple[str, bytes]] = {
    **{f"prompt: {n}": (COMPLETION, prompt(b'"%s"' % t)) for n, t in TEXTS.items()},
    **{f"content: {n}": (CHAT, content(b'"%s"' % t)) for n, t in TEXTS.items()},
    **{f"tokenize: {n}": (TOKENIZE, prompt(b'"%s"' % t)) for n, t in TEXTS.items()},
    **{f"prompt of {n}": (COMPLETION, prompt(full_list(e))) for n, e in ELEMENTS.items()},
    **{f"content of {n}": (CHAT, content(full_list(e))) for n, e in ELEMENTS.items()},
    **{f"messages of {n}": (CHAT, b'{"messages": %s}' % full_list(e)) for n, e in ELEMENTS.items()},
    **{f"tokens of {n}": (DETOKENIZE, b'{"tokens": %s}' % full_list(e)) for n, e in ELEMENTS.items()},
    **{f"temperature of {n}": (COMPLETION, TEMPERATURE + full_list(e) + b"}") for n, e in ELEMENTS.items()},
    **{f"extra field of {n}": (COMPLETION, EXTRA + full_list(e) + b"}") for n, e in ELEMENTS.items()},
    "prompts of ids": (COMPLETION, prompt(b"[" + b",".join([b"[" + b"7," * 60_000 + b"7]"] * 32) + b"]")),
    "the same ids for many choices": (COMPLETION, prompt(b"[" + b"7," * 500_000 + b"7]")[:-1] + b', "n": 16}'),
    "as many ids as are parsed": (COMPLETION, prompt(b"[" + distinct(2**19 - 9, "%d") + b"]")),
    "as many texts as are parsed": (COMPLETION, prompt(b"[" + distinct(2**17 - 9, '"%d"') + b"]")),
    "as many objects as are parsed": (CHAT, b'{"messages": [' + distinct(2**16 - 9, '{"%d":1}') + b"]}"),
    "as many lists as are parsed": (COMPLETION, prompt(b"[" + distinct(2**16 - 9, "[%d]") + b"]")),
    "as many fields as are parsed": (COMPLETION, b'{"prompt": "x", ' + distinct(2**16 - 9, '"f%d":1') + b"}"),
    "as many messages as are taken": (CHAT, b'{"messages": [' + distinct(4096, '{"role":"user","content":"%d"}') + b"]}"),
    "too many fields": (COMPLETION, b'{"prompt": "x", ' + distinct(500_000, '"f%d":1') + b"}"),
    "a long name": (COMPLETION, b'{"prompt": "x", "%s": 1}' % (b"n" * SIZE)),
    "a long model": (COMPLETION, b'{"prompt": "x", "model": "%s"}' % (b"m" * SIZE)),
    "a long role": (CHAT, b'{"messages": [{"role": "%s", "content": "x"}]}' % (b"r" * SIZE)),
    "a long stop": (COMPLETION, b'{"prompt": "x", "stop": "%s"}' % (b"s" * SIZE)),
    "a long key": (COMPLETION, b'{"prompt": "x", "logit_bias": {"%s": 1}}' % (b"9" * SIZE)),
    "a long number": (COMPLETION, b'{"prompt": "x", "max_tokens": %s}' % (b"9" * SIZE)),
    "4300 digits": (COMPLETION, b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 4300)),
    "4299 digits": (COMPLETION, b'{"prompt": "x", "seed": -%s}' % (b"9" * 4299)),
    "deep": (COMPLETION, b"[" * SIZE),
    "deep objects": (COMPLETION, b'{"a":' * (SIZE // 5)),
    "no end": (COMPLETION, prompt(b'"' + b"x" * SIZE)[:-2]),
    "zeros": (COMPLETION, b"\0" * SIZE),
    "white space": (COMPLETION, b" " * SIZE),
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
    def work() -> None:
        for name in names:
            check_answer(name, post(server.base_url, *BODIES[name]))

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

    def work() -> None:
        def one() -> None:
            check_answer("ids", post(watched.base_url, *BODIES["as many ids as are parsed"]))

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


def test_the_bodies_are_as_big_as_they_may_be():
    assert all(len(body) <= MAX_BODY_BYTES for _, body in BODIES.values())
    assert sum(len(body) > 0.9 * MAX_BODY_BYTES for _, body in BODIES.values()) > 100
    assert json.loads(BODIES["as many messages as are taken"][1])
