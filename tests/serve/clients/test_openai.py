"""openai-python at the version that these clients share: its accumulators, an agent's two turns, parsed answers."""

import openai
import pytest

from tests.serve.chats import ARGUMENTS, WEATHER
from tests.serve.clients.conftest import ANSWER, KEY, MARKS, THOUGHT, Sky

pytestmark = MARKS
ASK = [{"role": "user", "content": "Rain?"}]
STRICT = {
    "type": "function",
    "function": WEATHER["function"]
    | {"strict": True, "parameters": WEATHER["function"]["parameters"] | {"additionalProperties": False}},
}


@pytest.fixture
def client(agent_server):
    return openai.OpenAI(base_url=f"{agent_server.base_url}/v1", api_key=KEY, max_retries=0)


def test_two_turns_with_a_tool(agent_server, client):
    """The accumulator parses the arguments of strict tools; the call goes back with `content: null`, as it came."""
    with client.chat.completions.stream(model="mock", messages=ASK, tools=[STRICT]) as stream:
        kinds = {event.type for event in stream}
        message = stream.get_final_completion().choices[0].message
    assert {"chunk", "tool_calls.function.arguments.delta", "tool_calls.function.arguments.done"} <= kinds
    assert not message.content
    assert message.tool_calls[0].function.parsed_arguments == {"city": "Köln"}
    assert message.reasoning_content == THOUGHT
    call = message.tool_calls[0].model_dump(include={"id": True, "type": True, "function": {"name", "arguments"}})
    turns = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call["id"], "content": "sunny in Köln"},
    ]
    with client.chat.completions.stream(model="mock", messages=turns, tools=[STRICT]) as stream:
        assert stream.get_final_completion().choices[0].message.content == ANSWER
    assert ARGUMENTS in agent_server.engine.prompts[-1]


def test_an_object(client):
    answer = client.chat.completions.parse(model="mock", messages=ASK, response_format=Sky)
    assert isinstance(answer.choices[0].message.parsed, Sky)
    with client.chat.completions.stream(model="mock", messages=ASK, response_format=Sky) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Sky)
    assert isinstance(client.responses.parse(model="mock", input="Sky?", text_format=Sky).output_parsed, Sky)
