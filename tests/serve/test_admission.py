"""Bounded waiting: who comes in under overload, what the others are told, and that every place is given back."""

import asyncio
import random
import re
import select
import socket

import httpx
import openai
import pytest

from serve import service as service_module
from serve.admission import Admission
from serve.errors import ApiError
from serve.metrics import Metrics
from tests.serve.client_checks import check_error, client, send
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

ENDLESS = {"prompt": "hi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
LIMIT = 30


def status(connection: socket.socket) -> int | None:
    """Of an answer that has begun, else None; leaves its bytes where they are."""
    if not select.select([connection], [], [], 0)[0]:
        return None
    head = connection.recv(12, socket.MSG_PEEK)
    assert head.startswith(b"HTTP/1.1 "), head
    return int(head[9:12])


def read(connection: socket.socket) -> bytes:
    """The whole answer."""
    connection.settimeout(30)
    with connection:
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def is_empty(server) -> bool:
    return server.service.in_flight == 0 and server.service.admission.num_queued == 0


def rejections(server) -> int:
    line = next(
        x for x in server.get("/metrics").text.splitlines() if x.startswith("jaxspec:admission_rejections_total{")
    )
    return int(float(line.split()[-1]))


def one_request(rng: random.Random) -> tuple[str, dict, int]:
    """A path, a body, and how many choices it asks for."""
    stream, n = rng.random() < 0.5, rng.choice([1, 1, 2, 5])
    if rng.random() < 0.3:
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": n, "stream": stream}
        return "/v1/chat/completions", body, n
    prompts = rng.choice(["hi", [1, 2], ["a", "b", "c"], [[1], [2]]])
    count = n * (1 if isinstance(prompts, str) or isinstance(prompts[0], int) else len(prompts))
    return "/v1/completions", SHORT | {"prompt": prompts, "n": n, "stream": stream}, count


@pytest.mark.parametrize("seed", range(3))
def test_overload(start_server, seed):
    """Ten times too many requests, some of them broken off: the limit is kept exactly, and all room comes back."""
    rng = random.Random(seed)
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=LIMIT)
    queue = server.service.admission
    engine.gate.clear()  # nothing is scheduled, so the queue only grows
    refused: list[int] = []
    admitted: dict[socket.socket, int] = {}
    asked = 0
    while asked < 10 * LIMIT:
        wave = [one_request(rng) for _ in range(20)]  # at once
        pending = {send(server.base_url, body, path): count for path, body, count in wave}
        # What is in the queue has not been refused: the sums are equal once all are either.
        server.wait_until(
            lambda pending=pending: (
                queue.num_queued
                == sum(admitted.values()) + sum(count for c, count in pending.items() if status(c) != 429)
            )
        )
        for connection, count in pending.items():
            asked += count
            if status(connection) != 429:
                admitted[connection] = count
                continue
            answer = read(connection)
            assert answer.startswith(b"HTTP/1.1 429"), answer
            assert re.search(rb"\r\nretry-after: [1-9]\d?\r\n", answer)
            assert b"rate_limit_exceeded" in answer
            refused.append(count)
        assert queue.num_queued == sum(admitted.values()) <= LIMIT
        assert min(refused, default=LIMIT + 1) > LIMIT - queue.num_queued  # nobody was refused who would have fitted
    assert refused
    assert rejections(server) == len(refused)

    for connection in rng.sample(list(admitted), len(admitted) // 2):
        admitted.pop(connection)
        connection.close()
    server.wait_until(lambda: queue.num_queued == sum(admitted.values()))
    room = LIMIT - queue.num_queued
    admitted |= {send(server.base_url, SHORT): 1 for _ in range(room)}
    server.wait_until(lambda: queue.num_queued == LIMIT)
    check_error(server.post("/v1/completions", SHORT), 429, None, "rate_limit_exceeded")

    engine.gate.set()
    for connection in admitted:
        assert read(connection).startswith(b"HTTP/1.1 200")
    server.wait_until(lambda: is_empty(server))
    assert server.post("/v1/completions", SHORT | {"prompt": ["x"] * 6, "n": 5}).status_code == 200  # the whole limit


def test_running_requests_do_not_count(start_server):
    engine = MockEngine(max_model_len=100_000, max_running=2, step_seconds=0.002)
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=3)
    body = ENDLESS | {"max_tokens": 90_000, "stream": True}
    connections = [send(server.base_url, body) for _ in range(2)]
    server.wait_until(lambda: engine.stats().num_running == 2 and server.service.admission.num_queued == 0)
    connections += [send(server.base_url, body) for _ in range(3)]
    server.wait_until(lambda: server.service.admission.num_queued == 3 == engine.stats().num_waiting)
    check_error(server.post("/v1/completions", SHORT), 429, None, "rate_limit_exceeded")
    connections.pop(0).close()  # one that runs: one that waits takes its row
    server.wait_until(lambda: server.service.admission.num_queued == 2)
    connections.append(send(server.base_url, body))
    server.wait_until(lambda: server.service.admission.num_queued == 3)
    # One that was preempted is not refused afterwards, and takes no place from those that wait.
    connections.pop().close()
    server.wait_until(lambda: server.service.admission.num_queued == 2)
    assert server.post("/v1/completions", SHORT | {"priority": -1}).status_code == 200
    assert engine.stats().num_preemptions == 1
    assert server.service.admission.num_queued == 2
    for connection in connections:
        connection.close()
    server.wait_until(lambda: is_empty(server) and not engine.has_work)


