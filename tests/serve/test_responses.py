"""/v1/responses: whole and streamed alike, as openai-python's accumulator and Codex want it."""

import json

import openai
import pytest

from tests.serve.chats import ARGUMENTS, HERMES, TWO_CALLS, WEATHER, chat_engine
from tests.serve.client_checks import check_error, client, send
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.sse import named_events

PATH = "/v1/responses"
ASK = {"model": "mock", "input": "Rain?", "temperature": 0}
FUNCTION = {"type": "function", "strict": False, **WEATHER["function"]}
WITH_TOOLS = ASK | {"tools": [FUNCTION]}


@pytest.fixture
def caller(start_server):
    engine, model = chat_engine(TWO_CALLS)
    server = start_server(model)
    server.engine = engine
    return server


def check_output(response) -> None:
    reasoning, message, *calls = response.output
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call", "function_call"]
    assert reasoning.content[0].text == "rain?"
    assert message.content[0].text == "Let me look."
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call.call_id for call in calls}) == 2
    assert response.usage.output_tokens_details.reasoning_tokens == 1 + len("\nrain?\n") + 1  # with the tags
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens


def test_the_accumulator_of_openai(caller):
    whole = client(caller.base_url).responses.create(**WITH_TOOLS)
    check_output(whole)
    with client(caller.base_url).responses.stream(**WITH_TOOLS) as stream:
        events = list(stream)
        final = stream.get_final_response()
    check_output(final)
    assert final.status == whole.status == "completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed"


def test_the_events_of_a_stream(caller):
    events = named_events(caller.base_url, PATH, WITH_TOOLS | {"stream": True})
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    once = [kind for i, kind in enumerate(kinds) if kind != kinds[i - 1]]
    text = ["output_item.added", "content_part.added", "{0}.delta", "{0}.done", "content_part.done", "output_item.done"]
    call = ["output_item.added", "{0}.delta", "{0}.done", "output_item.done"]
    expected = [
        each.format(name)
        for part, name in ((text, "reasoning_text"), (text, "output_text"), *[(call, "function_call_arguments")] * 2)
        for each in part
    ]
    assert once[2:-1] == [f"response.{each}" for each in expected]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    final = events[-1]["response"]
    assert {event["response"]["id"] for event in events if "response" in event} == {final["id"]}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == final["output"]
    for i, item in enumerate(done):
        mine = [event for event in events if event.get("output_index") == i]
        assert mine[0]["item"]["id"] == item["id"]
        assert all(event.get("item_id", item["id"]) == item["id"] for event in mine)
        written = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        assert written == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])


def test_a_length_cut_is_incomplete(caller):
    for answer in (
        caller.post(PATH, ASK | {"max_output_tokens": 20}).json(),
        named_events(caller.base_url, PATH, ASK | {"max_output_tokens": 20, "stream": True})[-1]["response"],
    ):
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert answer["output"][-1]["status"] == "incomplete"
        assert answer["usage"]["output_tokens"] == 20


CODEX = {
    "model": "mock",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "<permissions>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
    ],
    "tools": [
        FUNCTION,
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "apply_patch", "description": "x", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "local_shell"},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199",
    "text": {"verbosity": "low"},
    "client_metadata": {"a": "b"},
}  # fmt: skip


def test_a_turn_of_codex(caller):
    """The bodies have the shape that its public source writes; the second one has the items of the first answer."""
    first = named_events(caller.base_url, PATH, CODEX)[-1]["response"]
    assert first["status"] == "completed"
    assert [item["type"] for item in first["output"]] == ["reasoning", "message", "function_call"]
    assert [tool["name"] for tool in first["tools"]] == ["get_weather"]
    prompt = caller.engine.prompts[-1]
    assert "<|system|>You are a coding agent.\n\n<permissions><|user|><environment_context><|user|>Rain?" in prompt
    result = {"type": "function_call_output", "call_id": first["output"][2]["call_id"], "output": "sunny"}
    second = CODEX | {"input": [*CODEX["input"], *first["output"], result]}
    assert named_events(caller.base_url, PATH, second)[-1]["type"] == "response.completed"
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert f"<think>rain?</think>Let me look.{call}<|user|><tool_response>sunny" in caller.engine.prompts[-1]


