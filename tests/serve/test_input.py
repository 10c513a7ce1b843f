"""What clients send: harmless values pass, others are refused by their place with one cause, and nothing is a 500."""

import asyncio
import contextlib
import json
import threading

import pytest
from pydantic import ValidationError

from jaxspec.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams
from serve import body as body_module
from serve.body import MAX_BODY_BYTES, parse_body
from serve.errors import ApiError
from serve.json_size import MOST, excess, measure
from serve.protocol import MAX_OUTPUTS, ChatBody, CompletionBody, DetokenizeBody
from tests.serve.client_checks import check_completions, check_error
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, error_of, head, post

BODY = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
USER = {"role": "user", "content": "hi"}
CHAT = {"messages": [USER], "max_tokens": 4, "temperature": 0}

# Defaults that clients write out (OpenAI, vLLM, SGLang, LangChain, litellm), and marks that change nothing.
HARMLESS = {
    "allowed_token_ids": None, "bad_words": [], "cache_control": {"type": "ephemeral"}, "chat_template_kwargs": {},
    "detokenize": True, "early_stopping": False, "frequency_penalty": None, "guided_json": None, "length_penalty": 1,
    "logit_bias": None, "logits_processors": [], "metadata": {"a": "b"}, "n": None, "prediction": {"type": "content"},
    "prompt_cache_key": "k", "regex": None, "request_id": "r", "rid": "r", "seed": None, "service_tier": "auto",
    "skip_special_tokens": None, "spaces_between_special_tokens": True, "stop": None, "stop_token_ids": [],
    "store": False, "stream": False, "stream_options": None, "suffix": None, "tools": [], "truncation_side": "left",
    "typical_p": 1.0, "use_beam_search": False, "user": "u", "verbosity": "medium", "vllm_xargs": {}, "priority": None,
}  # fmt: skip
HARMLESS_CHAT = {
    "add_generation_prompt": True, "add_special_tokens": False, "audio": None, "continue_final_message": False,
    "documents": None, "echo": False, "function_call": "none", "include_reasoning": True, "modalities": ["text"],
    "parallel_tool_calls": True, "response_format": {"type": "text"}, "separate_reasoning": True, "tool_choice": "auto",
    "top_logprobs": 0, "web_search_options": None,
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_harmless_values_pass(mock_server, name):
    plain = mock_server.post("/v1/completions", BODY).json()["choices"]
    assert mock_server.post("/v1/completions", BODY | {name: HARMLESS[name]}).json()["choices"] == plain
    assert mock_server.post("/v1/chat/completions", CHAT | {name: HARMLESS[name]}).status_code == 200


@pytest.mark.parametrize("name", HARMLESS_CHAT)
def test_harmless_values_of_a_chat_pass(mock_server, name):
    plain = mock_server.post("/v1/chat/completions", CHAT).json()["choices"]
    assert mock_server.post("/v1/chat/completions", CHAT | {name: HARMLESS_CHAT[name]}).json()["choices"] == plain


@pytest.mark.parametrize(
    "message",
    [
        {"annotations": [], "refusal": None, "tool_calls": None, "function_call": None, "audio": None},
        {"tool_calls": [], "reasoning_content": "", "provider_specific_fields": {"refusal": None}, "id": "m1"},
        {"prefix": False, "thinking_blocks": [], "cache_control": {"type": "ephemeral"}},
    ],
)
def test_an_answer_can_be_sent_back_as_it_came(mock_server, message):
    answer = {"role": "assistant", "content": "yes"}
    plain = mock_server.post("/tokenize", {"messages": [USER, answer, USER]}).json()
    assert mock_server.post("/tokenize", {"messages": [USER, answer | message, USER]}).json() == plain
    parts = [{"type": "text", "text": "yes", "cache_control": {"type": "ephemeral"}, "annotations": []}]
    assert mock_server.post("/tokenize", {"messages": [USER, answer | {"content": parts}, USER]}).json() == plain


def test_an_answer_without_content_is_an_empty_one(mock_server):
    empty = mock_server.post("/tokenize", {"messages": [USER, {"role": "assistant", "content": ""}, USER]}).json()
    for answer in ({"role": "assistant"}, {"role": "assistant", "content": None, "tool_calls": []}):
        assert mock_server.post("/tokenize", {"messages": [USER, answer, USER]}).json() == empty


def test_the_generation_prompt_can_be_left_out(mock_server):
    with_prompt, without = (
        mock_server.post("/v1/chat/completions", CHAT | {"add_generation_prompt": given}).json()["usage"][
            "prompt_tokens"
        ]
        for given in (True, False)
    )
    assert with_prompt == without + 1


IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
WRONG = [
    (CompletionBody, BODY | {"verbosity": "low"}, "verbosity: not supported yet (only 'medium')", "verbosity"),
    (CompletionBody, BODY | {"length_penalty": True}, "length_penalty: not supported yet (only 1.0)", "length_penalty"),
    (CompletionBody, BODY | {"detokenize": False}, "detokenize: not supported yet (only True)", "detokenize"),
    (CompletionBody, BODY | {"guided_json": {}}, "guided_json: not supported yet", "guided_json"),
    (CompletionBody, BODY | {"temprature": 1}, "temprature: unknown parameter: did you mean 'temperature'?", "temprature"),
    (CompletionBody, BODY | {"stop": ["a", ""]}, "stop[1]: must be a text of 1 to 256 characters", "stop"),
    (CompletionBody, BODY | {"prompt": [1, 2, "a"]}, "prompt[2]: must be an integer from 0 to 2147483647", "prompt"),
    (CompletionBody, BODY | {"prompt": [[1], [2, -1]]}, "prompt[1][1]: must be an integer", "prompt"),
    (CompletionBody, BODY | {"prompt": ["a", 1]}, "prompt[1]: must be a text, as the first of the list is", "prompt"),
    (CompletionBody, BODY | {"stop_token_ids": [5, 2**31]}, "stop_token_ids[1]: must be an integer", "stop_token_ids"),
    (CompletionBody, BODY | {"logit_bias": {"5": 101}}, "logit_bias[5]: must be a number", "logit_bias"),
    (CompletionBody, BODY | {"max_tokens": 2**31}, "max_tokens: must be less than or equal to", "max_tokens"),
    (CompletionBody, BODY | {"max_tokens": -1}, "max_tokens: must be greater than or equal to 0", "max_tokens"),
    (CompletionBody, BODY | {"seed": 2**64}, "seed: must be less than", "seed"),
    (CompletionBody, [], "the body: must be a valid dictionary or", None),
    (CompletionBody, {}, "prompt: field required", "prompt"),
    (DetokenizeBody, {"tokens": [1, 2**63]}, "tokens[1]: must be an integer from", "tokens"),
    (ChatBody, {"messages": [USER, {"role": "user", "content": [IMAGE]}]},
     "messages[1].content[0]: images are not supported", "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]},
     "messages[0].content[0]: audio is not supported", "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
     "messages[0].content[0].text: must be a text", "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": None}]},
     "messages[0].content: must be a text or a list of text parts", "messages"),
    (ChatBody, {"messages": [USER, {"role": "wizard", "content": "x"}]},
     "messages[1].role: must be 'system', 'developer', 'user', 'assistant' or 'tool'", "messages"),
    (ChatBody, {"messages": [USER, {"role": "assistant", "tool_calls": [{}]}]},
     "messages[1].tool_calls[0].function: must be an object", "messages"),
    (ChatBody, CHAT | {"stream": True, "stream_options": {"include_usage": 1}},
     "stream_options.include_usage: must be a valid boolean", "stream_options"),
    (CompletionBody, BODY | {"stop": ["x"] * 17}, "stop: at most 16 strings are accepted", "stop"),
    (CompletionBody, BODY | {"stop_token_ids": [1] * (MAX_STOP_TOKEN_IDS + 1)},
     f"stop_token_ids: must be a list of at most {MAX_STOP_TOKEN_IDS} token ids", "stop_token_ids"),
    (CompletionBody, BODY | {"logit_bias": {str(i): 1 for i in range(MAX_LOGIT_BIAS + 1)}},
     f"logit_bias: must be an object of at most {MAX_LOGIT_BIAS} token ids", "logit_bias"),
    (CompletionBody, BODY | {"prompt": ["x"] * 32, "n": MAX_OUTPUTS // 32 + 1},
     "prompt: too many prompts in one call", "prompt"),
    (ChatBody, {"messages": [USER] * 4097}, "messages: list should have at most 4096 items", "messages"),
    (ChatBody, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1025}]},
     "messages[0].content: has 1025 parts, and at most 1024 are accepted", "messages"),
    (ChatBody, CHAT | {"add_special_tokens": True}, "add_special_tokens: not supported yet", "add_special_tokens"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "content", "message", "param"), WRONG)
