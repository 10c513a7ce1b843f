"""/v1/messages: bodies as Claude Code sends them, blocks whole and streamed, errors in Anthropic's form."""

import json

import httpx
import jiter
import pytest

from tests.serve.chats import HERMES, TWO_CALLS, WEATHER, chat_engine
from tests.serve.client_checks import check_anthropic_error, send
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.sse import named_events

PATH = "/v1/messages"
ASK = {"model": "mock", "max_tokens": 500, "messages": [{"role": "user", "content": "Rain?"}], "temperature": 0}
FUNCTION = WEATHER["function"]
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
WITH_TOOLS = ASK | {"tools": [TOOL]}


@pytest.fixture
def caller(start_server):
    engine, model = chat_engine(TWO_CALLS)
    server = start_server(model)
    server.engine = engine
    return server


def check_blocks(message: dict) -> None:
    thinking, text, *calls = message["content"]
    assert (thinking["type"], thinking["thinking"]) == ("thinking", "rain?")
    assert thinking["signature"]
    assert text == {"type": "text", "text": "Let me look."}
    assert [(c["type"], c["name"], c["input"]) for c in calls] == [("tool_use", "get_weather", {"city": "Köln"})] * 2
    assert len({call["id"] for call in calls}) == 2
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)


def accumulated(events: list[dict]) -> dict:
    """The message that a stream amounts to, by the rules of Anthropic's documentation."""
    first, *events = events
    assert first["type"] == "message_start"
    message = first["message"]
    assert (message["content"], message["stop_reason"]) == ([], None)
    inputs: dict[int, str] = {}
    open_block = None
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert open_block is None
                open_block = event["index"]
                assert open_block == len(message["content"])
                message["content"].append(event["content_block"])
            case "content_block_delta":
                assert event["index"] == open_block
                block, delta = message["content"][open_block], event["delta"]
                name = delta["type"].removesuffix("_delta")
                if name == "input_json":
                    inputs[open_block] = inputs.get(open_block, "") + delta["partial_json"]
                else:
                    block[name] += delta[name]
            case "content_block_stop":
                assert event["index"] == open_block
                if open_block in inputs:
                    message["content"][open_block]["input"] = json.loads(inputs[open_block])
                open_block = None
            case "message_delta":
                message |= event["delta"]
                message["usage"] |= event["usage"]
    assert open_block is None
    assert [event["type"] for event in events[-2:]] == ["message_delta", "message_stop"]
    return message


def test_blocks_whole_and_streamed(caller):
    whole = caller.post(PATH, WITH_TOOLS).json()
    streamed = accumulated(named_events(caller.base_url, PATH, WITH_TOOLS | {"stream": True}))
    for message in (whole, streamed):
        check_blocks(message)
    assert set(streamed) == set(whole) == {
        "id", "type", "role", "model", "content", "stop_reason", "stop_sequence", "usage",
    }  # fmt: skip
    assert streamed["usage"] == whole["usage"]
    assert whole["usage"]["output_tokens"] > 100


def test_the_signature_comes_last(caller):
    events = named_events(caller.base_url, PATH, WITH_TOOLS | {"stream": True})
    of_thought = [e["delta"]["type"] for e in events if e["type"] == "content_block_delta" and e["index"] == 0]
    assert of_thought[-1] == "signature_delta"
    assert set(of_thought[:-1]) == {"thinking_delta"}


