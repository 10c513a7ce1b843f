"""Servers whose model knows tools and thinks, and that writes what a test says."""

from collections.abc import Callable

from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

# Qwen's way: tools in a system message, calls as JSON between tags, thoughts between tags.
HERMES = (
    "<|begin|>{% if tools %}<|system|># Tools{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Answer <tool_call>{"name": <name>, "arguments": <object>}</tool_call>{% endif %}'
    "{% for m in messages %}{% if m.role == 'tool' %}<|user|><tool_response>{{ m.content }}</tool_response>"
    "{% else %}<|{{ m.role }}|>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    '{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>{"name": "{{ call.function.name }}", '
    '"arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}{% endif %}{% endfor %}'
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n\n{% endif %}{% endif %}{{ extra }}"
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TWO_CALLS = f"<think>\nrain?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
ARGUMENTS = '{"city": "Köln"}'


def chat_engine(
    says: str | Callable[[str], str] | None, *, special: bool = True, template: str = HERMES, **options
) -> tuple[MockEngine, object]:
    """An engine and what a server is started with. `special`: the tags are special tokens of the vocabulary."""
    tokenizer = byte_tokenizer(template=template, special=TAGS if special else ())
    engine = MockEngine(tokenizer=tokenizer, says=says, **{"max_model_len": 4096, **options})
    return engine, served(engine, tokenizer)
