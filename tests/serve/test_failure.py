"""What clients and load balancers see while the model loads, when one request fails, and when the engine does."""

import asyncio
import itertools
import json
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from jaxspec.errors import ConfigError
from serve import event_stream
from serve.loop_watch import LoopWatch
from serve.step_watch import StepWatch
from tests.serve.client_checks import check_error, client, sse, stream_texts
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

BODY = {"prompt": "hi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def test_while_loading_the_port_answers(start_server):
    go_on = threading.Event()

    def load(progress):
        progress(1, 3, "compiling")
        go_on.wait()
        return served(MockEngine(), byte_tokenizer())

    server = start_server(load, wait_ready=False)
    try:
        server.wait_until(lambda: "done" in server.get("/ready").json())
        ready = server.get("/ready")
        assert (ready.status_code, ready.json()) == (
            503,
            {"status": "loading", "done": 1, "total": 3, "what": "compiling"},
        )
        assert server.get("/health").status_code == 200
        assert server.get("/metrics").status_code == 200
        response = server.post("/v1/completions", BODY)
        assert "loading" in check_error(response, 503, None, "service_unavailable")
        assert int(response.headers["retry-after"]) > 0
    finally:
        go_on.set()
    server.wait_until(lambda: server.get("/ready").status_code == 200)
    assert server.post("/v1/completions", BODY).status_code == 200


def test_a_failed_load_is_remembered(start_server):
    def load(_progress):
        raise ConfigError("no such model")

    server = start_server(load, wait_ready=False)
    server.wait_until(lambda: server.get("/health").status_code == 503)
    assert isinstance(server.service.engine_thread.failure, ConfigError)


def test_engine_death(start_server):
    engine = MockEngine(step_seconds=0.002, max_model_len=5000)
    server = start_server(served(engine, byte_tokenizer()))
    results: dict[str, object] = {}

    def whole() -> None:
        results["whole"] = server.post("/v1/completions", BODY | {"max_tokens": 4000})

    def stream() -> None:
        try:
            stream_texts(server.base_url, model="mock", prompt="hi", max_tokens=4000, extra_body={"ignore_eos": True})
        except openai.APIError as e:
            results["stream"] = e

    def raw() -> None:
        results["raw"] = sse(server.base_url, "/v1/completions", BODY | {"max_tokens": 4000, "stream": True})[1]

    threads = [threading.Thread(target=f) for f in (whole, stream, raw)]
    for thread in threads:
        thread.start()
    server.wait_until(lambda: engine.stats().num_running == 3)
    engine.fail = RuntimeError("secret at 0x7fffdeadbeef")
    for thread in threads:
        thread.join(30)
    assert "0x" not in check_error(results["whole"], 500, None, "server_error")
    assert isinstance(results["stream"], openai.APIError)
    assert "the engine has failed" in str(results["stream"])
    *_, error, done = results["raw"]  # S10
    assert json.loads(error)["error"]["type"] == "server_error"
    assert done == "[DONE]"
    assert server.get("/health").status_code == 503
    assert server.get("/ready").status_code == 503
    check_error(server.post("/v1/completions", BODY), 503, None, "service_unavailable")


def test_a_slow_step_is_not_healthy_while_it_lasts(start_server):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), engine_timeout=5.0)
    assert server.get("/health").status_code == 200
    engine.gate.clear()
    with httpx.Client() as http, http.stream("POST", f"{server.base_url}/v1/completions", json=BODY | {"stream": True}):
        server.wait_until(lambda: server.get("/health").status_code == 503)
        assert server.get("/ready").status_code == 503
        refused = server.post("/v1/completions", BODY)
        assert "unusually long" in check_error(refused, 503, None, "service_unavailable")
        engine.gate.set()
        server.wait_until(lambda: server.get("/health").status_code == 200)
    assert server.service.engine_thread.failure is None
    assert server.post("/v1/completions", BODY).status_code == 200


def test_a_stuck_step_is_the_end(start_server, caplog):
    timeout = 2.5  # of which two fifths are the time that the second request has before the server accepts nothing
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), engine_timeout=timeout)
    engine.gate.clear()
    results: dict[str, object] = {}

    def whole() -> None:
        results["whole"] = server.post("/v1/completions", BODY)

    def stream() -> None:
        results["stream"] = sse(server.base_url, "/v1/completions", BODY | {"stream": True})[1]

    started = time.monotonic()
    threads = [threading.Thread(target=stream), threading.Thread(target=whole)]
    threads[0].start()
    server.wait_until(lambda: server.service.engine_thread.num_generations == 1 and engine.has_work)
    threads[1].start()  # the engine never takes this one
    for thread in threads:
        thread.join(30)
    assert timeout <= time.monotonic() - started < 20
    check_error(results["whole"], 500, None, "server_error")
    assert json.loads(results["stream"][-2])["error"]["message"] == "the engine has failed"
    assert server.get("/health").status_code == 503
    check_error(server.post("/v1/completions", BODY), 503, None, "service_unavailable")
    assert server.service.engine_thread.failure is not None  # `run_server` makes exit code 1 of it
    assert "engine step has not ended within 2.5 s" in caplog.text
    assert "in read_oldest" in caplog.text  # where it is stuck
    engine.gate.set()  # too late
    server.wait_until(lambda: not server.service.engine_thread.alive)
    assert server.get("/health").status_code == 503


