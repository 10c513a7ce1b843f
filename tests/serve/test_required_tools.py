"""Calls that have to be made, in all three chat APIs: held to the tools' schemas by a grammar, after the thought."""

import json

import pytest

from tests.serve.chats import HERMES, chat_engine
from tests.serve.client_checks import check_error, client
from tests.serve.sse import named_events

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Köln", "Bonn"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
FUNCTIONS = [{"name": "weather", "parameters": CITY}, {"name": "now", "parameters": NOTHING}]
TOOLS = [{"type": "function", "function": function} for function in FUNCTIONS]
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 400, "tools": TOOLS}
NAMED = {"type": "function", "function": {"name": "weather"}}


def check(name: str, arguments: str) -> None:
    given = json.loads(arguments)
    if name == "now":
        assert given == {}
    else:
        assert name == "weather"
        assert given["city"] in ("Köln", "Bonn")
        assert 1 <= given["days"] <= 9


@pytest.fixture(params=["special", "plain"])
def server(request, start_server):
    """Its model says what it likes, which is no call, and does not think."""
    _, model = chat_engine("I would rather talk about something else.", special=request.param == "special")
    return start_server(model, reasoning_parser="none")


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", NAMED])
def test_chat(server, choice):
    for seed in range(4):
        options = CHAT | {"tool_choice": choice, "seed": seed, "temperature": 1}
        whole = client(server.base_url).chat.completions.create(**options).choices[0]
        assert whole.finish_reason == "tool_calls"
        assert whole.message.content is None
        for call in whole.message.tool_calls:
            check(call.function.name, call.function.arguments)
        if choice is NAMED:
            (call,) = whole.message.tool_calls
            assert call.function.name == "weather"
        streamed = client(server.base_url).chat.completions.create(**options, stream=True)
        pieces = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or []]
        joined = "".join(piece.function.arguments for piece in pieces if piece.index == 0)
        assert joined == whole.message.tool_calls[0].function.arguments


def test_one_call_where_they_are_not_parallel(server):
    for seed in range(6):
        options = CHAT | {"tool_choice": "required", "seed": seed, "temperature": 1, "parallel_tool_calls": False}
        message = client(server.base_url).chat.completions.create(**options).choices[0].message
        assert len(message.tool_calls) == 1


def test_after_a_thought(start_server):
    """The prompt opens it; the grammar begins where the model ends it."""
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 3}}\n</tool_call>'
    _, model = chat_engine(
        f"no rain, I think</think>{call}", template=HERMES + "{% if add_generation_prompt %}<think>{% endif %}"
    )
    answer = client(start_server(model).base_url).chat.completions.create(**CHAT, tool_choice="required").choices[0]
    assert answer.message.reasoning == "no rain, I think"
    (call,) = answer.message.tool_calls
    check(call.function.name, call.function.arguments)
    assert not (answer.message.content or "").strip()


def test_responses(server):
    body = {
        "model": "mock", "input": "Rain?", "max_output_tokens": 400,
        "tools": [{"type": "function", **function} for function in FUNCTIONS],
    }  # fmt: skip
    for choice in ("required", {"type": "function", "name": "weather"}):
        answer = server.post("/v1/responses", body | {"tool_choice": choice}).json()
        assert answer["tool_choice"] == choice
        calls = [item for item in answer["output"] if item["type"] == "function_call"]
        assert calls
        for call in calls:
            check(call["name"], call["arguments"])
    wrong = body | {"tool_choice": {"type": "function", "name": "other"}}
    assert "there is no tool 'other'" in check_error(server.post("/v1/responses", wrong), 400, "tool_choice")


def test_messages(server):
    body = {
        "model": "mock", "max_tokens": 400, "messages": [{"role": "user", "content": "Rain?"}],
        "tools": [{"name": f["name"], "input_schema": f["parameters"]} for f in FUNCTIONS],
    }  # fmt: skip
    for choice in ({"type": "any"}, {"type": "tool", "name": "weather"}):
        answer = server.post("/v1/messages", body | {"tool_choice": choice}).json()
        assert answer["stop_reason"] == "tool_use"
        calls = [block for block in answer["content"] if block["type"] == "tool_use"]
        assert calls
        for call in calls:
            check(call["name"], json.dumps(call["input"]))
    events = named_events(server.base_url, "/v1/messages", body | {"tool_choice": {"type": "any"}, "stream": True})
    assert any(
        event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use" for event in events
    )


def test_a_schema_that_cannot_be_held_to(server):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    answer = server.post("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": "required"})
    assert "cannot be held to" in check_error(answer, 400, "tools")
    assert server.post("/v1/chat/completions", CHAT | {"tools": tools, "tool_choice": "auto"}).status_code == 200
