"""Mixed traffic of good, bad and rude clients, and what must be as before when it has ended."""

import contextlib
import ctypes
import gc
import json
import os
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from jaxspec.grammar.rule import GrammarRule
from serve.connection_table import ConnectionLimits
from serve.deadlines import Deadlines
from tests.schemas import random_schema, validator_for
from tests.serve.client_checks import sse
from tests.serve.conftest import RunningServer
from tests.serve.raw import connect, error_of, head, post, read_all

# Tight, so that every limit is met many times.
SETTINGS: dict[str, Any] = {
    "max_num_queued_requests": 24,
    "deadlines": Deadlines(request=4.0, queue=3.0),
    "connections": ConnectionLimits(
        max_connections=48, header_timeout=1.0, body_timeout=1.0, keep_alive_timeout=1.0, send_timeout=1.0
    ),
}
CANARY = {"prompt": "def add(a, b):", "max_tokens": 12, "temperature": 0}
BAD_BODIES: list[Any] = [
    {}, [], {"prompt": 7}, {"prompt": "x", "n": 100}, {"prompt": "x", "temperature": -1}, {"prompt": [10**9]},
    {"prompt": "x", "max_tokens": 10**9}, {"prompt": ""}, {"prompt": "x", "unknown": 1}, {"prompt": ["x"] * 100},
    {"prompt": "x", "stop": [""]}, {"prompt": "x" * 300_000}, {"prompt": "x", "model": "other"},
]  # fmt: skip
CHAT = "/v1/chat/completions"
SCHEMAS = 50
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "parameters": CITY}}]
BAD_SCHEMAS: list[Any] = [
    {"not": {}}, {"type": "strin"}, {"$ref": "#/$defs/none"}, {"type": "array", "uniqueItems": True}, {"pattern": "(?=x)"},
    {"type": "object", "properties": {"a": {"if": {}, "then": {}}}}, {"enum": []}, 7,
]  # fmt: skip
BAD_HTTP = [
    b"nonsense\r\n\r\n",
    head(transfer_encoding="chunked", content_length=3) + b"{}",
    head(transfer_encoding="chunked") + b"zz\r\n",
    head("GET", "/health", x_big="x" * 50_000),
]


_POOLS = ("body", "tokenizer", "long-tokenizer")


@dataclass(frozen=True)
class Usage:
    """Of this process, in which both sides run."""

    descriptors: int
    threads: int  # without those of pools of a fixed size, which start when they are needed
    resident_mib: float


def usage() -> Usage:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what is free but kept for later is not lost
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    threads = sum(not each.name.startswith(_POOLS) for each in threading.enumerate())
    resident = pages * os.sysconf("SC_PAGE_SIZE") / 2**20
    return Usage(len(os.listdir("/proc/self/fd")), threads, resident)


def matchers() -> list[GrammarRule]:
    """Of this process's requests."""
    gc.collect()
    return [each for each in gc.get_objects() if type(each) is GrammarRule]


