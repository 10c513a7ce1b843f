"""Strict tools that may be called: text stays what the model says, and a call that it begins fits the schema."""

import pytest

from tests.serve.chats import HERMES, chat_engine
from tests.serve.client_checks import check_error, client
from tests.serve.test_required_tools import CHAT, FUNCTIONS, NOTHING, check

STRICT = [{"type": "function", "function": function | {"strict": True}} for function in FUNCTIONS]
WRONG = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bonn", "days": 0}}\n</tool_call>'
CHAT = CHAT | {"tools": STRICT, "seed": 3}


def ask(server, **options):
    return client(server.base_url).chat.completions.create(**CHAT | options).choices[0]


@pytest.fixture(params=["special", "plain"])
def model(request):
    def make(says, **options):
        return chat_engine(says, special=request.param == "special", **options)

    return make


def test_calls_fit_and_text_stays(start_server, model):
    engine, served = model(f"Let me <look>.\n{WRONG}\n{WRONG}")
    server = start_server(served)
    loose = ask(server, tools=[{"type": "function", "function": function} for function in FUNCTIONS])
    assert all('"days": 0' in call.function.arguments for call in loose.message.tool_calls)
    answer = ask(server)
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == loose.message.content == "Let me <look>."
    assert len(answer.message.tool_calls) == 2
    for call in answer.message.tool_calls:
        assert call.function.name == "weather"
        check(call.function.name, call.function.arguments)
    assert engine.prompts[0] == engine.prompts[1], "templates are not told what is strict"
    streamed = client(server.base_url).chat.completions.create(**CHAT, stream=True)
    pieces = [call for chunk in streamed for call in chunk.choices[0].delta.tool_calls or []]
    joined = "".join(piece.function.arguments for piece in pieces if piece.index == 1)
    assert joined == answer.message.tool_calls[1].function.arguments


def test_only_strict_ones_are_held(start_server, model):
    other = WRONG.replace('"weather"', '"now"')
    _, served = model(f"{other}\n{WRONG}")
    half = [STRICT[0], {"type": "function", "function": {"name": "now", "parameters": NOTHING}}]
    loose, held = ask(start_server(served), tools=half).message.tool_calls
    assert (loose.function.name, loose.function.arguments) == ("now", '{"city": "Bonn", "days": 0}')
    check("weather", held.function.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
def test_an_answer_without_calls_is_the_same(start_server, special):
    """To the last token, at any temperature."""
    for says in (None, 'No <tool_cal> here: {"name": 1}\n'):
        _, served = chat_engine(says, special=special)
        server = start_server(served)
        loose = [{"type": "function", "function": function} for function in FUNCTIONS]
        for seed in range(3):
            free, held = (
                ask(server, tools=tools, seed=seed, logprobs=True, temperature=1) for tools in (loose, STRICT)
            )
            assert [t.token for t in free.logprobs.content] == [t.token for t in held.logprobs.content]
            assert free.message == held.message


@pytest.mark.parametrize("opened", [True, False], ids=["opened by the prompt", "by the model"])
def test_thoughts_are_free(start_server, model, opened):
    thought = f"maybe {WRONG}, or not"
    template = HERMES + ("{% if add_generation_prompt %}<think>{% endif %}" if opened else "")
    _, served = model(f"{'' if opened else '<think>'}{thought}</think>{WRONG}", template=template)
    message = ask(start_server(served)).message
    assert message.reasoning == thought
    (call,) = message.tool_calls
    check(call.function.name, call.function.arguments)


def test_the_other_apis(start_server, model):
    _, served = model(f"So: {WRONG}")
    server = start_server(served)
    tools = [{"type": "function", "strict": True, **function} for function in FUNCTIONS]
    answer = server.post("/v1/responses", {"model": "mock", "input": "Rain?", "tools": tools}).json()
    assert [tool["strict"] for tool in answer["tools"]] == [True, True]
    (call,) = [item for item in answer["output"] if item["type"] == "function_call"]
    check(call["name"], call["arguments"])
    tools = [{"name": f["name"], "input_schema": f["parameters"], "strict": True} for f in FUNCTIONS]
    body = {"model": "mock", "max_tokens": 400, "messages": [{"role": "user", "content": "Rain?"}], "tools": tools}
    (block,) = [b for b in server.post("/v1/messages", body).json()["content"] if b["type"] == "tool_use"]
    assert block["input"]["city"] in ("Köln", "Bonn")


def test_what_cannot_be_held(start_server, model):
    _, served = model("Hm.")
    server = start_server(served)
    bad = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"type": "object", "not": {}}}}
    answer = server.post("/v1/chat/completions", CHAT | {"tools": [bad]})
    assert "cannot be held to" in check_error(answer, 400, "tools")
    for choice, status in (("none", 200), ("auto", 400)):
        answer = server.post("/v1/chat/completions", CHAT | {"tools": [*STRICT, bad], "tool_choice": choice})
        assert answer.status_code == status
    bad["function"]["strict"] = "yes"
    answer = server.post("/v1/chat/completions", CHAT | {"tools": [bad]})
    assert "must be true or false" in check_error(answer, 400, "tools")
