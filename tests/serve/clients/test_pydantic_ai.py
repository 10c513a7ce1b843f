"""pydantic-ai: agents with tools, whole and streamed, and objects as their results, over OpenAI's APIs and Anthropic's."""

import asyncio

import pytest

from tests.serve.chats import ARGUMENTS, CALL
from tests.serve.clients.conftest import ANSWER, KEY, NEWER, Sky

pytestmark = NEWER


def openai_provider(server):
    from pydantic_ai.providers.openai import OpenAIProvider

    return OpenAIProvider(base_url=f"{server.base_url}/v1", api_key=KEY)


def chat(server):
    from pydantic_ai.models.openai import OpenAIChatModel

    return OpenAIChatModel("mock", provider=openai_provider(server))


def responses(server):
    from pydantic_ai.models.openai import OpenAIResponsesModel

    return OpenAIResponsesModel("mock", provider=openai_provider(server))


def messages(server):
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.profiles import ModelProfile
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.settings import ModelSettings

    return AnthropicModel(
        "mock",
        provider=AnthropicProvider(base_url=server.base_url, api_key=KEY),
        profile=ModelProfile(
            supports_json_schema_output=True
        ),  # it knows by their names which models of Anthropic's do
        settings=ModelSettings(max_tokens=500),
    )


@pytest.fixture(params=[chat, responses, messages], ids=lambda make: make.__name__)
def model(request, agent_server):
    return request.param(agent_server)


def weather_agent(model, **options):
    from pydantic_ai import Agent

    agent = Agent(model, **options)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather."""
        return f"sunny in {city}"

    return agent


def check_prompt(server):
    assert ARGUMENTS in server.engine.prompts[-1]
    assert "<tool_response>sunny in Köln" in server.engine.prompts[-1]


def test_an_agent(agent_server, model):
    result = weather_agent(model).run_sync("Rain?")
    assert result.output == ANSWER
    assert result.usage.tool_calls == 1
    check_prompt(agent_server)


def test_an_agent_that_streams(agent_server, model):
    async def streamed() -> str:
        async with weather_agent(model).run_stream("Rain?") as result:
            return "".join([piece async for piece in result.stream_text(delta=True, debounce_by=None)])

    assert asyncio.run(streamed()) == ANSWER
    check_prompt(agent_server)


def test_an_object_by_the_models_own_way(model):
    from pydantic_ai import Agent, NativeOutput

    assert isinstance(Agent(model, output_type=NativeOutput(Sky)).run_sync("Sky?").output, Sky)


def test_an_object_as_a_required_tool(model):
    from pydantic_ai import Agent

    assert isinstance(Agent(model, output_type=Sky).run_sync("Sky?").output, Sky)


def test_an_object_after_a_tool(agent_server, model):
    """Tools and a schema in one request: first a call, then the object."""
    from pydantic_ai import NativeOutput

    # A model that begins with its thought would break the grammar, which holds from the first token here.
    agent_server.engine.says = lambda prompt: "no JSON" if "<tool_response>" in prompt else CALL
    result = weather_agent(model, output_type=NativeOutput(Sky)).run_sync("Rain?")
    assert isinstance(result.output, Sky)
    check_prompt(agent_server)