@dataclass
class Soak:
    """
    Attributes:
        seen: what happened how often.
        faults: what must never happen.
    """

    server: RunningServer
    seen: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        answer = self.server.post("/v1/completions", CANARY)
        self._expected = answer.json()["choices"][0]["text"]
        self._others = matchers()  # of tests before this one, whose engines may remember their requests

    def run(self, seconds: float, threads: int = 8, seed: int = 0) -> None:
        deadline = time.monotonic() + seconds
        acts: list[Callable[[random.Random], str]] = [
            self._valid, self._valid, self._canary, self._abort, self._abort, self._slow, self._half_open,
            self._half_body, self._bad_body, self._bad_http, self._flood, self._tokenize, self._constrained,
            self._constrained, self._tools, self._tools, self._bad_schema,
        ]  # fmt: skip

        def work(number: int) -> None:
            rng = random.Random(f"{seed}/{number}")
            while time.monotonic() < deadline and len(self.faults) < 20:
                act = rng.choice(acts)
                try:
                    self.seen[act(rng)] += 1
                except (ConnectionError, TimeoutError, httpx.TransportError) as e:
                    self.seen[f"broken off: {type(e).__name__}"] += 1  # no room for the connection
                except AssertionError as e:
                    self.faults.append(f"{act.__name__}: {e}")

        workers = [threading.Thread(target=work, args=(i,)) for i in range(threads)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def settle(self) -> None:
        """Waits until every request and connection has ended, and nothing of them is left."""
        self._wait_until_idle()
        self.server.post("/v1/completions", CANARY)  # the engine's thread knows its last outputs until the next ones
        self._wait_until_idle()
        others = {id(each) for each in self._others}
        self.server.wait_until(lambda: all(id(each) in others for each in matchers()))

    def _wait_until_idle(self) -> None:
        service = self.server.service
        engine = service.engine_thread
        self.server.wait_until(lambda: service.in_flight == 0 and len(service.connections) == 0, 30)
        self.server.wait_until(lambda: engine.num_generations == 0 and not engine.model.engine.has_work)
        self.server.wait_until(lambda: service.texts.num_bytes == 0 and service.body_bytes.held == 0)
        assert service.admission.num_queued == 0
        stats = engine.model.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0)

    @contextlib.contextmanager
    def _connection(self, rng: random.Random, **options: Any) -> Iterator[socket.socket]:
        with contextlib.closing(connect(self.server.base_url, **options)) as connection:
            yield connection
            if rng.random() < 0.3:  # some close with a reset
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")

    def _check(self, status: int, *expected: int) -> str:
        assert status in (*expected, 429, 503, 504), status
        return str(status)

    def _request(self, rng: random.Random) -> dict[str, Any]:
        return {
            "prompt": rng.choice(["hi", ["a", "b"], [5, 6, 7], "x" * rng.randrange(1, 300)]),
            "max_tokens": rng.choice([1, 5, 40]),
            "n": rng.choice([1, 1, 2, 4]),
            "temperature": rng.choice([0, 1.0]),
            "stream": rng.random() < 0.5,
            "logprobs": rng.choice([None, 0, 3]),
            "stop": rng.choice([None, ["\n\n"]]),
        }

    def _valid(self, rng: random.Random) -> str:
        body = self._request(rng)
        response = self.server.post("/v1/completions", body)
        if response.status_code == 200 and body["stream"]:
            assert response.text.endswith("data: [DONE]\n\n")
        return "valid " + self._check(response.status_code, 200)

    def _canary(self, _rng: random.Random) -> str:
        response = self.server.post("/v1/completions", CANARY)
        if response.status_code == 200:
            assert response.json()["choices"][0]["text"] == self._expected
        return "canary " + self._check(response.status_code, 200)

    def _abort(self, rng: random.Random) -> str:
        body = self._request(rng) | {"max_tokens": 100}
        constrained = rng.random() < 0.5
        body |= {"structured_outputs": {"regex": "[a-z]{500}"}} if constrained else {"ignore_eos": True}
        with self._connection(rng) as connection:
            connection.sendall(post(body))
            time.sleep(rng.random() * 0.1)
        return "constrained, aborted" if constrained else "aborted"

    def _slow(self, rng: random.Random) -> str:
        body = {"prompt": "hi", "max_tokens": 100, "n": 8, "stream": True, "logprobs": 5, "ignore_eos": True}
        with self._connection(rng, receive_buffer=4096) as connection:
            connection.sendall(post(body))
            for _ in range(rng.randrange(20)):
                connection.recv(64)
                time.sleep(0.05)
            time.sleep(rng.choice([0.0, 0.0, 2.0]))
        return "slow reader"

    def _half_open(self, rng: random.Random) -> str:
        with self._connection(rng) as connection:
            connection.sendall(rng.choice([b"", b"GET /hea", head()[:-2]]))
            if rng.random() < 0.5:
                time.sleep(rng.random())
                return "half-open, left"
            answer = read_all(connection)
            return f"half-open, told {self._check(error_of(answer)[0], 408) if answer else 'nothing'}"

    def _half_body(self, rng: random.Random) -> str:
        with self._connection(rng) as connection:
            connection.sendall(head(content_length=500_000) + b" " * rng.choice([0, 10, 100_000]))
            if rng.random() < 0.5:
                return "half a body, left"
            answer = read_all(connection)
            return f"half a body, told {self._check(error_of(answer)[0], 408) if answer else 'nothing'}"

    def _bad_body(self, rng: random.Random) -> str:
        body = rng.choice(BAD_BODIES)
        path = rng.choice(["/v1/completions", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
        response = self.server.post(path, body)
        if path == "/tokenize" and response.status_code == 200:
            return "tokenised"
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
        return "bad body " + self._check(response.status_code, 400, 404)

    def _bad_http(self, rng: random.Random) -> str:
        with self._connection(rng) as connection:
            connection.sendall(rng.choice(BAD_HTTP))
            answer = read_all(connection)
            return f"bad HTTP {self._check(error_of(answer)[0], 400) if answer else 'nothing'}"

    def _flood(self, rng: random.Random) -> str:
        body = post({"prompt": ["a", "b"], "n": 8, "max_tokens": 30, "stream": rng.random() < 0.5})
        with contextlib.ExitStack() as stack:
            connections = [stack.enter_context(self._connection(rng)) for _ in range(6)]
            for connection in connections:
                connection.sendall(body)
            for connection in connections:
                self.seen["flood " + self._check(int(connection.recv(12)[9:] or b"503"), 200)] += 1
        return "flood"

    def _chat(self, rng: random.Random, body: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
        """The status, and of a whole answer the choice."""
        stream = rng.random() < 0.4
        asked = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 150, "temperature": 1, "stream": stream}
        response = self.server.post(CHAT, asked | body)
        if response.status_code == 200 and stream:
            assert response.text.endswith("data: [DONE]\n\n")
        return response.status_code, response.json()["choices"][
            0
        ] if response.status_code == 200 and not stream else None

    def _constrained(self, rng: random.Random) -> str:
        schema = random_schema(rng.randrange(SCHEMAS))
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        tools = {"tools": TOOLS} if rng.random() < 0.3 else {}
        status, choice = self._chat(rng, {"response_format": form} | tools)
        if choice and choice["finish_reason"] == "stop":
            assert validator_for(schema).is_valid(json.loads(choice["message"]["content"])), choice
            return "constrained, valid"
        return "constrained " + self._check(status, 200)

    def _tools(self, rng: random.Random) -> str:
        named = {"type": "function", "function": {"name": "get_weather"}}
        wanted = rng.choice(["auto", "required", named])
        status, choice = self._chat(rng, {"tools": TOOLS, "tool_choice": wanted})
        if choice and wanted != "auto" and choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                assert json.loads(call["function"]["arguments"])["city"] in ("Köln", "Bonn"), choice
            return "called"
        return "tools " + self._check(status, 200)

    def _bad_schema(self, rng: random.Random) -> str:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": rng.choice(BAD_SCHEMAS)}}
        return "bad schema " + self._check(self._chat(rng, {"response_format": form})[0], 400)

    def _tokenize(self, rng: random.Random) -> str:
        copies = rng.choice([1, 20, 40_000])
        response = self.server.post("/tokenize", {"prompt": "x é" * copies})
        if response.status_code == 200:
            assert response.json()["count"] == len(response.json()["tokens"]) > 0
        # Of the longest text the context holds less than half.
        return "tokenize " + self._check(response.status_code, *([400, 200] if copies > 20 else [200]))


def stream_is_whole(server: RunningServer) -> None:
    """A last request, as any client would send it."""
    assert sse(server.base_url, "/v1/completions", CANARY | {"stream": True})[1][-1] == "[DONE]"
