"""What models of each family write, by the formats that their chat templates teach, and what it means."""

from dataclasses import dataclass, field

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
    "write_file": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "text": {"type": "string"},
            "lines": {"type": "array", "items": {"type": "integer"}},
            "append": {"type": "boolean"},
            "mode": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}
WEATHER = ("get_weather", {"city": "Köln <>&\"'\\ 日本 😀", "days": 3})
WRITE = (
    "write_file",
    {"path": "a/b.py", "text": "def f():\n\treturn {'a': [1]}\n", "lines": [1, 2], "append": True, "mode": None},
)
NOW = ("now", {})


@dataclass(frozen=True)
class Case:
    """
    Attributes:
        text: what the model writes.
        calls: names and arguments in it.
        content: the answer beside the calls.
        reasoning: the thought.
        ids: of the calls, where the format has them.
        prompt_end: how the prompt ends.
        reasoning_parser: read with this one too.
    """

    parser: str
    text: str
    calls: list[tuple[str, dict]] = field(default_factory=list)
    content: str = ""
    reasoning: str = ""
    ids: list[str] | None = None
    prompt_end: str = ""
    reasoning_parser: str | None = None


_CITY = '{"city": "Köln <>&\\"\'\\\\ 日本 😀", "days": 3}'
_TEXT = "def f():\n\treturn {'a': [1]}\n"
_WRITE_JSON = (
    '{"path": "a/b.py", "text": "def f():\\n\\treturn {\'a\': [1]}\\n", "lines": [1, 2], "append": true, "mode": null}'
)
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEP, _CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


def _v3(name: str, arguments: str) -> str:
    return f"{_CALL}function{_SEP}{name}\n```json\n{arguments}\n```{_CALLED}"


def _v31(name: str, arguments: str) -> str:
    return f"{_CALL}{name}{_SEP}{arguments}{_CALLED}"


def _kimi(call_id: str, arguments: str) -> str:
    return f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def _qwen(name: str, **parameters: str) -> str:
    written = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{written}</function>\n</tool_call>"


def _minimax(name: str, **parameters: str) -> str:
    written = "".join(f'<parameter name="{key}">{value}</parameter>\n' for key, value in parameters.items())
    return f'<invoke name="{name}">\n{written}</invoke>\n'


def _dsml(name: str, **parameters: tuple[str, str]) -> str:
    written = "".join(
        f'<｜DSML｜parameter name="{key}" string="{is_text}">{value}</｜DSML｜parameter>\n'
        for key, (is_text, value) in parameters.items()
    )
    return f'<｜DSML｜invoke name="{name}">\n{written}</｜DSML｜invoke>\n'


def _glm(name: str, between: str = "\n", **parameters: str) -> str:
    written = "".join(
        f"<arg_key>{key}</arg_key>{between}<arg_value>{value}</arg_value>{between}" for key, value in parameters.items()
    )
    return f"<tool_call>{name}{between}{written}</tool_call>"


_CITY_TEXT = WEATHER[1]["city"]
_WRITTEN = {"path": "a/b.py", "text": _TEXT, "lines": "[1, 2]", "append": "true", "mode": "null"}
_DSML_WRITTEN = {
    "path": ("true", "a/b.py"),
    "text": ("true", _TEXT),
    "lines": ("false", "[1, 2]"),
    "append": ("false", "true"),
    "mode": ("false", "null"),
}
_ANALYSIS = "<|channel|>analysis<|message|>"

