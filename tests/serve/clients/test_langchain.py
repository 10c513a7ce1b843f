"""LangChain: chats, streams, agents and structured output, over both of OpenAI's APIs and Anthropic's."""

import itertools

import pytest

from tests.serve.chats import ARGUMENTS
from tests.serve.clients.conftest import ANSWER, KEY, MARKS, Sky

pytestmark = MARKS


def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


def openai_chat(server, **options):
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, model="mock", max_retries=0, **options)


def anthropic_chat(server):
    from langchain_anthropic import ChatAnthropic

    return ChatAnthropic(base_url=server.base_url, api_key=KEY, model="mock", max_retries=0, max_tokens=500)


CHATS = {
    "chat": lambda server: openai_chat(server, stream_usage=True),
    "responses": lambda server: openai_chat(server, use_responses_api=True),
    "messages": anthropic_chat,
}


@pytest.fixture(params=CHATS)
def chat(request, agent_server):
    return CHATS[request.param](agent_server)


def test_answers_whole_and_streamed(chat):
    assert chat.invoke("Rain?").text == ANSWER
    pieces = list(chat.stream("Rain?"))
    assert len(pieces) > 1
    assert "".join(piece.text for piece in pieces) == ANSWER
    assert sum(pieces[1:], pieces[0]).usage_metadata["output_tokens"] > 0


@pytest.mark.parametrize("streaming", [False, True])
def test_an_agent(agent_server, chat, streaming):
    from langchain.agents import create_agent

    agent = create_agent(chat, tools=[get_weather])
    asked = {"messages": [{"role": "user", "content": "Rain?"}]}
    if streaming:
        chunks = [chunk for chunk, _ in agent.stream(asked, stream_mode="messages")]
        call, result, answer = (sum(turn, first) for _, (first, *turn) in itertools.groupby(chunks, type))
    else:
        _, call, result, answer = agent.invoke(asked)["messages"]
    assert [(c["name"], c["args"]) for c in call.tool_calls] == [("get_weather", {"city": "Köln"})]
    assert result.content == "sunny in Köln"
    assert answer.text == ANSWER
    assert ARGUMENTS in agent_server.engine.prompts[-1]
    assert "<tool_response>sunny in Köln" in agent_server.engine.prompts[-1]


def test_structured_output(chat):
    assert isinstance(chat.with_structured_output(Sky, method="json_schema").invoke("Sky?"), Sky)
