"""A request is dropped when its client goes away, wherever it is: running, waiting, streaming or not."""

import asyncio
import json
import socket
import threading
import time

import pytest

from jaxspec.engine.output import FinishReason, RequestOutput
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import TextStream
from serve.generation import Choice, Delta, Generation, Submission
from tests.serve.client_checks import client, send, stream_texts
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

ENDLESS = {"prompt": "hi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}
# Still running after a slow machine's delays, for an engine with so long a context.
MINUTES, MANY_TOKENS = {"max_tokens": 15_000}, 20_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("state", ["running", "waiting"])
def test_a_disconnect_drops_the_request(start_server, stream, state):
    engine = MockEngine(step_seconds=0.005, max_running=1, max_model_len=MANY_TOKENS)
    server = start_server(served(engine, byte_tokenizer()))
    connections = [send(server.base_url, ENDLESS | MINUTES | {"stream": stream, "n": 2})]
    server.wait_until(lambda: engine.stats().generation_tokens > 5)
    if state == "waiting":  # for the first one to end
        connections.append(send(server.base_url, ENDLESS | MINUTES | {"stream": stream}))
        server.wait_until(lambda: engine.stats().num_waiting == 2)
        if stream:  # accepted, so the status line came, and no token yet
            assert connections[1].recv(12) == b"HTTP/1.1 200"
        connections[1].close()
        server.wait_until(lambda: len(engine.aborted) == 1)
        assert engine.has_work
    connections[0].close()
    server.wait_until(lambda: not engine.has_work)
    assert len(engine.aborted) == (3 if state == "waiting" else 2)
    server.wait_until(lambda: server.service.in_flight == 0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_before_the_engine_took_the_request(start_server, stream):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()))
    engine.gate.clear()
    first = send(server.base_url, ENDLESS)  # holds the engine thread inside a step
    server.wait_until(lambda: engine.stats().num_running == 1)
    second = send(server.base_url, ENDLESS | {"stream": stream})
    server.wait_until(lambda: server.service.in_flight == 2)
    for connection in (first, second):
        connection.close()
    server.wait_until(lambda: server.service.in_flight == 0)
    engine.gate.set()
    server.wait_until(lambda: not engine.has_work)
    assert stream_texts(server.base_url, model="mock", prompt="hi", max_tokens=5, temperature=0)


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_after_a_big_body_is_noticed(start_server, stream):
    """The connection is not read any more once a big body has come at once, until the handler asks whether it has ended."""
    engine = MockEngine(step_seconds=0.005, max_model_len=2**20)
    server = start_server(served(engine, byte_tokenizer()))
    connection = send(server.base_url, ENDLESS | MINUTES | {"prompt": "x" * 400_000, "stream": stream})
    server.wait_until(lambda: engine.stats().generation_tokens > 5)
    connection.close()
    server.wait_until(lambda: not engine.has_work, 10)
    assert len(engine.aborted) == 1


def test_the_openai_client_may_close_a_stream(start_server):
    engine = MockEngine(step_seconds=0.005, max_model_len=MANY_TOKENS)
    server = start_server(served(engine, byte_tokenizer()))
    options = {"prompt": "hi", **MINUTES, "temperature": 0, "extra_body": {"ignore_eos": True}}
    stream = client(server.base_url).completions.create(model="mock", stream=True, **options)
    next(iter(stream))
    stream.close()
    server.wait_until(lambda: not engine.has_work)
    assert len(engine.aborted) == 1


class Taken:
    """What a client got, that keeps up where it is told to."""

    def __init__(self, *, keeps_up: bool):
        self.keeps_up = keeps_up
        self.deltas: list[Delta] = []
        self.drained = asyncio.Event()

    def take(self, _choice: Choice, delta: Delta) -> None:
        self.deltas.append(delta)

    def ping(self) -> None:
        raise AssertionError("nothing is asked to ping")

    async def drain(self) -> None:
        await self.drained.wait()
        self.drained.clear()


