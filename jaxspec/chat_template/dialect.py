"""What a chat template wants to be given, found out by rendering small chats with it.

Templates of different families take an earlier tool call in different ways: its arguments as an object or as a text,
and its message without a content as an empty text or as null. Some know no developer, some no tools, and some no system
message but the first.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxspec.errors import InvalidRequestError

_NAME, _KEY, _VALUE, _WORDS = "probed_name", "probed_key", "probed_value", "probed words"
_USER = {"role": "user", "content": "probed question"}
# Half of a surrogate pair, which an escape in JSON can spell, and no tokenizer takes.
_HALF = re.compile("[\ud800-\udfff]")
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": _WORDS,
        "parameters": {"type": "object", "properties": {_KEY: {"type": "string"}}},
    },
}


@dataclass(frozen=True)
class Dialect:
    """
    Attributes:
        tools: it shows the tools to the model.
        arguments_as_text: of an earlier call; else an object.
        null_content: of an earlier message that only calls tools; else an empty text.
        developer: it knows that role; else a developer is a system.
        late_system: it takes a system message after others.
        names_thinking: an earlier thought is `thinking`, too.
    """

    tools: bool = True
    arguments_as_text: bool = False
    null_content: bool = False
    developer: bool = True
    late_system: bool = True
    names_thinking: bool = False

    def adapted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages of a chat, with arguments as texts of JSON, as this template takes them."""
        out: list[dict[str, Any]] = []
        for message in messages:
            adapted = dict(message)
            if adapted["role"] == "developer" and not self.developer:
                adapted["role"] = "system"
            if adapted["role"] == "system" and not self.late_system and any(m["role"] != "system" for m in out):
                adapted["role"] = "user"
            if adapted.get("tool_calls"):
                adapted["tool_calls"] = [self._call(call) for call in adapted["tool_calls"]]
                adapted["content"] = adapted.get("content") or (None if self.null_content else "")
            # gpt-oss's template refuses a thought beside both calls and a text.
            thought = adapted.get("reasoning_content")
            if self.names_thinking and thought and not (adapted.get("content") and adapted.get("tool_calls")):
                adapted["thinking"] = thought
            out.append(adapted)
        return out

    def _call(self, call: Mapping[str, Any]) -> dict[str, Any]:
        """A model may have written arguments that are no JSON: they stay a text."""
        function = dict(call["function"])
        if not self.arguments_as_text:
            function["arguments"] = _object(function["arguments"])
        return {**call, "function": function}


def _object(text: str) -> Any:
    try:
        value = json.loads(text) if text.strip() else {}
        if "\\u" in text:
            value = json.loads(_HALF.sub("\ufffd", json.dumps(value, ensure_ascii=False)))
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text


def dialect_of(
    render: Callable[[list[dict[str, Any]], Mapping[str, Any]], str], *, names_thinking: bool = False
) -> Dialect:
    """
    Args:
        render: writes messages, and variables such as `tools`, with the template.
        names_thinking: as in `Dialect`.
    """

    def shows(words: str, *messages: dict[str, Any], **variables: Any) -> bool:
        try:
            return words in render([*messages], variables)
        except InvalidRequestError:
            return False

    def calls(*, as_text: bool, null: bool) -> bool:
        """The call is written, and its arguments not as Python writes an object."""
        arguments = f'{{"{_KEY}": "{_VALUE}"}}' if as_text else {_KEY: _VALUE}
        function = {"name": _NAME, "arguments": arguments}
        call = {"id": "functions.probed_name:0", "type": "function", "function": function}
        message = {"role": "assistant", "content": None if null else "", "tool_calls": [call]}
        try:
            text = render([_USER, message], {"tools": [_TOOL]}).partition(_USER["content"])[2]
        except InvalidRequestError:
            return False
        return _NAME in text and _VALUE in text and f"{{'{_KEY}'" not in text and f'{{\\"{_KEY}' not in text

    ways = [(as_text, null) for null in (False, True) for as_text in (False, True)]
    as_text, null = next((way for way in ways if calls(as_text=way[0], null=way[1])), (False, False))
    system = {"role": "system", "content": _WORDS}
    return Dialect(
        tools=shows(_NAME, _USER, tools=[_TOOL]),
        arguments_as_text=as_text,
        null_content=null,
        developer=shows(_WORDS, {"role": "developer", "content": _WORDS}, _USER),
        late_system=shows(_WORDS, _USER, {"role": "assistant", "content": "yes"}, system, _USER),
        names_thinking=names_thinking,
    )
