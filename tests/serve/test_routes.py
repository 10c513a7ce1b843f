"""Everything beside generation: names, keys, request ids, tokenisation, versions, metrics, models without text."""

import contextlib
import re

import httpx
import pytest
from starlette.routing import Route

import jaxspec
from serve.app import create_app
from serve.version import commit
from tests.serve.client_checks import check_anthropic_error, check_error, client
from tests.serve.mock_engine import EOS, MockEngine, byte_tokenizer, served

BODY = {"prompt": "hi", "max_tokens": 4, "temperature": 0}


def paths(server) -> list[tuple[str, str]]:
    """Every method and path of the application."""
    document = create_app(server.service).openapi()
    known = [(method.upper(), path) for path, methods in document["paths"].items() for method in methods]
    assert len(known) >= 9
    return [*known, ("GET", "/openapi.json")]


def test_a_key_is_needed_everywhere_but_for_health(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()), api_keys=("first-key", "sécond"))
    for method, path in [*paths(server), ("GET", "/nothing"), ("GET", "//v1/models"), ("GET", "/health/../v1/models")]:
        if (method, path) in (("GET", "/health"), ("GET", "/ready"), ("GET", "/")):
            assert server.get(path).status_code == 200
            continue
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "first-key"},
            {"authorization": "Basic first-key"},
            {"authorization": "Bearer"},
            {"authorization": "Bearer first-ke"},
            {"host": "health"},
        ):
            response = httpx.request(method, server.base_url + path, headers=headers)
            if path.startswith("/v1/messages"):
                check_anthropic_error(response, 401, "authentication_error")
            else:
                check_error(response, 401, None, "invalid_api_key")
            assert response.headers["www-authenticate"] == "Bearer"
            assert response.headers["x-request-id"]
    for key in (b"Bearer first-key", b"bearer first-key"):
        assert server.get("/v1/models", headers={"authorization": key}).status_code == 200
    assert client(server.base_url, api_key="first-key").models.list().data


def test_several_names(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()), served_model_names=("one", "org/two"))
    models = client(server.base_url).models
    assert [m.id for m in models.list()] == ["one", "org/two"]
    assert models.retrieve("org/two").max_model_len == 512
    for name, answered in (("one", "one"), ("org/two", "org/two"), (None, "one")):
        assert server.post("/v1/completions", BODY | {"model": name}).json()["model"] == answered
    check_error(server.post("/v1/completions", BODY | {"model": "mock"}), 404, "model", "model_not_found")
    check_error(server.post("/tokenize", {"model": "mock", "prompt": "x"}), 404, "model", "model_not_found")


@pytest.mark.parametrize(("model", "name"), [("demo", "demo"), ("org/name", "name"), ("/a/folder/", "folder")])
def test_default_names(model, name):
    from serve.service import ServerSettings

    assert ServerSettings(model).names == (name,)


def test_request_ids(mock_server):
    given = mock_server.get("/version", headers={"x-request-id": "abc-1.2_3"})
    assert given.headers["x-request-id"] == "abc-1.2_3"
    for bad in ("", "a b", "x" * 200, "a\tb"):
        made = mock_server.get("/version", headers={"x-request-id": bad}).headers["x-request-id"]
        assert re.fullmatch("[0-9a-f]{32}", made)


def test_the_log_has_ids_and_no_prompts(mock_server, caplog):
    caplog.set_level("DEBUG")
    mock_server.post("/v1/completions", BODY | {"prompt": "canary"}, headers={"x-request-id": "its-id"})
    mock_server.post("/v1/completions", BODY | {"prompt": "canary", "top_p": 5})
    mock_server.wait_until(lambda: caplog.text.count("/v1/completions") >= 2)
    assert "its-id" in caplog.text
    assert "canary" not in caplog.text


def test_tokenize(mock_server):
    for text in ("hello", "héllo 😀 日本語", ""):
        answer = mock_server.post("/tokenize", {"prompt": text, "return_token_strs": True}).json()
        assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) == len(text.encode())
        assert answer["max_model_len"] == 512
        assert mock_server.post("/detokenize", {"tokens": answer["tokens"]}).json() == {"prompt": text}
    messages = [{"role": "user", "content": "<|end|>"}]
    chat = mock_server.post("/tokenize", {"messages": messages}).json()["tokens"]
    assert EOS not in chat
    assert mock_server.post("/detokenize", {"tokens": chat}).json()["prompt"] == "<|begin|><|user|><|end|><|assistant|>"
    check_error(mock_server.post("/tokenize", {}), 400, "prompt")
    check_error(mock_server.post("/tokenize", {"prompt": "x", "messages": messages}), 400, "prompt")
    assert mock_server.post("/detokenize", {"tokens": [10**12, -1]}).json() == {"prompt": ""}


def test_version(mock_server):
    answer = mock_server.get("/version").json()
    assert answer["version"] == answer["jaxspec"] == jaxspec.__version__
    assert answer["commit"] == (commit() or "unknown")
    assert answer["jax"]


def test_a_template_that_rejects_the_messages(mock_server):
    body = {"messages": [{"role": "tool", "content": "x"}]}
    assert "no tools here" in check_error(mock_server.post("/v1/chat/completions", body), 400, "messages")


def test_no_chat_template(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer(chat=False)))
    body = {"messages": [{"role": "user", "content": "x"}]}
    assert "no chat template" in check_error(server.post("/v1/chat/completions", body), 400, "messages")


def test_a_model_without_a_tokenizer_serves_ids(start_server):
    server = start_server(served(MockEngine(), None))
    body = BODY | {"prompt": [1, 2], "max_tokens": 9, "return_token_ids": True, "logprobs": 0}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"] == ""
    assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"]) == 9
    stream = client(server.base_url).completions.create(
        model="mock", prompt=[1, 2], max_tokens=9, temperature=0, stream=True, extra_body={"return_token_ids": True}
    )
    assert [i for chunk in stream for i in chunk.choices[0].token_ids] == choice["token_ids"]
    check_error(server.post("/v1/completions", BODY), 400, "prompt")
    check_error(server.post("/v1/completions", BODY | {"prompt": [1], "stop": "x"}), 400, "stop")
    check_error(server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}), 400, "prompt")


def test_continuous_usage(mock_server):
    stream = client(mock_server.base_url).completions.create(
        model="mock", prompt="hi", max_tokens=30, stream=True, stream_options={"continuous_usage_stats": True}
    )
    counts = [chunk.usage.completion_tokens for chunk in stream]
    assert counts == sorted(counts)
    assert counts[-1] > 1


def test_headers_are_bounded(mock_server):
    with contextlib.suppress(httpx.TransportError):  # broken off before the client had sent it all
        assert mock_server.get("/health", headers={"x-big": "x" * 1_000_000}).status_code == 400
    assert mock_server.get("/health").status_code == 200


def test_every_route_reads_its_body_through_one_door(mock_server):
    app = create_app(mock_server.service)
    posts = [path for method, path in paths(mock_server) if method == "POST"]
    for path in posts:
        if path.startswith("/v1/messages"):
            check_anthropic_error(mock_server.post(path, content=b"x"), 415, "invalid_request_error")
        else:
            check_error(mock_server.post(path, content=b"x"), 415, None, "unsupported_media_type")
    assert not any(isinstance(route, Route) and route.path in ("/docs", "/redoc") for route in app.routes)
