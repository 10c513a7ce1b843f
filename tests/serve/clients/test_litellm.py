"""litellm: one function for OpenAI's chat, its Responses and Anthropic's Messages."""

import pytest

from tests.serve.chats import ARGUMENTS, WEATHER
from tests.serve.clients.conftest import ANSWER, KEY, MARKS, THOUGHT, Sky

pytestmark = MARKS
ASK = [{"role": "user", "content": "Rain?"}]


@pytest.fixture
def litellm(monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # asks another site for prices otherwise
    import litellm

    monkeypatch.setattr(litellm, "drop_params", False)
    return litellm


@pytest.fixture(params=["openai", "anthropic"])
def options(request, agent_server):
    base = agent_server.base_url + ("/v1" if request.param == "openai" else "")
    return {"model": f"{request.param}/mock", "api_base": base, "api_key": KEY, "max_tokens": 500, "max_retries": 0}


def test_answers_whole_and_streamed(litellm, options):
    whole = litellm.completion(messages=ASK, **options)
    assert whole.choices[0].message.content == ANSWER
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(messages=ASK, stream=True, **options))
    assert litellm.stream_chunk_builder(chunks).choices[0].message.content == ANSWER


@pytest.mark.parametrize("streaming", [False, True])
def test_two_turns_with_a_tool(agent_server, litellm, options, streaming):
    answer = litellm.completion(messages=ASK, tools=[WEATHER], stream=streaming, **options)
    message = (litellm.stream_chunk_builder(list(answer)) if streaming else answer).choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, message.reasoning_content) == ("get_weather", THOUGHT)
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny in Köln"}
    second = litellm.completion(messages=[*ASK, message, result], tools=[WEATHER], **options)
    assert second.choices[0].message.content == ANSWER
    assert ARGUMENTS in agent_server.engine.prompts[-1]


def test_structured_output(litellm, options):
    answer = litellm.completion(messages=ASK, response_format=Sky, **options)
    assert Sky.model_validate_json(answer.choices[0].message.content)


def test_responses(agent_server, litellm):
    options = {"model": "openai/mock", "api_base": f"{agent_server.base_url}/v1", "api_key": KEY}
    assert litellm.responses(input="Rain?", **options).output_text == ANSWER
    *_, last = litellm.responses(input="Rain?", stream=True, **options)
    assert last.response.output_text == ANSWER