CASES = [
    Case("deepseek_v3", f"Let me look.\n\n{_BEGIN}{_v3('get_weather', _CITY)}\n{_v3('now', '{}')}{_END}",
         [WEATHER, NOW], "Let me look."),
    Case("deepseek_v3", f"{_BEGIN}{_v3('write_file', _WRITE_JSON)}{_END}", [WRITE]),
    Case("deepseek_v3", f"<think>\nrain?\n</think>\n\nYes.{_BEGIN}{_v3('now', '{}')}{_END}", [NOW], "Yes.", "rain?",
         reasoning_parser="deepseek_r1"),
    Case("deepseek_v31", f"Let me look.{_BEGIN}{_v31('get_weather', _CITY)}{_v31('now', '{}')}{_END}", [WEATHER, NOW],
         "Let me look."),
    Case("deepseek_v31", f"{_BEGIN}{_v31('write_file', _WRITE_JSON)}{_v31('now', '')}", [WRITE, NOW]),
    Case("deepseek_v31", f"first this{_BEGIN}{_v31('now', '{}')}{_END}", [NOW], "", "first this", prompt_end="<think>",
         reasoning_parser="deepseek_v3"),
    Case("kimi_k2", f"Sure.<|tool_calls_section_begin|>{_kimi('functions.get_weather:7', _CITY)}"
         f"{_kimi('functions.now:8', '{}')}<|tool_calls_section_end|>", [WEATHER, NOW], "Sure.",
         ids=["functions.get_weather:7", "functions.now:8"]),
    Case("kimi_k2", f"<think>hm<|tool_calls_section_begin|>{_kimi('functions.write_file:0', _WRITE_JSON)}"
         "<|tool_calls_section_end|>", [WRITE], "", "hm", ids=["functions.write_file:0"], reasoning_parser="kimi_k2"),
    Case("hermes", f"Sure.\n{_hermes('get_weather', _CITY)}\n{_hermes('now', '{}')}\n", [WEATHER, NOW], "Sure."),
    Case("hermes", '<tool_call>{"arguments":{"city": "</tool_call>"},"name":"get_weather"}</tool_call>',
         [("get_weather", {"city": "</tool_call>"})]),
    Case("hermes", f"\n<think>\n\n</think>\n\n{_hermes('write_file', _WRITE_JSON)}", [WRITE], reasoning_parser="qwen3"),
    Case("hermes", f"a\nb\n</think>\n\nDone: {_hermes('now', '{}')}\nbye\n", [NOW], "Done:\nbye\n", "a\nb",
         prompt_end="<|im_start|>assistant\n<think>\n", reasoning_parser="qwen3"),
    Case("qwen3_coder", f"Ok\n\n{_qwen('get_weather', city=_CITY_TEXT, days='3')}\n{_qwen('now')}", [WEATHER, NOW], "Ok"),
    Case("qwen3_coder", _qwen("write_file", **_WRITTEN), [WRITE]),
    Case("qwen3_coder", "<function=get_weather>\n<parameter=city>\nA\n</parameter>\n</function>\n</tool_call>",
         [("get_weather", {"city": "A"})]),
    Case("llama3_json", f'{{"name": "get_weather", "parameters": {_CITY}}}; {{"name": "now", "parameters": {{}}}}',
         [WEATHER, NOW]),
    Case("llama3_json", f'<|python_tag|>{{"name": "write_file", "parameters": {_WRITE_JSON}}}', [WRITE]),
    Case("minimax_m2", "So:\n<minimax:tool_call>\n" + _minimax("get_weather", city=_CITY_TEXT, days="3")
         + _minimax("now") + "</minimax:tool_call>", [WEATHER, NOW], "So:"),
    Case("minimax_m2", f"mm\n</think>\n\n<minimax:tool_call>\n{_minimax('write_file', **_WRITTEN)}</minimax:tool_call>\n",
         [WRITE], "", "mm", prompt_end="]~b]ai\n<think>\n", reasoning_parser="minimax_m2"),
    Case("deepseek_v32", "So:\n\n<｜DSML｜function_calls>\n"
         + _dsml("get_weather", city=("true", _CITY_TEXT), days=("false", "3")) + _dsml("now")
         + "</｜DSML｜function_calls>", [WEATHER, NOW], "So:"),
    Case("deepseek_v32", f"<｜DSML｜tool_calls>\n{_dsml('write_file', **_DSML_WRITTEN)}</｜DSML｜tool_calls>", [WRITE]),
    Case("glm45", f"<think>hm</think>\nSo:\n{_glm('get_weather', city=_CITY_TEXT, days='3')}\n{_glm('now')}\n",
         [WEATHER, NOW], "So:", "hm", reasoning_parser="glm45"),
    Case("glm45", _glm("write_file", "", **_WRITTEN) + _glm("now", ""), [WRITE, NOW]),
    Case("gpt-oss", f"{_ANALYSIS}rain?<|end|><|start|>assistant<|channel|>commentary<|message|>Look.<|end|>"
         f"<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{_CITY}",
         [WEATHER], "Look.", "rain?", reasoning_parser="gpt-oss"),
    Case("gpt-oss", f"{_ANALYSIS}a<|end|><|start|>assistant<|channel|>final<|message|>It rains.", [], "It rains.", "a",
         reasoning_parser="gpt-oss"),
    Case("gpt-oss", f" to=functions.now<|channel|>commentary json<|message|>{{}}<|call|>"
         f"<|start|>assistant to=functions.write_file<|channel|>commentary<|message|>{_WRITE_JSON}<|call|>",
         [WRITE], " to=functions.now{}", reasoning_parser="gpt-oss"),
]  # fmt: skip

# What is no call, or no whole one: the text comes out as it is.
PLAIN = [
    ("deepseek_v3", f"{_BEGIN}oh{_END}"),
    ("deepseek_v3", f"{_BEGIN}{_CALL}function{_SEP}a b\n```json\n{{}}\n```{_CALLED}{_END}"),
    ("deepseek_v31", f"{_CALL}{'x' * 300}{_SEP}{{}}"),
    ("deepseek_v31", f"{_CALL}name only"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{}<|tool_call_end|>"),
    ("kimi_k2", "<|tool_call"),
    ("hermes", "<tool_call>\nnothing\n</tool_call> and <tool_call>"),
    ("hermes", '<tool_call>{"name": "now", "args": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "now", "arguments": "{}"}</tool_call>'),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "names": 1}</tool_call>'),
    ("hermes", '<tool_call>{ "arguments" : {"a": [1}'),
    ("qwen3_coder", "<tool_call>\n<function=a b>\n</function>\n</tool_call>"),
    ("qwen3_coder", "the <function> tag and <tool_call> too"),
    ("llama3_json", '{"name": "Bob", "parameters": {}}'),
    ("llama3_json", '  {"answer": 42}'),
    ("llama3_json", '<|python_tag|>search.call(query="x")'),
    ("minimax_m2", "<minimax:tool_call>\n<invoke>\n</minimax:tool_call>"),
    ("deepseek_v32", "<｜DSML｜function_calls>\n</｜DSML｜function_calls>"),
    ("glm45", "<tool_call>{}\n</tool_call>"),
    ("glm45", "<tool_call>two words\n</tool_call>"),
]
