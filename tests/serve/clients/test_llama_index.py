"""LlamaIndex: its model for servers that speak OpenAI's API, and an agent on top of it."""

import asyncio

import pytest

from tests.serve.chats import ARGUMENTS
from tests.serve.clients.conftest import ANSWER, KEY, MARKS, Sky

pytestmark = MARKS


@pytest.fixture
def model(agent_server):
    from llama_index.llms.openai_like import OpenAILike

    return OpenAILike(
        model="mock", api_base=f"{agent_server.base_url}/v1", api_key=KEY, is_chat_model=True,
        is_function_calling_model=True, should_use_structured_outputs=True, context_window=16_384, max_retries=0,
    )  # fmt: skip


def get_weather(city: str) -> str:
    """The weather."""
    return f"sunny in {city}"


def test_answers_whole_and_streamed(model):
    from llama_index.core.llms import ChatMessage

    asked = [ChatMessage(role="user", content="Rain?")]
    assert model.chat(asked).message.content == ANSWER
    pieces = list(model.stream_chat(asked))
    assert "".join(piece.delta for piece in pieces) == pieces[-1].message.content == ANSWER


def test_an_agent(agent_server, model):
    """It streams each of its turns."""
    from llama_index.core.agent.workflow import FunctionAgent

    async def run():
        return await FunctionAgent(tools=[get_weather], llm=model).run("Rain?")

    assert asyncio.run(run()).response.content == ANSWER
    assert ARGUMENTS in agent_server.engine.prompts[-1]
    assert "<tool_response>sunny in Köln" in agent_server.engine.prompts[-1]


def test_structured_output(model):
    from llama_index.core.prompts import PromptTemplate

    assert isinstance(model.structured_predict(Sky, PromptTemplate("Sky?")), Sky)