CLAUDE_CODE = {
    "model": "mock",
    "max_tokens": 1000,
    "system": [
        {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=abcde;"},
        {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
    ],
    "messages": [
        {"role": "user", "content": [
            {"type": "text", "text": "<system-reminder>"},
            {"type": "text", "text": "Rain?", "cache_control": {"type": "ephemeral"}},
        ]},
    ],
    "tools": [TOOL | {"cache_control": {"type": "ephemeral"}}],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "metadata": {"user_id": "user_1_account__session_2"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}  # fmt: skip


def test_a_turn_of_claude_code(caller):
    """The bodies have the shape that its gateway documentation shows; the second one has the first answer's blocks."""
    first = accumulated(named_events(caller.base_url, PATH + "?beta=true", CLAUDE_CODE))
    assert [block["type"] for block in first["content"]] == ["thinking", "text", "tool_use"]
    prompt = caller.engine.prompts[-1]
    assert "<|system|>You are a coding agent.<|user|><system-reminder>\nRain?<|assistant|>" in prompt
    assert "billing" not in prompt
    result = {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": first["content"][2]["id"],
                "content": [{"type": "text", "text": "sun"}],
            },
            {"type": "text", "text": "So?"},
        ],
    }
    answer = {"role": "assistant", "content": first["content"]}
    second = CLAUDE_CODE | {"messages": [*CLAUDE_CODE["messages"], answer, result]}
    check = accumulated(named_events(caller.base_url, PATH, second))
    assert check["stop_reason"] == "tool_use"
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    history = (
        f"<think>rain?</think>Let me look.{call}<|user|><tool_response>sun</tool_response><|user|>So?<|assistant|>"
    )
    assert history in caller.engine.prompts[-1]
    count = caller.post(f"{PATH}/count_tokens", {n: v for n, v in second.items() if n not in ("max_tokens", "stream")})
    usage = check["usage"]
    assert count.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_thinking_can_be_turned_off(caller):
    assert caller.post(PATH, ASK | {"thinking": {"type": "disabled"}}).status_code == 200
    assert caller.engine.prompts[-1].endswith("<think>\n\n</think>\n\n")


@pytest.mark.parametrize("stream", [True, False])
def test_why_a_message_ends(caller, stream):
    def ask(**extra):
        body = ASK | {"stream": stream} | extra
        return accumulated(named_events(caller.base_url, PATH, body)) if stream else caller.post(PATH, body).json()

    stopped = ask(stop_sequences=["nothing", "look", "me look"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", "me look")
    assert stopped["content"][-1] == {"type": "text", "text": "Let "}
    cut = ask(max_tokens=30)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 30)
    caller.engine.says = "Yes."
    ended = ask(stop_sequences=["no"])
    assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)
    assert ended["content"] == [{"type": "text", "text": "Yes."}]


def test_a_call_that_is_no_json_is_a_text(caller):
    caller.engine.says = '<tool_call>{"name": "get_weather", "arguments": {city: 1}}</tool_call>'
    message = caller.post(PATH, WITH_TOOLS).json()
    assert message["content"] == [{"type": "text", "text": "get_weather({city: 1})"}]
    assert message["stop_reason"] == "end_turn"


@pytest.mark.parametrize(
    "arguments", ["{city: 1}", '{"city": tru}', r'{"city": "\ud800"}', '{"city": "Kö', '{"city": 1,']
)
def test_a_call_that_is_no_json_is_an_error_in_a_stream(caller, arguments):
    """What came before the error is what a client can parse; it may not act on half a call."""
    caller.engine.says = f'Wait. <tool_call>{{"name": "get_weather", "arguments": {arguments}'
    *events, last = named_events(caller.base_url, PATH, WITH_TOOLS | {"stream": True})
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    assert "the model's call of get_weather has arguments that are no JSON object" in last["error"]["message"]
    assert events[-1]["type"] in ("content_block_start", "content_block_delta")
    parts = [e["delta"].get("partial_json", "") for e in events if e["type"] == "content_block_delta"]
    assert arguments.startswith("".join(parts))
    assert jiter.from_json("".join(parts).encode() or b"{}", partial_mode=True) in ({}, {"city": 1})
    caller.wait_until(lambda: not caller.engine.has_work and caller.service.in_flight == 0)
    assert caller.post(PATH, WITH_TOOLS).json()["content"][0] == {"type": "text", "text": "Wait."}


def test_a_call_that_is_cut_says_so(caller):
    caller.engine.says = '<tool_call>{"name": "get_weather", "arguments": {"city": "' + "x" * 500
    *_, end, _stop = named_events(caller.base_url, PATH, WITH_TOOLS | {"stream": True, "max_tokens": 80})
    assert end["delta"]["stop_reason"] == "max_tokens"


def test_tokens_of_the_prefix_cache_are_counted_apart(start_server):
    tokenizer = byte_tokenizer(template=HERMES)
    server = start_server(served(MockEngine(cached_tokens=3, max_model_len=4096), tokenizer))
    usages = [
        server.post(PATH, ASK).json()["usage"],
        accumulated(named_events(server.base_url, PATH, ASK | {"stream": True}))["usage"],
    ]
    whole = server.post(f"{PATH}/count_tokens", {"messages": ASK["messages"]}).json()["input_tokens"]
    for usage in usages:
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (whole - 3, 3)


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
WRONG = [
    ({"messages": []}, "messages: must not be empty"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]: images are not supported"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [IMAGE]}]}]},
     "messages[0].content[0].content[0]: images are not supported"),
    ({"messages": [{"role": "wizard", "content": ""}]}, "messages[0].role: must be"),
    ({"messages": [*ASK["messages"], {"role": "assistant", "content": "Yes,"}]}, "messages: the last message is"),
    ({"max_tokens": 0}, "max_tokens: must be greater than or equal to 1"),
    ({"max_tokens": None}, "max_tokens: field required"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type: tools of the server"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema: must be an object"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: 'required' needs tools"),
    ({"tool_choice": {"type": "tool", "name": "f"}}, "there is no tool 'f'"),
    ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type: must be 'json_schema'"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"not": {}}}}}, "cannot be compiled"),
    ({"thinking": {"type": "some"}}, "thinking.type: must be"),
    ({"stop_sequence": ["x"]}, "did you mean 'stop_sequences'?"),
    ({"messages": [{"role": "user", "content": "x" * 20_000}]}, "the maximum context length is"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "message"), WRONG)
def test_wrong_fields_are_named(mock_server, extra, message):
    for stream in ({}, {"stream": True}):
        response = mock_server.post(PATH, ASK | extra | stream)
        assert message in check_anthropic_error(response, 400, "invalid_request_error")


def test_errors_have_the_form_of_anthropic(start_server):
    engine = MockEngine(max_model_len=4096)
    server = start_server(served(engine, byte_tokenizer(template=HERMES)), api_keys=("key",), root_path="/api")
    key = {"x-api-key": "key"}
    for headers in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}):
        for path in (PATH, "/api/v1/messages", f"{PATH}/count_tokens"):
            check_anthropic_error(server.post(path, ASK, headers=headers), 401, "authentication_error")
    for headers in (key, {"authorization": "Bearer key"}, key | {"authorization": "Bearer wrong"}):
        assert server.post(PATH, ASK, headers=headers).status_code == 200
    assert server.get("/v1/models", headers=key).status_code == 200
    check_anthropic_error(server.post(PATH, ASK | {"model": "claude"}, headers=key), 404, "not_found_error")
    check_anthropic_error(server.post(f"{PATH}/batches", {}, headers=key), 404, "not_found_error")
    check_anthropic_error(server.get(PATH, headers=key), 405, "invalid_request_error")
    big = httpx.post(
        server.base_url + PATH, content=b" " * (9 * 2**20), headers=key | {"content-type": "application/json"}
    )
    check_anthropic_error(big, 413, "request_too_large")
    check_anthropic_error(httpx.post(server.base_url + PATH, content=b"x", headers=key), 415, "invalid_request_error")
    engine.nan_in = 256
    check_anthropic_error(server.post(PATH, ASK, headers=key), 500, "api_error")
    last = named_events(server.base_url, PATH, ASK | {"stream": True}, **key)[-1]
    assert (last["type"], last["error"]["type"]) == ("error", "api_error")
    server.service.draining = True
    draining = server.post(PATH, ASK, headers=key)
    assert draining.headers["retry-after"]
    check_anthropic_error(draining, 503, "overloaded_error")


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_request(start_server, stream):
    engine, model = chat_engine(TWO_CALLS * 500, step_seconds=0.005, max_model_len=200_000)
    server = start_server(model)
    connection = send(server.base_url, WITH_TOOLS | {"stream": stream, "max_tokens": 50_000}, PATH)
    server.wait_until(lambda: engine.stats().generation_tokens > 20)
    connection.close()
    server.wait_until(lambda: not engine.has_work)
    assert len(engine.aborted) == 1
    server.wait_until(lambda: server.service.in_flight == 0)


def test_a_schema_is_kept_to(mock_server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    body = ASK | {"max_tokens": 100, "output_config": {"format": {"type": "json_schema", "schema": schema}}}
    (block,) = mock_server.post(PATH, body).json()["content"]
    assert json.loads(block["text"])["a"] in (1, 2)