def test_errors_name_the_place_and_one_cause(kind, content, message, param):
    with pytest.raises(ApiError) as caught:
        parse_body(kind, json.dumps(content).encode())
    error = caught.value.body()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == param
    assert " or the" not in error["message"]
    assert caught.value.status_code == 400


@pytest.mark.parametrize("element", ['""', "[]", "null", "-1", "true", "{}", "1.5"])
def test_a_list_costs_one_error(element):
    with pytest.raises(ApiError) as caught:
        parse_body(CompletionBody, f'{{"prompt": [1, {",".join([element] * 60_000)}]}}'.encode())
    assert caught.value.detail == "prompt[1]: must be an integer from 0 to 2147483647"


def test_messages_cost_one_error():
    with pytest.raises(ValidationError) as caught:
        ChatBody.model_validate({"messages": [USER, *[{"role": "wizard", "content": "x"}] * 1000]})
    assert caught.value.error_count() == 1


def test_a_body_that_announces_too_much_is_not_waited_for(mock_server):
    with contextlib.closing(connect(mock_server.base_url)) as connection:
        connection.sendall(head(content_length=MAX_BODY_BYTES + 1))
        status, error = error_of(connection.recv(1 << 16))
    assert (status, error["code"]) == (413, "request_too_large")


def test_nobody_waits_for_the_parser(start_server, monkeypatch):
    server = start_server(served(MockEngine(), byte_tokenizer()))
    parse, go_on = body_module.parse_body, threading.Event()

    def slow(kind, data):
        if len(data) > 100_000:
            assert go_on.wait(30)
        return parse(kind, data)

    monkeypatch.setattr(body_module, "parse_body", slow)
    big = connect(server.base_url)
    big.sendall(post(BODY | {"metadata": "x" * 200_000}))
    server.wait_until(lambda: server.service.in_flight == 1)
    for _ in range(20):
        assert server.get("/health").status_code == 200
        assert server.post("/v1/completions", BODY).status_code == 200
    go_on.set()
    assert big.recv(12) == b"HTTP/1.1 200"
    big.close()