def test_a_refusal_comes_before_tokenisation(start_server, monkeypatch):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=1)
    engine.gate.clear()
    waiting = send(server.base_url, SHORT)
    server.wait_until(lambda: server.service.admission.num_queued == 1)
    monkeypatch.setattr(service_module.Service, "in_pool", lambda *_: 1 / 0)  # nothing may be tokenised
    with httpx.Client(base_url=server.base_url) as http:
        for i in range(40):
            body = SHORT | {"prompt": "x" * 400, "stream": i % 2 == 0}
            response = http.post("/v1/completions", json=body)
            message = check_error(response, 429, None, "rate_limit_exceeded")
            assert response.json()["error"]["type"] == "rate_limit_exceeded"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert "the queue is full: 1 outputs wait, 1 more were asked for, and at most 1" in message
    with pytest.raises(openai.RateLimitError):
        client(server.base_url).completions.create(model="mock", prompt="hi", stream=True)
    monkeypatch.undo()
    # Bad requests are told so: to try them again would not help.
    check_error(server.post("/v1/completions", SHORT | {"top_p": 5}), 400, "top_p")
    check_error(server.post("/v1/completions", SHORT | {"model": "x"}), 404, "model", "model_not_found")
    engine.gate.set()
    assert read(waiting).startswith(b"HTTP/1.1 200")


def test_the_client_library_tries_again(start_server, monkeypatch):
    monkeypatch.setattr("serve.admission.RETRY_AFTER_SECONDS", 0.1)
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=1)
    engine.gate.clear()
    waiting = send(server.base_url, SHORT)
    server.wait_until(lambda: server.service.admission.num_queued == 1)

    async def run() -> str:
        # More than one: on a busy machine the queue may still be full.
        options = {"base_url": f"{server.base_url}/v1", "api_key": "none", "max_retries": 20}
        async with openai.AsyncOpenAI(**options) as patient:
            answer = asyncio.create_task(patient.completions.create(model="mock", prompt="hi", max_tokens=4))
            while not rejections(server):
                await asyncio.sleep(0.01)
            engine.gate.set()
            return (await answer).object

    assert asyncio.run(run()) == "text_completion"
    assert read(waiting).startswith(b"HTTP/1.1 200")


