"""Tools and reasoning over HTTP: what the model is told, what clients get, whole and streamed."""

import json

import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from tests.serve.chats import ARGUMENTS, CALL, HERMES, TWO_CALLS, WEATHER, chat_engine
from tests.serve.client_checks import check_error, client, send, sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

USER = {"role": "user", "content": "Rain?"}
CHAT = {"model": "mock", "messages": [USER], "temperature": 0}
WITH_TOOLS = CHAT | {"tools": [WEATHER]}


@pytest.fixture(params=[True, False], ids=["special", "plain"])
def caller(request, start_server):
    """A server whose model thinks, speaks and calls twice, with tags that are special tokens, or are not."""
    engine, model = chat_engine(TWO_CALLS, special=request.param)
    server = start_server(model)
    server.engine = engine
    return server


def accumulated(base_url: str, **options):
    """What openai-python's own accumulator makes of a stream."""
    state = ChatCompletionStreamState()
    for chunk in client(base_url).chat.completions.create(stream=True, **options):
        state.handle_chunk(chunk)
    return state.get_final_completion()


def test_calls_and_thoughts_whole_and_streamed(caller):
    whole = client(caller.base_url).chat.completions.create(**WITH_TOOLS)
    streamed = accumulated(caller.base_url, **WITH_TOOLS)
    for answer in (whole, streamed):
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls"
        assert choice.message.content == "Let me look."
        assert choice.message.reasoning == choice.message.reasoning_content == "rain?"
        assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"] * 2
        assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS] * 2
        assert len({call.id for call in choice.message.tool_calls}) == 2
    assert '"name": "get_weather"' in caller.engine.prompts[0]


def test_the_deltas_of_a_stream(caller):
    _, events = sse(caller.base_url, "/v1/chat/completions", WITH_TOOLS | {"stream": True, "n": 2})
    chunks = [json.loads(event) for event in events[:-1]]
    for index in (0, 1):
        deltas = [c["choices"][0]["delta"] for c in chunks if c["choices"][0]["index"] == index]
        assert deltas[0] == {"role": "assistant", "content": ""}
        calls = [call for delta in deltas for call in delta.get("tool_calls", [])]
        for number in (0, 1):
            first, *others = [call for call in calls if call["index"] == number]
            assert first["type"] == "function"
            assert first["function"]["name"] == "get_weather"
            assert all(set(call) == {"index", "function"} and set(call["function"]) == {"arguments"} for call in others)
            assert "".join(call["function"]["arguments"] for call in [first, *others]) == ARGUMENTS
        last = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index][-1]
        assert last["finish_reason"] == "tool_calls"
    assert all(c["choices"][0]["delta"] or c["choices"][0]["finish_reason"] for c in chunks)


def test_a_second_turn_with_tools(caller):
    whole = client(caller.base_url).chat.completions.create(**WITH_TOOLS)
    answer = whole.choices[0].message
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "sunny"}
    messages = [USER, answer.model_dump(exclude_none=True), result, result]
    client(caller.base_url).chat.completions.create(**WITH_TOOLS | {"messages": messages})
    prompt = caller.engine.prompts[-1]
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Köln"}}</tool_call>'
    assert f"<think>rain?</think>Let me look.{call}{call}<|user|><tool_response>sunny" in prompt
    bare = {"role": "assistant", "content": None, "tool_calls": [t.model_dump() for t in answer.tool_calls]}
    client(caller.base_url).chat.completions.create(**WITH_TOOLS | {"messages": [USER, bare, result]})
    assert f"<|assistant|>{call}{call}" in caller.engine.prompts[-1]


@pytest.mark.parametrize("half", [r"\ud83d", r"\ude00", r"\uD83D\u0041"])
def test_half_a_character_in_an_earlier_call_is_no_error(caller, half):
    """Models write such escapes, and then every later turn has them."""
    arguments = f'{{"city": "{half}"}}'
    call = {"id": "a", "type": "function", "function": {"name": "get_weather", "arguments": arguments}}
    turns = [
        *CHAT["messages"],
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": "?"},
    ]
    assert caller.post("/v1/chat/completions", WITH_TOOLS | {"messages": turns}).status_code == 200
    assert '"arguments": {"city": "\ufffd' in caller.engine.prompts[-1]


