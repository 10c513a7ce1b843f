"""Tokenising long texts: in turns, bounded in bytes, never before short ones, and given up when nobody waits for it."""

import asyncio
import contextlib
import json
import threading

import pytest

from serve.errors import ApiError
from serve.text_pool import LONG_BYTES, TextPool, text_bytes
from tests.serve.client_checks import check_error
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, post

SHORT = {"prompt": "hi", "max_tokens": 1, "temperature": 0}
LONG_TEXT = "x" * (2 * LONG_BYTES)


@pytest.fixture
def blocked(start_server, monkeypatch):
    """A server whose tokenizer waits with long texts until it is told to go on."""
    server = start_server(served(MockEngine(max_model_len=2**20), byte_tokenizer()))
    tokenizer = server.service.engine_thread.model.tokenizer
    encode, go_on, begun = tokenizer.encode, threading.Event(), []

    def slow(text: str, **options):
        if len(text) > LONG_BYTES:
            begun.append(text)
            assert go_on.wait(30)
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode", slow)
    yield server, go_on, begun
    go_on.set()


def test_long_texts_do_not_delay_short_ones(blocked):
    server, go_on, begun = blocked
    connections = [connect(server.base_url) for _ in range(12)]
    for i, connection in enumerate(connections):
        path, body = [
            ("/v1/completions", SHORT | {"prompt": LONG_TEXT}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG_TEXT}], "max_tokens": 1}),
            ("/tokenize", {"prompt": LONG_TEXT}),
        ][i % 3]
        connection.sendall(post(body, path))
    server.wait_until(lambda: server.service.in_flight == 12 and begun)
    for _ in range(5):  # all of it while the first long one waits
        assert server.post("/v1/completions", SHORT).status_code == 200
        assert server.post("/tokenize", {"prompt": "hi"}).json()["count"] == 2
    assert len(begun) == 1  # they take turns
    assert server.service.texts.num_bytes >= 12 * len(LONG_TEXT)
    go_on.set()
    for connection in connections:
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()
    server.wait_until(lambda: server.service.texts.num_bytes == 0)


def test_nobody_waits_nothing_is_tokenised(blocked):
    server, go_on, begun = blocked
    connections = [connect(server.base_url) for _ in range(6)]
    for connection in connections:
        connection.sendall(post(SHORT | {"prompt": LONG_TEXT, "n": 2}))
    server.wait_until(lambda: server.service.admission.num_queued == 12 and begun)  # places are taken before
    for connection in connections:
        connection.close()
    server.wait_until(lambda: server.service.in_flight == 0 and server.service.admission.num_queued == 0)
    # The one that is in work still holds its memory, the others have gone.
    assert len(LONG_TEXT) <= server.service.texts.num_bytes < 2 * len(LONG_TEXT)
    go_on.set()
    server.wait_until(lambda: server.service.texts.num_bytes == 0)
    assert len(begun) == 1


def test_texts_that_cannot_fit_are_refused_without_tokenising(start_server, monkeypatch):
    server = start_server(served(MockEngine(max_model_len=1000), byte_tokenizer()))
    texts, sizes = server.service.texts, []
    run = texts.run

    def counted(function, num_bytes: int):
        sizes.append(num_bytes)
        return run(function, num_bytes)

    monkeypatch.setattr(texts, "run", counted)
    long = "x" * LONG_BYTES
    check_error(server.post("/v1/completions", SHORT | {"prompt": long}), 400, "prompt", "context_length_exceeded")
    chat = {"messages": [{"role": "user", "content": long}], "max_tokens": 1}
    check_error(server.post("/v1/chat/completions", chat), 400, "messages", "context_length_exceeded")
    assert not sizes
    assert server.post("/v1/completions", SHORT).status_code == 200
    assert sizes


def test_detokenising_leaves_the_event_loop_alone(start_server, monkeypatch):
    server = start_server(served(MockEngine(), byte_tokenizer()))
    go_on, begun = threading.Event(), threading.Event()

    def slow(_ids: list[int], **_options) -> str:
        begun.set()
        assert go_on.wait(30)
        return "text"

    monkeypatch.setattr(server.service.engine_thread.model.tokenizer, "decode", slow)
    with contextlib.closing(connect(server.base_url)) as connection:
        connection.sendall(post({"tokens": [1]}, "/detokenize"))
        try:
            assert begun.wait(20)
            assert server.get("/health").status_code == 200
        finally:
            go_on.set()
        assert connection.recv(12) == b"HTTP/1.1 200"


async def given_back(pool: TextPool) -> None:
    """The thread tells so after its job has ended."""
    async with asyncio.timeout(20):
        while pool.num_bytes:
            await asyncio.sleep(0.01)


def test_text_in_work_is_bounded():
    async def run() -> None:
        pool, go_on = TextPool(max_bytes=200_000), threading.Event()
        waiting = [asyncio.create_task(pool.run(lambda: go_on.wait(20), 90_000)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="bytes of text wait") as caught:
            await pool.run(lambda: go_on.wait(20), 30_000)
        assert caught.value.status_code == 429
        assert "retry-after" in caught.value.headers
        assert await pool.run(lambda: 7, 10) == 7  # a little fits
        go_on.set()
        assert await asyncio.gather(*waiting) == [True, True]
        await given_back(pool)
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 / 0, 50_000)
        await given_back(pool)
        pool.close()
        with pytest.raises(RuntimeError):
            await pool.run(go_on.wait, 50_000)
        assert pool.num_bytes == 0

    asyncio.run(run())


def test_what_a_job_counts():
    messages = [{"role": "user", "content": "12345"}, {"role": "x", "content": "67"}]
    assert text_bytes([messages, True, None]) == 4 + 5 + 1 + 2 + 2 * len("role" + "content")
    assert text_bytes(["é😀", b"\xff"]) == 2 + 4 + 1
    assert text_bytes([[1, 2, 3]]) == 24
    assert text_bytes([[]]) == 0


def test_tokenize_is_bounded(mock_server):
    text = "x" * (2**20 + 1)
    assert "at most 1048576" in check_error(mock_server.post("/tokenize", {"prompt": text}), 400, "prompt")
    emoji = "😀" * (2**18 + 1)  # few characters, but a token for each of their bytes
    check_error(mock_server.post("/tokenize", {"prompt": emoji}), 400, "prompt")
    messages = [{"role": "user", "content": text[: 2**19]}, {"role": "user", "content": text[: 2**19]}]
    check_error(mock_server.post("/tokenize", {"messages": messages}), 400, "messages")


@pytest.mark.slow
@pytest.mark.usefixtures("no_garbage_collection")
def test_a_big_answer_of_tokenize_leaves_the_event_loop_alone(start_server):
    """It is written on a thread, in pieces; only sending it is left to the event loop."""
    server = start_server(served(MockEngine(max_model_len=2**20), byte_tokenizer()))
    connection = connect(server.base_url)
    connection.sendall(post({"prompt": "é" * 2**19, "return_token_strs": True}, "/tokenize"))
    costs = []  # of the event loop, for each of these
    server.wait_until(lambda: server.service.in_flight == 1)
    while server.service.in_flight:
        worked = server.loop_seconds()
        assert server.get("/health").status_code == 200
        costs.append(server.loop_seconds() - worked)
    received = b""
    while not received.endswith(b"]}"):
        received += connection.recv(1 << 20)
    connection.close()
    answer = json.loads(received.partition(b"\r\n\r\n")[2])
    assert len(answer["tokens"]) == len(answer["token_strs"]) == answer["count"] == 2**20
    assert max(costs) < 0.2
