"""Thoughts in front of what a grammar holds, in all three chat APIs: the model may open one itself, and need not."""

import itertools
import json

import pytest

from jaxspec.grammar.thought import HarmonyThoughts
from tests.matrices import full
from tests.serve.chats import ARGUMENTS, CALL, WEATHER, chat_engine
from tests.serve.client_checks import client
from tests.serve.mock_engine import SPECIAL, MockEngine, byte_tokenizer, served
from tests.serve.sse import named_events
from tests.serve.test_required_tools import TOOLS, check

SKY = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "sky", "schema": SKY}}
CHAT = {"model": "mock", "messages": [{"role": "user", "content": "Rain?"}], "max_tokens": 400}
NAMED = {"type": "function", "function": {"name": "get_weather"}}
HARMONY = (
    "<|begin|>{% if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}{# <|channel|> #}"
)
# What a model says that thinks, and one that does not, in front of the text that is its answer.
THINKS = {
    "tags": ("<think>hm, {no}</think>", ""),
    "line": ("\n<think>hm, {no}</think>", ""),
    "gpt-oss": (
        "<|channel|>analysis<|message|>hm, {no}<|end|><|start|>assistant<|channel|>final<|message|>",
        "<|channel|>final<|message|>",
    ),
}


def engine_of(form: str, says: str, *, special: bool = True):
    if form != "gpt-oss":
        return chat_engine(says, special=special)[1]
    tags = [tag for tag in HarmonyThoughts().tokens if tag not in SPECIAL]
    tokenizer = byte_tokenizer(template=HARMONY, special=tags)
    eos = tokenizer.special_id("<|return|>")
    return served(MockEngine(tokenizer=tokenizer, says=says, eos=eos, max_model_len=4096), tokenizer)


@pytest.fixture
def server_of(start_server):
    def start(form, answer, *, thinks=True, special=True, **options):
        before = THINKS[form][0 if thinks else 1]
        if form == "line":
            options = {"reasoning_parser": "glm45", **options}
        return start_server(engine_of(form, before + answer, special=special), **options)

    return start


def ask(server, **body):
    """The message, whole and streamed alike."""
    whole = client(server.base_url).chat.completions.create(**CHAT, extra_body=body).choices[0].message
    streamed = client(server.base_url).chat.completions.create(**CHAT, extra_body=body, stream=True)
    deltas = [chunk.choices[0].delta for chunk in streamed if chunk.choices]
    for name in ("content", "reasoning"):
        joined = "".join(getattr(delta, name, None) or "" for delta in deltas)
        assert joined == (getattr(whole, name, None) or "")
    return whole


ASKED = {
    "json": ({"response_format": JSON_SCHEMA}, '{"sky": "blue"}'),
    "json_object": ({"response_format": {"type": "json_object"}}, '{"a": [1]}'),
    "regex": ({"structured_outputs": {"regex": "[a-f]{3}(-[0-9]{2})?"}}, "abc-12"),
    "choice": ({"structured_outputs": {"choice": ["yes", "yes, sir"]}}, "yes, sir"),
    "grammar": ({"structured_outputs": {"grammar": 'start: "x" /[0-9]+/'}}, "x12"),
    "structural_tag": (
        {
            "structured_outputs": {
                "structural_tag": {
                    "structures": [{"begin": "<f=x>", "schema": SKY, "end": "</f>"}],
                    "triggers": ["<f="],
                }
            }
        },
        'so: <f=x>{"sky": "grey"}</f> ok',
    ),
}


@pytest.mark.parametrize(
    ("form", "special"),
    [
        ("tags", True),
        pytest.param("gpt-oss", True, marks=pytest.mark.long),
        *full(("tags", False), ("line", True)),
    ],
)
def test_a_model_may_think_before_what_is_asked(server_of, form, special):
    """The grammar lets it, holds the answer behind it, and holds the first token where the model does not think."""
    for says, thinks in itertools.product([None, *ASKED], (True, False)):
        if says is None:  # an answer that nothing asked for would accept
            server = server_of(form, "Rain, I think", thinks=thinks, special=special)
            message = ask(server, structured_outputs={"choice": ["Rain, maybe", "Rain, surely"]}, seed=4)
            assert message.content in ("Rain, maybe", "Rain, surely")
        else:
            body, answer = ASKED[says]
            message = ask(server_of(form, answer, thinks=thinks, special=special), **body)
            assert message.content == answer
        assert message.reasoning == message.reasoning_content == ("hm, {no}" if thinks else None)