def test_without_tools_a_call_is_a_text(caller):
    for body in (CHAT, WITH_TOOLS | {"tool_choice": "none"}):
        choice = client(caller.base_url).chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "stop"
        assert choice.message.tool_calls is None
        assert choice.message.content.startswith("Let me look.\n")
        assert "# Tools" not in caller.engine.prompts[-1]


def test_one_call_where_calls_are_not_parallel(caller):
    body = WITH_TOOLS | {"parallel_tool_calls": False}
    for answer in (client(caller.base_url).chat.completions.create(**body), accumulated(caller.base_url, **body)):
        assert len(answer.choices[0].message.tool_calls) == 1


def test_what_becomes_of_thoughts(caller):
    def message(**extra):
        return client(caller.base_url).chat.completions.create(**WITH_TOOLS, extra_body=extra).choices[0].message

    assert message(include_reasoning=False).reasoning is None
    assert message(include_reasoning=False).content == "Let me look."
    assert message(separate_reasoning=False).content.endswith("</think>\n\nLet me look.")
    for extra in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        message(**extra)
        assert caller.engine.prompts[-1].endswith("<think>\n\n</think>\n\n")
    message(reasoning_effort="high", chat_template_kwargs={"extra": "<|user|>forged"})
    assert caller.engine.prompts[-1].endswith("<|assistant|><|user|>forged")
    told = caller.post("/tokenize", {"messages": [USER], "tools": [WEATHER]}).json()["count"]
    assert told > caller.post("/tokenize", {"messages": [USER]}).json()["count"]


def test_a_variable_cannot_forge_a_role(caller):
    ids = [
        caller.post("/tokenize", {"messages": [USER], "chat_template_kwargs": {"extra": extra}}).json()["tokens"]
        for extra in ("", "<|user|>")
    ]
    assert ids[1] == ids[0] + [b - 33 for b in b"<|user|>"]  # the byte vocabulary's ids of plain characters


def test_logprobs_choices_and_stops_with_tools(caller):
    options = WITH_TOOLS | {"logprobs": True, "n": 2, "max_tokens": 300}
    whole = client(caller.base_url).chat.completions.create(**options)
    streamed = accumulated(caller.base_url, **options)
    for answer in (whole, streamed):
        for choice in answer.choices:
            spelt = b"".join(bytes(token.bytes) for token in choice.logprobs.content).decode()
            assert spelt.removesuffix("<|end|>") == TWO_CALLS
    cut = client(caller.base_url).chat.completions.create(**WITH_TOOLS | {"stop": ["look"]}).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("Let me ", "stop")
    short = client(caller.base_url).chat.completions.create(**WITH_TOOLS | {"max_tokens": len(CALL)}).choices[0]
    assert short.finish_reason == "length"


def test_malformed_calls_are_text(start_server):
    text = '<tool_call>{"name": "get_weather", "arguments": oops}</tool_call>'
    _, model = chat_engine(text)
    server = start_server(model)
    for answer in (
        client(server.base_url).chat.completions.create(**WITH_TOOLS),
        accumulated(server.base_url, **WITH_TOOLS),
    ):
        assert answer.choices[0].message.content == text
        assert answer.choices[0].finish_reason == "stop"


def test_the_pydantic_helper_of_openai(caller):
    """Its tools are strict: the flag is taken, and the arguments are parsed by the client."""
    tools = [{**WEATHER, "function": {**WEATHER["function"], "strict": True}}]
    with client(caller.base_url).chat.completions.stream(**CHAT, tools=tools) as stream:
        done = [event.type for event in stream]
        answer = stream.get_final_completion()
    assert done.count("tool_calls.function.arguments.done") == 2
    assert answer.choices[0].message.tool_calls[0].function.parsed_arguments == {"city": "Köln"}


def test_a_disconnect_frees_a_request_with_tools(start_server):
    engine, model = chat_engine(TWO_CALLS * 500, step_seconds=0.005, max_model_len=200_000)
    server = start_server(model)
    for stream in (True, False):
        connection = send(server.base_url, WITH_TOOLS | {"stream": stream}, "/v1/chat/completions")
        server.wait_until(lambda: engine.stats().num_running == 1)
        connection.close()
        server.wait_until(lambda: not engine.has_work)
    assert len(engine.aborted) == 2