def test_what_can_never_be_queued_is_a_bad_request(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()), max_num_queued_requests=3)
    for stream in (False, True):
        for fields in ({"n": 4}, {"prompt": ["a", "b"], "n": 2}):
            message = check_error(server.post("/v1/completions", SHORT | fields | {"stream": stream}), 400, "n")
            assert "asks for 4 outputs" in message
            assert "at most 3" in message
        body = SHORT | {"max_tokens": 1000, "stream": stream}
        message = check_error(server.post("/v1/completions", body), 400, "max_tokens", "context_length_exceeded")
        assert "1000" in message
        assert "512" in message
    assert rejections(server) == 0


def test_every_way_out_gives_the_place_back(start_server, monkeypatch):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=4)
    engine.nan_in = 7
    chat = {"messages": [{"role": "tool", "content": "x"}]}  # its template raises
    for stream in ({}, {"stream": True}):
        for _ in range(5):  # more often than there are places
            check_error(server.post("/v1/completions", SHORT | stream | {"prompt": ["a", ""]}), 400, "prompt")
            check_error(server.post("/v1/completions", SHORT | stream | {"prompt": [[1], [10**6]]}), 400, "prompt")
            long = SHORT | stream | {"prompt": "x" * 20_000}
            check_error(server.post("/v1/completions", long), 400, "prompt", "context_length_exceeded")
            long = SHORT | stream | {"max_tokens": 1000, "n": 4}
            check_error(server.post("/v1/completions", long), 400, "max_tokens", "context_length_exceeded")
            check_error(server.post("/v1/chat/completions", chat | stream), 400, "messages")
            assert "NaN" in server.post("/v1/completions", SHORT | stream | {"prompt": [[8], [7, 7]]}).text
            with monkeypatch.context() as patch:
                patch.setattr(server.service, "make_choices", lambda *_, **__: 1 / 0)
                check_error(server.post("/v1/completions", SHORT | stream), 500, None, "server_error")
    server.wait_until(lambda: is_empty(server))
    assert server.post("/v1/completions", SHORT | {"n": 4}).status_code == 200
    engine.fail = RuntimeError("out of luck")
    check_error(server.post("/v1/completions", SHORT | {"n": 4}), 500, None, "server_error")
    server.wait_until(lambda: is_empty(server))
    assert rejections(server) == 0


def test_retry_after_follows_the_queue(monkeypatch):
    """It is the time until there is room, if the queue goes on as it did; one that stands still promises less and less."""
    monkeypatch.setattr("serve.errors.random", random.Random(0))  # the same spreads in every run
    now, waiting = 100.0, 10
    admission = Admission(10, lambda: waiting, Metrics("m"), clock=lambda: now)

    def told(count: int = 1) -> set[int]:
        seen = set()
        for _ in range(200):
            with pytest.raises(ApiError) as caught:
                admission.reserve(count)
            assert caught.value.headers
            seen.add(int(caught.value.headers["retry-after"]))
        return seen

    assert told() == {6, 7, 8, 9}  # nothing is known yet
    for _ in range(100):  # 20 a second
        now += 0.05
        admission.started(1)
    assert told() == {1, 2}
    for _ in range(300):  # now it takes 2.2 s each, and the old times are forgotten
        now += 2.2
        admission.started(1)
    assert told() == {3, 4, 5}
    assert admission.seconds_until_room(5) == pytest.approx(11, rel=0.02)
    assert min(told(10)) >= 20
    waiting, now = 0, now + 3600  # an idle hour
    with admission.reserve(1):
        waiting = 10
    assert told() == {3, 4, 5}
    now += 20_000
    assert told() == {60}  # nobody waits longer than that for the header


def test_places_are_given_back_as_the_engine_starts_requests(start_server):
    engine = MockEngine(step_seconds=0.01, max_running=1)
    server = start_server(served(engine, byte_tokenizer()), max_num_queued_requests=4)
    for _ in range(3):
        assert server.post("/v1/completions", SHORT | {"n": 4}).status_code == 200
    assert server.service.admission.seconds_until_room(5) < 2.0
