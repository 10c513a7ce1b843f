"""Anthropic's own client, with its stream accumulator (the extra `clients`)."""

import importlib

import pytest

from tests.serve.chats import CALL, TWO_CALLS, chat_engine
from tests.serve.clients.conftest import KEY, MARKS, Sky
from tests.serve.test_messages import TOOL, check_blocks

pytestmark = MARKS
ASK = {"model": "mock", "max_tokens": 500, "messages": [{"role": "user", "content": "Rain?"}]}
WITH_TOOLS = ASK | {"tools": [TOOL]}


@pytest.fixture
def anthropic():
    return importlib.import_module("anthropic")  # a missing client is an error here, not a skip


def test_the_accumulator_of_anthropic(start_server, anthropic):
    engine, model = chat_engine(TWO_CALLS)
    server = start_server(model, api_keys=("key",))
    client = anthropic.Anthropic(base_url=server.base_url, api_key="key", max_retries=0)
    whole = client.messages.create(**WITH_TOOLS)
    with client.messages.stream(**WITH_TOOLS) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_message()
    for message in (whole, final):
        check_blocks({"stop_sequence": None, **message.model_dump(exclude_none=True)})
    assert final.usage.model_dump() == whole.usage.model_dump()
    assert {"text", "thinking", "signature", "input_json", "message_stop"} <= kinds
    result = {"type": "tool_result", "tool_use_id": final.content[2].id, "content": "sunny"}
    turns = [*ASK["messages"], {"role": "assistant", "content": final.content}, {"role": "user", "content": [result]}]
    engine.says = "It is sunny."
    answer = client.messages.create(**WITH_TOOLS | {"messages": turns})
    assert [block.text for block in answer.content] == ["It is sunny."]
    count = client.messages.count_tokens(model="mock", messages=turns, tools=WITH_TOOLS["tools"])
    assert count.input_tokens == answer.usage.input_tokens


def test_an_object(agent_server, anthropic):
    """Of a class, as the client makes a schema of it: whole, as a stream, and after a call."""
    client = anthropic.Anthropic(base_url=agent_server.base_url, api_key=KEY, max_retries=0)
    whole = client.messages.parse(**ASK, output_format=Sky)
    assert isinstance(whole.parsed_output, Sky)
    with client.messages.stream(**ASK, output_format=Sky) as stream:
        pieces = list(stream.text_stream)
        assert isinstance(stream.get_final_message().parsed_output, Sky)
    assert len(pieces) > 1
    agent_server.engine.says = lambda prompt: "no JSON" if "<tool_response>" in prompt else CALL
    call = client.messages.parse(**WITH_TOOLS, output_format=Sky)
    assert [block.type for block in call.content] == ["tool_use"]
    result = {"type": "tool_result", "tool_use_id": call.content[0].id, "content": "sunny"}
    turns = [*ASK["messages"], {"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    answer = client.messages.parse(**WITH_TOOLS | {"messages": turns}, output_format=Sky)
    assert isinstance(answer.parsed_output, Sky)


def test_a_call_that_is_no_json_is_an_error_of_the_server(start_server, anthropic):
    """And not one of the accumulator, which could not parse it."""
    _, model = chat_engine('<tool_call>{"name": "get_weather", "arguments": {"city": Köln}}</tool_call>')
    server = start_server(model)
    client = anthropic.Anthropic(base_url=server.base_url, api_key="key", max_retries=0)
    with client.messages.stream(**WITH_TOOLS) as stream:
        with pytest.raises(anthropic.APIStatusError, match="no JSON object"):
            stream.get_final_message()
        assert stream.current_message_snapshot.content[0].input == {}


def test_errors_are_those_of_anthropic(start_server, anthropic):
    _, model = chat_engine("Yes.")
    server = start_server(model, api_keys=("key",))
    client = anthropic.Anthropic(base_url=server.base_url, api_key="key", max_retries=0)
    with pytest.raises(anthropic.NotFoundError, match="does not exist"):
        client.messages.create(**ASK | {"model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="there is no tool 'other'"):
        client.messages.create(**WITH_TOOLS, tool_choice={"type": "tool", "name": "other"})
    wrong = anthropic.Anthropic(base_url=server.base_url, auth_token="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.messages.create(**ASK)
    right = anthropic.Anthropic(base_url=server.base_url, auth_token="key", max_retries=0)
    assert right.messages.create(**ASK).content[0].text == "Yes."
