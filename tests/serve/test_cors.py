"""Pages of other sites in a browser: off by default; preflight without a key, errors that a page can read."""

import httpx
import pytest

from serve.cors import Cors
from tests.serve.client_checks import check_error
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

ORIGIN = "https://chat.example.com"
BODY = {"prompt": "hi", "max_tokens": 4}
ASKED = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


def preflight(server, origin=ORIGIN, **headers) -> httpx.Response:
    return httpx.options(f"{server.base_url}/v1/chat/completions", headers={"origin": origin, **ASKED, **headers})


@pytest.fixture
def server(start_server):
    return start_server(served(MockEngine(), byte_tokenizer()), api_keys=("key",), cors=Cors((ORIGIN,)))


def test_without_origins_there_is_no_cors(mock_server):
    check_error(preflight(mock_server), 405, None, "method_not_allowed")
    answer = mock_server.post("/v1/completions", BODY, headers={"origin": ORIGIN})
    assert answer.status_code == 200
    assert not [name for name in answer.headers if name.startswith("access-control")]


def test_a_preflight_needs_no_key(server):
    answer = preflight(server)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert answer.headers["access-control-allow-headers"] == ASKED["access-control-request-headers"]
    assert "access-control-allow-credentials" not in answer.headers


def test_the_request_itself_needs_the_key(server):
    refused = server.post("/v1/completions", BODY, headers={"origin": ORIGIN})
    check_error(refused, 401, None, "invalid_api_key")
    assert refused.headers["access-control-allow-origin"] == ORIGIN  # so that the page can read why
    answer = server.post("/v1/completions", BODY, headers={"origin": ORIGIN, "authorization": "Bearer key"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert "x-request-id" in answer.headers["access-control-expose-headers"]


def test_an_options_request_that_is_no_preflight_needs_the_key(server):
    answer = httpx.options(f"{server.base_url}/v1/completions", headers={"origin": ORIGIN})
    check_error(answer, 401, None, "invalid_api_key")


def test_a_stream_has_the_headers(server):
    headers = {"origin": ORIGIN, "authorization": "Bearer key"}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=BODY | {"stream": True}, headers=headers) as s:
        assert s.headers["access-control-allow-origin"] == ORIGIN
        assert "[DONE]" in s.read().decode()


def test_other_origins_are_refused(server):
    answer = preflight(server, "https://evil.example")
    assert "Disallowed CORS origin: see --allowed-origins" in check_error(answer, 400)
    assert "access-control-allow-origin" not in answer.headers
    headers = {"origin": "https://evil.example", "authorization": "Bearer key"}
    assert "access-control-allow-origin" not in server.post("/v1/completions", BODY, headers=headers).headers
    assert "method" in check_error(preflight(server, **{"access-control-request-method": "DELETE"}), 400)


def test_any_origin_and_named_headers(start_server):
    cors = Cors(("*",), headers=("Authorization",), credentials=True)
    server = start_server(served(MockEngine(), byte_tokenizer()), cors=cors)
    answer = preflight(server)
    assert answer.headers["access-control-allow-origin"] == ORIGIN
    assert answer.headers["access-control-allow-credentials"] == "true"
    assert "headers" in check_error(preflight(server, **{"access-control-request-headers": "x-other"}), 400)


def test_a_bug_can_be_read_by_the_page(start_server, monkeypatch):
    def broken(_self, _name):
        raise RuntimeError("a bug")

    server = start_server(served(MockEngine(), byte_tokenizer()), cors=Cors((ORIGIN,)))
    monkeypatch.setattr(type(server.service), "resolve_name", broken)
    answer = server.post("/v1/completions", BODY, headers={"origin": ORIGIN})
    check_error(answer, 500, None, "server_error")
    assert answer.headers["access-control-allow-origin"] == ORIGIN