@pytest.mark.parametrize("special", [True, False])
def test_a_model_may_think_before_a_call(server_of, special):
    server = server_of("tags", CALL, special=special)
    for choice in ("required", NAMED):
        message = ask(server, tools=[WEATHER], tool_choice=choice)
        assert message.reasoning == "hm, {no}"
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    message = ask(server, tools=[WEATHER], response_format=JSON_SCHEMA)
    assert (message.reasoning, len(message.tool_calls)) == ("hm, {no}", 1)


def test_gpt_oss_may_think_before_a_call(start_server):
    call = f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}"
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for before in (thought, ""):
        server = start_server(engine_of("gpt-oss", before + call))
        message = ask(server, tools=[WEATHER], tool_choice="required")
        assert [call.function.arguments for call in message.tool_calls] == [ARGUMENTS]
        assert message.reasoning == ("hm" if before else None)
    server = start_server(engine_of("gpt-oss", f'{thought}<|channel|>final<|message|>{{"sky": "blue"}}'))
    message = ask(server, tools=[WEATHER], response_format=JSON_SCHEMA)
    assert (message.content, message.reasoning) == ('{"sky": "blue"}', "hm")


def test_a_call_that_ends_a_thought_is_held(start_server):
    """In formats whose calls cannot stand in a thought."""
    template = "{{ tools }}{% for m in messages %}<|{{ m.role }}|><|im_middle|>{{ m.content }}{% endfor %}"
    tags = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>")
    tags += ("<|tool_call_argument_begin|>", "<think>", "</think>")
    tokenizer = byte_tokenizer(template=template + "{# <|tool_call_begin|> think> #}", special=tags)
    call = f"{tags[0]}{tags[2]}functions.weather:0{tags[4]}"
    says = f"<think>hm{call}{{}}{tags[3]}{tags[1]}"
    server = start_server(served(MockEngine(tokenizer=tokenizer, says=says, max_model_len=4096), tokenizer))
    message = ask(server, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, seed=2)
    assert message.reasoning == "hm"
    (call,) = message.tool_calls
    check(call.function.name, call.function.arguments)


@pytest.mark.slow
@pytest.mark.parametrize("form", THINKS)
@pytest.mark.parametrize(
    "extra",
    [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}],
    ids=["enable_thinking", "reasoning_effort"],
)
def test_a_request_may_turn_thoughts_off(server_of, form, extra):
    message = ask(server_of(form, "yes"), structured_outputs={"choice": ["yes", "no"]}, **extra)
    assert message.content in ("yes", "no")
    assert message.reasoning is None


def test_thoughts_that_stay_in_the_text(server_of):
    message = ask(server_of("tags", "yes"), structured_outputs={"choice": ["yes", "no"]}, separate_reasoning=False)
    assert message.content == "<think>hm, {no}</think>yes"
    message = ask(server_of("tags", "yes"), structured_outputs={"choice": ["yes", "no"]}, include_reasoning=False)
    assert (message.content, message.reasoning) == ("yes", None)


@pytest.mark.parametrize("form", THINKS)
def test_responses(server_of, form):
    server = server_of(form, '{"sky": "blue"}')
    text = {"format": {"type": "json_schema", "name": "sky", "schema": SKY}}
    body = {"model": "mock", "input": "Rain?", "text": text}
    answer = server.post("/v1/responses", body).json()
    thought, said = answer["output"]
    assert thought["content"][0]["text"] == "hm, {no}"
    assert said["content"][0]["text"] == '{"sky": "blue"}'
    last = named_events(server.base_url, "/v1/responses", body | {"stream": True})[-1]
    assert [item["content"][0]["text"] for item in last["response"]["output"]] == ["hm, {no}", '{"sky": "blue"}']


@pytest.mark.slow
@pytest.mark.parametrize("form", THINKS)
def test_messages(server_of, form):
    server = server_of(form, '{"sky": "blue"}')
    form = {"format": {"type": "json_schema", "schema": SKY}}
    body = {"model": "mock", "max_tokens": 400, "messages": CHAT["messages"], "output_config": form}
    thought, said = server.post("/v1/messages", body).json()["content"]
    assert (thought["thinking"], said["text"]) == ("hm, {no}", '{"sky": "blue"}')
    (said,) = server.post("/v1/messages", body | {"thinking": {"type": "disabled"}}).json()["content"]
    assert json.loads(said["text"])["sky"] in ("blue", "grey")
    events = named_events(server.base_url, "/v1/messages", body | {"stream": True})
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert "".join(delta.get("thinking", "") for delta in deltas) == "hm, {no}"
    assert "".join(delta.get("text", "") for delta in deltas) == '{"sky": "blue"}'