def test_a_history_with_items_of_other_servers(caller):
    items = [
        {"role": "user", "content": "Rain?"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed"},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "ok"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"role": "user", "content": "Why?"},
    ]
    assert caller.post(PATH, ASK | {"input": items}).status_code == 200
    call = '<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin"}}</tool_call>'
    expected = f"Rain?<|assistant|>{call}<|user|><tool_response>ok</tool_response><|assistant|>no<|user|>Why?"
    assert expected in caller.engine.prompts[-1]


WRONG = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "this server keeps no responses"),
    ({"conversation": "c"}, "conversation", "this server keeps no responses"),
    ({"background": True}, "background", "not supported yet"),
    ({"input": []}, "input", "input: holds no message"),
    ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input",
     "input[0].content[0]: images are not supported"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "input[0]: this server keeps no items"),
    ({"input": [{"type": "x" * 99}]}, "input", "input[0].type: items of this type are not supported"),
    ({"input": [{"role": "wizard", "content": ""}]}, "input", "input[0].role: must be"),
    ({"text": {"format": {"type": "xml"}}}, "text", "text.format.type: must be 'text', 'json_object' or"),
    ({"text": {"format": {"type": "json_schema", "name": "n", "schema": {"not": {}}}}}, "text", "cannot be compiled"),
    ({"include": ["message.output_text.logprobs"]}, "include", "include[0]: log-probabilities"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools[0].name: must be a name"),
    ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "param", "message"), WRONG)
def test_wrong_fields_are_named(mock_server, extra, param, message):
    for stream in ({}, {"stream": True}):
        assert message in check_error(mock_server.post(PATH, ASK | extra | stream), 400, param)


def test_the_limits_of_a_chat_hold(mock_server):
    check_error(mock_server.post(PATH, ASK | {"input": "x" * 20_000}), 400, "input", "context_length_exceeded")
    check_error(mock_server.post(PATH, ASK | {"model": "gpt"}), 404, "model", "model_not_found")
    check_error(mock_server.post(PATH, ASK | {"input": [{"role": "user", "content": "x"}] * 4097}), 400, "input")
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        client(mock_server.base_url).responses.create(**WITH_TOOLS)
    assert mock_server.post(PATH, ASK | {"max_output_tokens": 3}).json()["usage"]["output_tokens"] == 3


def test_an_engine_failure_ends_a_stream(start_server):
    engine = MockEngine(max_model_len=4096)
    server = start_server(served(engine, byte_tokenizer(template=HERMES)))
    engine.nan_in = 256
    last = named_events(server.base_url, PATH, ASK | {"stream": True})[-1]
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert set(last["response"]["error"]) == {"code", "message"}
    check_error(server.post(PATH, ASK), 500, None, "server_error")


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_request(start_server, stream):
    engine, model = chat_engine(TWO_CALLS * 500, step_seconds=0.005, max_model_len=200_000)
    server = start_server(model)
    connection = send(server.base_url, WITH_TOOLS | {"stream": stream}, PATH)
    server.wait_until(lambda: engine.stats().generation_tokens > 20)
    connection.close()
    server.wait_until(lambda: not engine.has_work)
    assert len(engine.aborted) == 1
    server.wait_until(lambda: server.service.in_flight == 0)


def test_metadata_comes_back(caller):
    answer = caller.post(PATH, ASK | {"metadata": {"a": "b"}, "instructions": "Be kind."}).json()
    assert (answer["metadata"], answer["instructions"], answer["store"]) == ({"a": "b"}, "Be kind.", False)
    assert json.dumps(answer)


def test_a_schema_is_kept_to(mock_server):
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    answer = client(mock_server.base_url).responses.create(**ASK, text={"format": form})
    assert json.loads(answer.output_text)["a"] in (1, 2)
    assert answer.text.format.name == "thing"