def test_what_a_user_wrote_is_not_repeated_at_length(mock_server):
    long = "canary " * 1000
    for body in (
        BODY | {"model": long},
        BODY | {long: 1},
        BODY | {"stop": long},
        BODY | {"logit_bias": {long: 1}},
        {"messages": [{"role": long, "content": "x"}]},
        {"messages": [USER | {long: 1}]},
        {"messages": [{"role": "user", "content": [{"type": long}]}]},
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        error = mock_server.post(path, body).json()["error"]
        assert error["message"].count("canary") <= 10
        assert (error["param"] or "").count("canary") <= 10
        assert len(error["message"]) < 300
    control = check_error(mock_server.post("/v1/completions", BODY | {"a\nb": 1}), 400, "a\nb")
    assert control == "a\\nb: unknown parameter"
    with pytest.raises(ValueError, match="at most 16 strings") as caught:
        SamplingParams(stop=(long,) * 1000)
    assert len(str(caught.value)) < 400


def test_a_body_is_measured_before_it_is_parsed():
    nested = b'{"a": [1, 2.5, "x, [{\\"", {}], "b\\\\": ["\\\\\\"", ""]}'
    size = measure(nested)
    assert (size.containers, size.names, size.strings, size.fractions) == (4, 2, 5, 1)
    assert size.values >= 6
    for part, what in (
        ("[]", "objects and lists"), ('""', "strings"), ("1", "values"), ('{"a":1}', "objects and lists"), ("0.5", "fractions"),
        ("1" * 400, "bytes outside strings"),
    ):  # fmt: skip
        body = f'{{"prompt": [{",".join([part] * (MOST.values + 1 if len(part) < 100 else 10_000))}]}}'.encode()
        assert str(excess(body)).endswith("are accepted")
        assert what in str(excess(body))
        with pytest.raises(ApiError, match="too large to parse") as caught:
            parse_body(CompletionBody, body)
        assert caught.value.status_code == 400
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a[{,:"}] * 4}] * 4096}
    assert excess(json.dumps(chat, indent=2).encode()) is None
    assert excess(json.dumps({"prompt": list(range(300_000))}, indent=8).encode()) is None


def test_the_length_of_a_prompt_is_checked_before_its_choices_are_made(mock_server):
    body = {"prompt": [7] * 600, "n": 16, "max_tokens": 1}
    message = check_error(mock_server.post("/v1/completions", body), 400, "prompt", "context_length_exceeded")
    assert "600 tokens" in message
    assert "512 tokens" in message
    check_error(mock_server.post("/detokenize", {"tokens": [7] * 600}), 400, "tokens", "context_length_exceeded")
    long = CHAT | {"messages": [USER | {"content": "x" * 20_000}]}
    check_error(mock_server.post("/v1/chat/completions", long), 400, "messages", "context_length_exceeded")


def test_tokens_are_counted_beyond_the_context(mock_server):
    answer = mock_server.post("/tokenize", {"prompt": "x" * 20_000}).json()
    assert (answer["count"], len(answer["tokens"]), answer["max_model_len"]) == (20_000, 20_000, 512)
    long = {"messages": [USER | {"content": "x" * 20_000}]}
    assert mock_server.post("/tokenize", long).json()["count"] > 20_000


def test_special_tokens_can_be_left_out_of_a_completion(mock_server):
    assert mock_server.post("/v1/completions", BODY | {"add_special_tokens": False}).status_code == 200


@pytest.mark.parametrize("error", [RuntimeError("secret"), MemoryError(), RecursionError(), KeyError("secret")])
def test_a_bug_is_answered_with_the_usual_body(start_server, monkeypatch, error):
    server = start_server(served(MockEngine(), byte_tokenizer()))

    def fail(*_arguments: object) -> None:
        raise error

    monkeypatch.setattr(server.service, "resolve_name", fail)
    for path, body in (("/v1/completions", BODY), ("/tokenize", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        message = check_error(server.post(path, body), 500, None, "server_error")
        assert "secret" not in message
    check_error(server.get("/v1/models/x"), 500, None, "server_error")
    monkeypatch.undo()
    check_completions(server.base_url)


def test_work_that_is_cancelled_at_the_end_is_a_503(start_server, monkeypatch):
    server = start_server(served(MockEngine(), byte_tokenizer()))

    async def cancelled(*_arguments: object, **_named: object) -> None:
        raise asyncio.CancelledError

    monkeypatch.setattr(server.service, "in_pool", cancelled)
    response = server.post("/tokenize", {"prompt": "x"})
    check_error(response, 503, None, "service_unavailable")
    assert response.headers["retry-after"]
