"""instructor: objects out of chats, whole and growing, in each of its ways to ask for them."""

import pytest

from tests.serve.clients.conftest import KEY, MARKS, Sky

pytestmark = MARKS
ASK = {"messages": [{"role": "user", "content": "Sky?"}], "max_retries": 0}


def openai_client(server, mode):
    import instructor
    import openai

    client = openai.OpenAI(base_url=f"{server.base_url}/v1", api_key=KEY, max_retries=0)
    return instructor.from_openai(client, mode=instructor.Mode[mode], model="mock")


@pytest.mark.parametrize("mode", ["TOOLS", "TOOLS_STRICT", "JSON_SCHEMA", "RESPONSES_TOOLS"])
def test_an_object(agent_server, mode):
    client = openai_client(agent_server, mode)
    sky, completion = client.create_with_completion(response_model=Sky, **ASK)
    assert isinstance(sky, Sky)
    assert completion.model == "mock"


def test_an_object_whose_schema_is_in_the_prompt_only(agent_server):
    agent_server.engine.says = '{"color": "blue", "windy": true}'
    sky = openai_client(agent_server, "JSON").create(response_model=Sky, **ASK)
    assert sky.model_dump() == {"color": "blue", "windy": True}
    assert "windy" in agent_server.engine.prompts[-1]


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_an_object_that_grows(agent_server, mode):
    *_, last = openai_client(agent_server, mode).create_partial(response_model=Sky, **ASK)
    assert Sky.model_validate(last.model_dump())


def test_an_object_of_messages(agent_server):
    import anthropic
    import instructor

    client = anthropic.Anthropic(base_url=agent_server.base_url, api_key=KEY, max_retries=0)
    sky = instructor.from_anthropic(client, model="mock", max_tokens=500).create(response_model=Sky, **ASK)
    assert isinstance(sky, Sky)