@pytest.mark.slow
@pytest.mark.parametrize("why", ["many steps", "compilation", "suspended"])
def test_what_takes_long_but_is_not_stuck(why):
    """A long prompt is many steps; what warm-up missed compiles; a suspended process makes no progress at all."""
    compiles = 0
    stuck: list[float] = []

    async def run() -> None:
        nonlocal compiles
        watch = StepWatch(0.4, lambda: compiles)
        task = asyncio.create_task(watch.run(stuck.append))
        watch.step_begins()
        if why == "suspended":
            await asyncio.sleep(0.1)
            time.sleep(1.0)  # nothing in this process runs
            await asyncio.sleep(0.1)
        else:
            for _ in range(10):
                await asyncio.sleep(0.1)
                if why == "compilation":
                    compiles += 1
                else:
                    watch.step_ends()
                    watch.step_begins()
        assert not task.done()
        assert not stuck
        await asyncio.wait_for(task, 5)  # and one that does not end is found
        assert stuck == [0.4]

    asyncio.run(run())


def test_a_suspended_process_is_not_frozen(monkeypatch):
    """Though the event loop owes an answer; without one it is frozen. The watch looks every 50 ms, here as the clock says."""
    looks = itertools.count()
    times = (0.05 * look + 100.0 * (look > 2) for look in looks)  # suspended after the first unanswered question
    monkeypatch.setattr("serve.loop_watch.time", SimpleNamespace(monotonic=lambda: next(times)))
    found, frozen = threading.Event(), []

    def on_frozen(seconds):
        frozen.append((seconds, next(looks)))
        found.set()

    LoopWatch(SimpleNamespace(call_soon_threadsafe=lambda _answer: None), 1.0, on_frozen).start()
    assert found.wait(30)
    ((seconds, num_looks),) = frozen
    assert seconds == 1.0
    assert 18 < num_looks < 24


def test_a_nan_is_logged_and_counted(start_server, caplog):
    engine = MockEngine()
    engine.nan_in = 7
    server = start_server(served(engine, byte_tokenizer()))
    name = "jaxspec:num_nan_aborted_requests_total{"

    def count() -> float:
        return next(float(x.split()[-1]) for x in server.get("/metrics").text.splitlines() if x.startswith(name))

    assert count() == 0
    for i in range(20):
        headers = {"x-request-id": f"nan-{i}"}
        check_error(
            server.post("/v1/completions", BODY | {"prompt": [7, 99, 98]}, headers=headers), 500, None, "server_error"
        )
    assert count() == 20
    lines = [m for m in caplog.messages if "the engine failed a request" in m]
    assert "the engine failed a request: the model produced NaN, id=nan-0" in lines
    assert len(lines) == 5  # the rest of the minute is one line
    assert not any("99" in line for line in lines)


def test_one_failed_request_touches_no_other(start_server):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()))
    good = server.post("/v1/completions", BODY).json()["choices"]
    engine.nan_in = 7
    response = server.post("/v1/completions", BODY | {"prompt": [7, 7]})
    assert "NaN" in check_error(response, 500, None, "server_error")
    _, events = sse(server.base_url, "/v1/completions", BODY | {"prompt": [7, 7], "stream": True})
    assert "NaN" in json.loads(events[-2])["error"]["message"]
    # One bad choice fails its HTTP request, and the other choices leave the engine.
    check_error(server.post("/v1/completions", BODY | {"prompt": [[8], [7, 7]]}), 500, None, "server_error")
    server.wait_until(lambda: not engine.has_work)
    assert server.post("/v1/completions", BODY).json()["choices"] == good


def test_a_bug_in_validation_fails_its_request_alone(start_server, monkeypatch):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()))
    with monkeypatch.context() as patch:
        patch.setattr(engine, "validate", lambda _request: 1 / 0)
        check_error(server.post("/v1/completions", BODY), 500, None, "server_error")
    assert server.post("/v1/completions", BODY).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_bug_in_a_handler_is_a_500_with_an_id(mock_server, monkeypatch, stream):
    monkeypatch.setattr(mock_server.service, "make_choices", lambda *_, **__: 1 / 0)
    response = mock_server.post("/v1/completions", BODY | {"stream": stream}, headers={"x-request-id": "find-me"})
    check_error(response, 500, None, "server_error")
    assert response.headers["x-request-id"] == "find-me"


def test_a_bug_in_a_stream_says_nothing_of_itself(mock_server, monkeypatch):
    def broken(*_arguments: object) -> None:
        raise RuntimeError("secret at 0x7fffdeadbeef")

    monkeypatch.setattr("serve.completions.completion_logprobs", broken)
    _, events = sse(mock_server.base_url, "/v1/completions", BODY | {"logprobs": 0, "stream": True})
    assert json.loads(events[-2])["error"] == {
        "message": "internal server error", "type": "server_error", "param": None, "code": "server_error",
    }  # fmt: skip
    assert events[-1] == "[DONE]"


def test_all_prompts_of_a_call_are_accepted_or_none(start_server):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()))
    check_error(server.post("/v1/completions", BODY | {"prompt": [[1], [10**6]]}), 400, "prompt")
    assert not engine.has_work
    assert engine.stats().prompt_tokens == 0


def test_a_long_wait_is_bridged_by_comments(start_server, monkeypatch):
    monkeypatch.setattr(event_stream, "PING_SECONDS", 0.05)
    server = start_server(served(MockEngine(step_seconds=0.2), byte_tokenizer()))
    response = server.post("/v1/completions", BODY | {"max_tokens": 4, "stream": True})
    assert response.text.count(": ping\n\n") >= 2  # S12
    chunks = client(server.base_url).completions.create(model="mock", prompt="hi", max_tokens=4, stream=True)
    assert list(chunks)
