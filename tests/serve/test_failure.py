"""What clients and load balancers see while the model loads, when one request fails, and when the engine does."""

import json
import threading

import httpx
import openai
import pytest

from jaxspec.errors import ConfigError
from serve import answer
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
        thread.join(5)
    assert "0x" not in check_error(results["whole"], 500, None, "server_error")
    assert isinstance(results["stream"], openai.APIError)
    assert "the engine has failed" in str(results["stream"])
    *_, error, done = results["raw"]  # S10
    assert json.loads(error)["error"]["type"] == "server_error"
    assert done == "[DONE]"
    assert server.get("/health").status_code == 503
    assert server.get("/ready").status_code == 503
    check_error(server.post("/v1/completions", BODY), 503, None, "service_unavailable")


def test_a_stuck_step_is_not_healthy(start_server):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()), stall_seconds=0.2)
    assert server.get("/health").status_code == 200
    engine.gate.clear()
    with httpx.Client() as http, http.stream("POST", f"{server.base_url}/v1/completions", json=BODY | {"stream": True}):
        server.wait_until(lambda: server.get("/health").status_code == 503)
        assert server.get("/ready").status_code == 503
        engine.gate.set()
        server.wait_until(lambda: server.get("/health").status_code == 200)


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


def test_all_prompts_of_a_call_are_accepted_or_none(start_server):
    engine = MockEngine()
    server = start_server(served(engine, byte_tokenizer()))
    check_error(server.post("/v1/completions", BODY | {"prompt": [[1], [10**6]]}), 400, "prompt")
    assert not engine.has_work
    assert engine.stats().prompt_tokens == 0


def test_a_long_wait_is_bridged_by_comments(start_server, monkeypatch):
    monkeypatch.setattr(answer, "PING_SECONDS", 0.05)
    server = start_server(served(MockEngine(step_seconds=0.2), byte_tokenizer()))
    response = server.post("/v1/completions", BODY | {"max_tokens": 4, "stream": True})
    assert response.text.count(": ping\n\n") >= 2  # S12
    chunks = client(server.base_url).completions.create(model="mock", prompt="hi", max_tokens=4, stream=True)
    assert list(chunks)