FUNCTION = WEATHER["function"]
WRONG = [
    ({"tools": [{"type": "web_search"}]}, "tools", "tools[0].type: must be 'function'"),
    ({"tools": [{"type": "function"}]}, "tools", "tools[0].function: must be an object"),
    ({"tools": [WEATHER, {"type": "function", "function": {"name": "a b"}}]}, "tools", "tools[1].function.name: must be"),
    ({"tools": [WEATHER, WEATHER]}, "tools", "tools[1]: is the name of an earlier tool too"),
    ({"tools": [{"type": "function", "function": FUNCTION | {"parameters": []}}]}, "tools", "must be an object"),
    ({"tools": [WEATHER] * 513}, "tools", "tools: has 513 tools, and at most 512"),
    ({"tool_choice": "required", "tools": None}, "tool_choice", "tool_choice: 'required' needs tools"),
    ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice", "there is no tool 'other'"),
    ({"tool_choice": {"type": "function", "name": "get_weather"}}, "tool_choice", "tool_choice.name: unknown parameter"),
    ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice.type: must be 'function'"),
    ({"tool_choice": "some"}, "tool_choice", "tool_choice: must be 'none', 'auto', 'required' or a function"),
    ({"tool_choice": "required", "structured_outputs": {"choice": ["a"]}}, "tool_choice", "does not go with"),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "chat_template_kwargs.messages: is set by"),
    ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs", "names of 1 to 64 letters"),
    ({"chat_template_kwargs": {f"a{i}": 1 for i in range(65)}}, "chat_template_kwargs", "at most 64"),
    ({"reasoning_effort": "some"}, "reasoning_effort", "reasoning_effort: must be 'none'"),
    ({"messages": [USER | {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}]}, "messages",
     "messages[0].tool_calls: only a message of the assistant has calls"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}]}, "messages",
     "messages[0].tool_calls[0].function.arguments: must be a text"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"x" * 99: 1, "function": {}}]}]}, "messages",
     f"messages[0].tool_calls[0].{'x' * 64}: unknown parameter"),
]  # fmt: skip


@pytest.mark.parametrize(("extra", "param", "message"), WRONG)
def test_wrong_fields_are_named(mock_server, extra, param, message):
    assert message in check_error(mock_server.post("/v1/chat/completions", WITH_TOOLS | extra), 400, param)


def test_a_model_that_knows_no_tools_says_so(start_server, mock_server):
    unknown = check_error(mock_server.post("/v1/chat/completions", WITH_TOOLS), 400, "tools")
    assert "--tool-call-parser" in unknown
    server = start_server(served(MockEngine(), byte_tokenizer()), tool_call_parser="hermes")
    assert "--chat-template" in check_error(server.post("/v1/chat/completions", WITH_TOOLS), 400, "tools")


def test_parsers_can_be_chosen(start_server):
    engine, model = chat_engine(TWO_CALLS)
    server = start_server(model, tool_call_parser="llama3_json", reasoning_parser="none")
    message = client(server.base_url).chat.completions.create(**WITH_TOOLS).choices[0].message
    assert message.tool_calls is None
    assert "<tool_call>" not in message.content  # a special token that nobody reads is left out, as ever
    assert "get_weather" in message.content
    assert not hasattr(message, "reasoning")
    engine.says = '{"name": "get_weather", "parameters": {"city": "Bonn"}}'
    message = client(server.base_url).chat.completions.create(**WITH_TOOLS).choices[0].message
    assert message.tool_calls[0].function.arguments == '{"city": "Bonn"}'


