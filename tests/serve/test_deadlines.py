"""--request-timeout and --queue-timeout: what is late is told so once, not repeated, and out of the engine."""

import asyncio
import json
import threading
import time

import openai
import pytest

from serve.deadlines import NO_DEADLINES, Deadlines
from serve.errors import ApiError
from tests.serve.client_checks import check_error, sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, post

# Seconds. A busy machine begins a request, and ends a short one, in less.
QUICK = 1.0
LONG = {"prompt": "hi", "max_tokens": 15_000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "hi", "max_tokens": 4, "temperature": 0}


@pytest.fixture
def start(start_server):
    def run(deadlines: Deadlines, **options):
        engine = MockEngine(step_seconds=0.005, max_model_len=20_000, max_running=options.pop("max_running", 16))
        return engine, start_server(served(engine, byte_tokenizer()), deadlines=deadlines, **options)

    return run


def is_out(server, engine) -> bool:
    return not engine.has_work and server.service.in_flight == 0 and server.service.admission.num_queued == 0


@pytest.mark.slow
@pytest.mark.parametrize("chat", [False, True])
def test_a_request_that_takes_too_long(start, chat):
    engine, server = start(Deadlines(request=QUICK))
    path = "/v1/chat/completions" if chat else "/v1/completions"
    body = {k: v for k, v in LONG.items() if k != "prompt"} | {"messages": [{"role": "user", "content": "x"}]}
    body = body if chat else LONG | {"n": 3}
    response = server.post(path, body)
    assert "not finished within 1 s (--request-timeout)" in check_error(response, 504, None, "timeout")
    assert response.headers["x-should-retry"] == "false"
    server.wait_until(lambda: is_out(server, engine))
    _, events = sse(server.base_url, path, body | {"stream": True})
    assert len(events) > 3  # what was generated until then has come
    assert json.loads(events[-2])["error"]["code"] == "timeout"
    assert events[-1] == "[DONE]"
    server.wait_until(lambda: is_out(server, engine))
    assert server.post("/v1/completions", SHORT).status_code == 200


def test_the_client_library_does_not_try_again(start):
    _, server = start(Deadlines(request=QUICK))
    patient = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key="none", max_retries=3)
    with pytest.raises(openai.InternalServerError, match="--request-timeout"):
        patient.completions.create(model="mock", prompt="hi", max_tokens=9000, extra_body={"ignore_eos": True})
    line = next(x for x in server.get("/metrics").text.splitlines() if x.startswith("jaxspec:prompt_tokens_total"))
    assert float(line.split()[-1]) == 2  # one prompt of two tokens


def test_a_request_that_never_starts(start):
    engine, server = start(Deadlines(queue=QUICK), max_running=1)
    running = connect(server.base_url)
    running.sendall(post(LONG | {"stream": True}))
    server.wait_until(lambda: engine.stats().num_running == 1)
    response = server.post("/v1/completions", SHORT)
    assert "did not start within 1 s (--queue-timeout)" in check_error(response, 504, None, "timeout")
    assert response.headers["x-should-retry"] == "false"
    _, events = sse(server.base_url, "/v1/completions", SHORT | {"stream": True})
    assert json.loads(events[0])["error"]["code"] == "timeout"
    server.wait_until(lambda: server.service.admission.num_queued == 0)
    assert engine.stats().num_running == 1  # the one that started in time goes on
    assert running.recv(12) == b"HTTP/1.1 200"
    running.close()
    server.wait_until(lambda: is_out(server, engine))
    assert server.post("/v1/completions", SHORT).status_code == 200


def test_a_request_that_the_engine_never_took(start):
    engine, server = start(Deadlines(request=QUICK))
    engine.gate.clear()  # the thread is inside a step and takes no commands
    first = connect(server.base_url)
    first.sendall(post(SHORT))
    server.wait_until(lambda: engine.has_work)
    for stream in (False, True):
        check_error(server.post("/v1/completions", SHORT | {"stream": stream}), 504, None, "timeout")
    assert server.service.engine_thread.num_generations == 0
    engine.gate.set()
    server.wait_until(lambda: is_out(server, engine))
    first.close()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize"])
def test_tokenising_counts(start, monkeypatch, path):
    _, server = start(Deadlines(request=60, queue=0.2))
    tokenizer = server.service.engine_thread.model.tokenizer
    go_on = threading.Event()
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: go_on.wait(20))
    body = {"messages": [{"role": "user", "content": "x"}]} if "chat" in path else {"prompt": "x"}
    response = server.post(path, body)
    assert "--queue-timeout" in check_error(response, 504, None, "timeout")
    assert server.service.admission.num_queued == 0
    go_on.set()
    server.wait_until(lambda: server.service.texts.num_bytes == 0)


def test_without_deadlines_nothing_is_bounded():
    async def run() -> None:
        assert NO_DEADLINES.watch(0.0, has_started=lambda: False, fail=lambda _error: None) == []
        assert await NO_DEADLINES.bound_waiting(asyncio.sleep(0.05, 7), arrival=0.0) == 7

    asyncio.run(run())


def test_a_timeout_of_the_work_itself_is_not_the_deadlines():
    async def work() -> None:
        raise TimeoutError("the template takes too long")

    async def run() -> None:
        now = time.monotonic()
        with pytest.raises(TimeoutError, match="template"):
            await Deadlines(request=10).bound_waiting(work(), now)
        with pytest.raises(ApiError, match="--request-timeout"):
            await Deadlines(request=0.1, queue=5).bound_waiting(asyncio.sleep(5), now)

    asyncio.run(run())