@pytest.mark.parametrize("keeps_up", [False, True])
def test_output_that_nobody_reads_yet_is_merged(keeps_up):
    """And what comes while the client keeps up is taken where it is put."""

    async def run() -> list[Delta]:
        params = SamplingParams(ignore_eos=True)
        stream = TextStream(byte_tokenizer(), [1], params)
        choice = Choice(0, Submission("r", [1], params, stream, priority=0, cache_salt="", arrival_time=0.0))
        generation = Generation([choice], lambda _ids: None)
        taken = Taken(keeps_up=keeps_up)

        def put(ids: tuple[int, ...], reason: FinishReason | None = None) -> None:
            result = stream.feed(ids, reason)
            text, offsets = result.text, result.text_offsets
            generation.put(
                choice,
                RequestOutput(
                    "r", 0.0, ids, (-1.0,) * len(ids), new_text=text, new_text_offsets=offsets, finish_reason=reason
                ),
            )

        for part in ((70, 71), (72,), (73, 74)):
            put(part)
        feeding = asyncio.create_task(generation.feed(taken))
        await asyncio.sleep(0)
        assert len(taken.deltas) == 1
        put((75,))
        assert len(taken.deltas) == (2 if keeps_up else 1)
        put((76,), FinishReason.LENGTH)
        taken.drained.set()
        await feeding
        return taken.deltas

    first, *others = asyncio.run(run())
    if keeps_up:
        assert [delta.ids for delta in others] == [[75], [76]]
        others[0].extend(others.pop())
    (last,) = others
    assert (first.ids, first.offsets, first.finish_reason) == ([70, 71, 72, 73, 74], [0, 1, 2, 3, 4], None)
    assert first.text == byte_tokenizer().decode(first.ids)
    assert (last.ids, last.offsets, last.finish_reason) == ([75, 76], [5, 6], FinishReason.LENGTH)


def test_what_a_taker_raises_fails_its_stream_only():
    """Not whoever brings outputs, which are those of other streams too."""

    class Broken(Taken):
        def take(self, choice: Choice, delta: Delta) -> None:
            super().take(choice, delta)
            raise ValueError("broken")

    async def run() -> None:
        params = SamplingParams(ignore_eos=True)
        choice = Choice(0, Submission("r", [1], params, None, priority=0, cache_salt="", arrival_time=0.0))
        generation, taken = Generation([choice], lambda _ids: None), Broken(keeps_up=True)
        feeding = asyncio.create_task(generation.feed(taken))
        await asyncio.sleep(0)
        for token in (70, 71):
            generation.put(choice, RequestOutput("r", 0.0, (token,), (-1.0,)))
        with pytest.raises(ValueError, match="broken"):
            await feeding
        assert [delta.ids for delta in taken.deltas] == [[70]]

    asyncio.run(run())


def test_a_slow_reader_loses_nothing_and_slows_nobody(start_server):
    engine = MockEngine(max_model_len=MANY_TOKENS)
    server = start_server(served(engine, byte_tokenizer()))
    body = ENDLESS | MINUTES | {"logprobs": 0}
    whole = server.post("/v1/completions", body).json()["choices"][0]["text"]
    slow = send(server.base_url, body | {"stream": True})
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    server.wait_until(lambda: not engine.has_work, 30)  # finished, though nothing was read
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 5}).status_code == 200
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    received = bytearray()
    while b"data: [DONE]" not in received[-100:]:
        part = slow.recv(1 << 20)
        assert part
        received += part
    slow.close()
    texts = [
        json.loads(line[6:])["choices"][0]["text"] for line in received.splitlines() if line.startswith(b"data: {")
    ]
    assert "".join(texts) == whole


def test_many_aborts_leave_nothing_behind(start_server):
    engine = MockEngine(step_seconds=0.002)
    server = start_server(served(engine, byte_tokenizer()))

    def abandon(count: int) -> None:
        for i in range(count):
            connection = send(server.base_url, ENDLESS | {"stream": i % 2 == 0})
            time.sleep(0.003 * (i % 4))
            connection.close()

    threads = [threading.Thread(target=abandon, args=(40,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.wait_until(lambda: server.service.in_flight == 0 and not engine.has_work)
    assert server.service.engine_thread.num_generations == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_disconnect_in_the_moment_of_acceptance(start_server, monkeypatch, stream):
    """The handler is cancelled when the engine has accepted the request and the handler does not know it yet."""
    engine = MockEngine(step_seconds=0.005, max_model_len=MANY_TOKENS)
    server = start_server(served(engine, byte_tokenizer()))
    submit = server.service.engine_thread.submit

    async def submit_and_cancel(*arguments):
        generation = await submit(*arguments)
        for task in asyncio.all_tasks():
            if getattr(task.get_coro(), "__name__", "") == "run_asgi":
                task.cancel()
        return generation

    monkeypatch.setattr(server.service.engine_thread, "submit", submit_and_cancel)
    server.post("/v1/completions", ENDLESS | MINUTES | {"stream": stream})
    server.wait_until(lambda: not engine.has_work, 10)
    assert len(engine.aborted) == 1
    assert server.service.engine_thread.num_generations == 0
    assert server.service.admission.num_queued == 0
