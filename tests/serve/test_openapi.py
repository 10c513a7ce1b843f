"""The OpenAPI description against the server: what it says is all that happens, whatever a client sends."""

from collections import Counter

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from serve.app import create_app
from serve.service import ServerSettings, Service
from tests.serve.client_checks import check_completions
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

NAMES = [
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
]
ERRORS = {
    "/v1/completions": {400, 401, 404, 413, 415, 429, 500, 503},
    "/v1/chat/completions": {400, 401, 404, 413, 415, 429, 500, 503},
    "/v1/responses": {400, 401, 404, 413, 415, 429, 500, 503},
    "/v1/messages": {400, 401, 404, 413, 415, 429, 500, 503},
    "/v1/messages/count_tokens": {400, 401, 404, 413, 415, 429, 500, 503},
    "/tokenize": {400, 401, 404, 413, 415, 500, 503},
    "/detokenize": {400, 401, 404, 413, 415, 500, 503},
    "/v1/models": {401, 500, 503},
    "/v1/models/{name}": {401, 404, 500, 503},
}


def description(**options) -> dict:
    def load(_progress):
        raise AssertionError("only described")

    return create_app(Service(ServerSettings("mock", **options), load)).openapi()


def test_all_errors_are_described():
    document = description()
    assert set(ERRORS) <= set(document["paths"])
    for path, methods in document["paths"].items():
        for operation in methods.values():
            answers = operation["responses"]
            assert "422" not in answers
            assert ERRORS.get(path, set()) <= {int(status) for status in answers}
            assert answers["200"]["content"]
            for status, answer in answers.items():
                if status >= "400" and path not in ("/health", "/ready"):
                    form = "AnthropicErrorBody" if path.startswith("/v1/messages") else "ErrorBody"
                    assert answer["content"]["application/json"]["schema"] == {"$ref": f"#/components/schemas/{form}"}
            assert ("requestBody" in operation) == ("post" in methods)
    error = document["components"]["schemas"]["ErrorDetail"]
    assert set(error["properties"]) == set(error["required"]) == {"message", "type", "param", "code"}


def test_a_key_is_described_where_it_is_needed():
    def wanting(document: dict) -> set[str]:
        return {path for path, methods in document["paths"].items() if any("security" in m for m in methods.values())}

    assert wanting(description()) == set()
    document = description(api_keys=("secret",))
    assert wanting(document) == set(document["paths"]) - {"/health", "/ready", "/"}
    assert document["components"]["securitySchemes"] == {"key": {"type": "http", "scheme": "bearer"}}


MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
STREAMS = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": MESSAGES,
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": MESSAGES | {"model": "mock"},
}


def test_streams_are_as_described(mock_server):
    schema = schemathesis.openapi.from_url(f"{mock_server.base_url}/openapi.json")
    streaming = [
        path for path, each in schema.raw_schema["paths"].items() if "text/event-stream" in str(each.get("post"))
    ]
    assert set(streaming) == set(STREAMS)
    for path, body in STREAMS.items():
        case = schema[path]["POST"].Case(body=body | {"stream": True}, media_type="application/json")
        response = case.call(timeout=30)
        assert response.headers["content-type"][0].startswith("text/event-stream")
        case.validate_response(response, checks=CHECKS.get_by_names(NAMES))
        described = schema.raw_schema["paths"][path]["post"]["responses"]["200"]["content"]["text/event-stream"]
        assert described["itemSchema"]["required"] == ["data"]


@pytest.mark.long
@pytest.mark.parametrize("examples", [11, pytest.param(230, marks=pytest.mark.full)])
def test_every_answer_is_as_described(start_server, examples):
    """About fifteen operations and kinds of input take all the examples."""
    server = start_server(served(MockEngine(), byte_tokenizer()))
    schema = schemathesis.openapi.from_url(f"{server.base_url}/openapi.json")
    checks = CHECKS.get_by_names(NAMES)
    seen: Counter[tuple[str, int]] = Counter()
    for result in schema.get_all_operations():
        operation = result.ok()
        modes = [GenerationMode.POSITIVE] + [GenerationMode.NEGATIVE] * (operation.method == "post")
        for mode in modes:

            @settings(
                max_examples=examples,
                derandomize=examples < 100,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case):
                response = case.call(timeout=30)
                seen[case.path, response.status_code] += 1
                case.validate_response(response, checks=checks)

            check()
    assert seen.total() >= 8 * examples
    for path in set(ERRORS) - {"/v1/models", "/v1/models/{name}"}:
        assert seen[path, 200], path
        assert seen[path, 400], path
    check_completions(server.base_url)
    server.wait_until(lambda: server.service.engine_thread.num_queued == 0)
