"""`response_format` and `structured_outputs` over HTTP; the mock engine writes what its masks allow."""

import json
import re

import pytest

from tests.schemas import UNSUPPORTED
from tests.serve.chats import chat_engine
from tests.serve.client_checks import check_error, client, model_name, stream_texts
from tests.serve.mock_engine import MockEngine, served

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "sizes", "kind"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "hi"}]
TAG = {"type": "tag", "begin": "<a>", "content": {"type": "regex", "pattern": "[0-9]{3}"}, "end": "</a>"}


def is_a_thing(text):
    thing = json.loads(text)
    assert list(thing) == ["name", "sizes", "kind"]
    assert isinstance(thing["name"], str)
    assert all(isinstance(size, int) for size in thing["sizes"])
    assert thing["kind"] in ("a", "b")
    return True


def test_json_schema(mock_server):
    openai_client = client(mock_server.base_url)
    asked = {"model": model_name(mock_server.base_url), "max_tokens": 400, "seed": 3}
    whole = openai_client.chat.completions.create(messages=MESSAGES, response_format=FORMAT, n=3, **asked)
    texts = [choice.message.content for choice in whole.choices]
    assert all(map(is_a_thing, texts))
    assert {choice.finish_reason for choice in whole.choices} == {"stop"}
    assert len(set(texts)) > 1, "each choice follows a matcher of its own"
    streamed = stream_texts(mock_server.base_url, chat=True, messages=MESSAGES, response_format=FORMAT, n=3, **asked)
    assert list(streamed.values()) == texts
    completion = openai_client.completions.create(prompt="hi", extra_body={"response_format": FORMAT}, **asked)
    assert is_a_thing(completion.choices[0].text)


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"structured_outputs": {"choice": ["yes", "no"]}}, "yes|no"),
        ({"structured_outputs": {"regex": "[a-f]{3}-[0-9]{2}"}}, "[a-f]{3}-[0-9]{2}"),
        ({"structured_outputs": {"grammar": 'start: "x" /[0-9]/', "regex": None}}, "x[0-9]"),
        ({"structured_outputs": {"json": {"enum": [1, 22]}, "disable_fallback": True}}, "1|22"),
        ({"structured_outputs": {"json": '{"const": "a"}', "disable_any_whitespace": False}}, '"a"'),
        ({"structured_outputs": {"structural_tag": {"type": "structural_tag", "format": TAG}}}, "<a>[0-9]{3}</a>"),
        ({"response_format": {"type": "structural_tag", "format": TAG}}, "<a>[0-9]{3}</a>"),
        ({"response_format": {"type": "text"}, "stop": "stop"}, r"(.|\n)*"),
    ],
)
def test_each_field(mock_server, asked, pattern):
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        answer = mock_server.post(path, body | asked | {"max_tokens": 100})
        assert answer.status_code == 200, answer.text
        choice = answer.json()["choices"][0]
        assert re.fullmatch(pattern, choice["text"] if "text" in choice else choice["message"]["content"])
        assert choice["finish_reason"] == "stop" or pattern.endswith("*")


def test_a_cut_at_max_tokens_is_told(mock_server):
    answer = mock_server.post("/v1/completions", {"prompt": "x", "response_format": FORMAT, "max_tokens": 3}).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert '{"name"'.startswith(answer["choices"][0]["text"].replace(" ", "").replace("\n", "")[:1])


BAD = {
    "two": ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "structured_outputs", "give either"),
    "no type": (
        {"response_format": {}},
        "response_format.type",
        "one of text, json_object, json_schema, structural_tag",
    ),
    "tag": (
        {"response_format": {"type": "structural_tag", "format": TAG | {"token": 3}}},
        "structured_outputs",
        "structured_outputs.structural_tag cannot be compiled: format.token is not supported",
    ),
    "no object": ({"response_format": "json"}, "response_format", "must be an object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "name and schema"),
    "no name": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
        "response_format.json_schema.name",
        "must be a text",
    ),
    "other field": (
        {"response_format": {"type": "text", "schema": {}}},
        "response_format.'schema'",
        "unknown parameter",
    ),
    "keyword": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}},
        "structured_outputs",
        'Unimplemented keys: ["not"]',
    ),
    "none": ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    "unknown": ({"structured_outputs": {"ebnf": "x"}}, "structured_outputs.'ebnf'", "unknown parameter"),
    "type": ({"structured_outputs": {"choice": "x"}}, "structured_outputs.choice", "must be a list of texts"),
    "white space": (
        {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
        "structured_outputs.disable_any_whitespace",
        "not supported",
    ),
    "regex": ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be compiled"),
    "ignore_eos": ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "does not go with"),
}


@pytest.mark.parametrize(("asked", "param", "words"), BAD.values(), ids=BAD)
def test_bad_grammar_is_one_400(mock_server, asked, param, words):
    """Of the place, and others go on."""
    place, param = param, param.partition(".")[0]
    for path, body in (("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": MESSAGES})):
        message = check_error(mock_server.post(path, body | asked | {"max_tokens": 8}), 400, param)
        assert words in message
        assert place in message or "." not in place
    assert mock_server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200


def places_of(schema):
    """Where a schema may be in a request: path and fields."""
    chat, completions, messages = "/v1/chat/completions", "/v1/completions", {"messages": MESSAGES}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    tag = TAG | {"content": {"type": "json_schema", "json_schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    return {
        "response_format": (chat, messages | {"response_format": form}),
        "json": (completions, {"prompt": "hi", "structured_outputs": {"json": schema}}),
        "tag": (completions, {"prompt": "hi", "response_format": {"type": "structural_tag", "format": tag}}),
        "tool": (chat, messages | {"tools": [tool], "tool_choice": "required"}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("place", places_of({}))
def test_unsupported_keywords_are_one_400(start_server, place):
    """That names the keyword, wherever the schema is, and others go on."""
    server = start_server(chat_engine(None)[1])
    for keyword, schema in UNSUPPORTED:
        path, body = places_of({"type": "object", "properties": {"a": schema}, "required": ["a"]})[place]
        answer = server.post(path, body | {"max_tokens": 8})
        assert answer.status_code == 400, (keyword, answer.text)
        told = re.split("cannot be (?:compiled|held to): ", answer.json()["error"]["message"])[1]
        assert (f'"{keyword}"' if told.startswith("Unimplemented keys") else keyword) in told
    assert server.post("/v1/completions", {"prompt": "hi", "max_tokens": 2}).status_code == 200


def test_models_without_a_tokenizer_say_so(start_server):
    server = start_server(served(MockEngine(), None))
    body = {"prompt": [1, 2], "structured_outputs": {"regex": "a"}, "max_tokens": 4}
    message = check_error(server.post("/v1/completions", body), 400, "structured_outputs")
    assert "this model has no tokenizer" in message


def test_openai_parse(mock_server):
    """openai-python's own way: a pydantic class in, an object out."""
    from pydantic import BaseModel

    class Thing(BaseModel):
        kind: bool
        size: int

    answer = client(mock_server.base_url).chat.completions.parse(
        model=model_name(mock_server.base_url), messages=MESSAGES, response_format=Thing, seed=1, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Thing)