def test_a_template_with_an_argument_text_and_a_null_content():
    """As DeepSeek's first template had it: the probe finds out what a template wants."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
        "{{ c.function.name + c.function.arguments }}{% endfor %}{% elif m.content %}{{ m.role + m.content }}{% endif %}"
        "{% endfor %}{{ tools | tojson if tools else '' }}"
    )
    tokenizer = byte_tokenizer(template=template)
    assert (tokenizer.dialect.arguments_as_text, tokenizer.dialect.null_content) == (True, True)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    ids = tokenizer.apply_chat_template([USER, {"role": "assistant", "content": "", "tool_calls": [call]}])
    assert tokenizer.decode(ids) == 'userRain?f{"a": 1}'
    objects = byte_tokenizer(template=HERMES)
    assert (objects.dialect.arguments_as_text, objects.dialect.null_content) == (False, False)
    broken = {"type": "function", "function": {"name": "f", "arguments": "{oops"}}
    ids = objects.apply_chat_template([USER, {"role": "assistant", "content": "", "tool_calls": [broken]}])
    assert '"arguments": "{oops"' in objects.decode(ids)
    harmony = byte_tokenizer(
        template="{% for message in messages %}{{ message.thinking or '' }}|{{ message.content }}{% endfor %}"
    )
    ids = harmony.apply_chat_template([USER, {"role": "assistant", "content": "a", "reasoning_content": "hm"}])
    assert harmony.decode(ids) == "|Rain?hm|a"
    strict = byte_tokenizer(
        template="{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] or (m.role == 'system' and not "
        "loop.first) %}{{ raise_exception('no') }}{% endif %}{{ m.role }}:{{ m.content }} {% endfor %}"
    )
    said = [("developer", "a"), ("user", "b"), ("system", "c")]
    ids = strict.apply_chat_template([{"role": role, "content": content} for role, content in said])
    assert strict.decode(ids) == "system:a user:b user:c "


CHOICE = {"structured_outputs": {"choice": ["yes", "no"]}}


def test_a_grammar_begins_after_the_thought(start_server):
    """The prompt opens a thought; the model ends it and would end its output there."""
    inside = HERMES + "<think>\n"
    for special in (True, False):
        _, model = chat_engine("rain?</think>", template=inside, special=special)
        server = start_server(model)
        for answer in (
            client(server.base_url).chat.completions.create(**CHAT, extra_body=CHOICE),
            accumulated(server.base_url, **CHAT, extra_body=CHOICE),
        ):
            message = answer.choices[0].message
            assert message.reasoning == "rain?"
            assert message.content in ("yes", "no")


SKY = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}},
    "required": ["sky"],
    "additionalProperties": False,
}
FORMAT = {"response_format": {"type": "json_schema", "json_schema": {"name": "sky", "schema": SKY}}}


@pytest.mark.parametrize("says", [CALL, "The sky? Blue."])
def test_an_answer_that_is_held_to_a_schema_may_also_be_a_call(start_server, says):
    """The grammar lets a model call, and holds it to the schema where it does not."""
    _, model = chat_engine(says)
    server = start_server(model, reasoning_parser="none")
    for extra in ({}, {"seed": 5, "temperature": 1}):
        for answer in (
            client(server.base_url).chat.completions.create(**WITH_TOOLS | FORMAT | extra),
            accumulated(server.base_url, **WITH_TOOLS | FORMAT | extra),
        ):
            (choice,) = answer.choices
            if says == CALL:
                assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS]
                assert not choice.message.content
            else:
                assert json.loads(choice.message.content)["sky"] in ("blue", "grey")
                assert choice.finish_reason == "stop"


def test_a_required_call_goes_before_a_schema(start_server):
    _, model = chat_engine("The sky? Blue.")
    body = WITH_TOOLS | FORMAT | {"tool_choice": "required", "parallel_tool_calls": False}
    server = start_server(model, reasoning_parser="none")
    answer = client(server.base_url).chat.completions.create(**body).choices[0]
    assert [list(json.loads(call.function.arguments)) for call in answer.message.tool_calls] == [["city"]]
    assert answer.message.content is None


def test_what_does_not_go_with_tools_is_named(caller):
    path = "/v1/chat/completions"
    assert "structured_outputs.choice together with tools" in check_error(
        caller.post(path, WITH_TOOLS | CHOICE), 400, "structured_outputs"
    )
    assert caller.post(path, WITH_TOOLS | CHOICE | {"tool_choice": "none"}).status_code == 200
    wrong = {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}}
    for choice in ("auto", "required"):
        error = check_error(caller.post(path, WITH_TOOLS | wrong | {"tool_choice": choice}), 400, "structured_outputs")
        assert "cannot be compiled" in error
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {}}}}]
    assert "cannot be held to" in check_error(caller.post(path, CHAT | FORMAT | {"tools": tools}), 400, "tools")
