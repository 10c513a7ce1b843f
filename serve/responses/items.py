"""The items of `input`, read into a chat's messages."""

import json
from typing import Any

from pydantic_core import PydanticCustomError

from serve.fields import invalid
from serve.protocol import MAX_MESSAGES, MAX_PARTS, content_text
from serve.tool_fields import Json, check_id, check_list, check_name, check_object, check_text

# What other servers' own tools have left in a history: nothing of it was said to this model.
_SKIPPED = frozenset(
    [
        "web_search_call",
        "file_search_call",
        "computer_call",
        "computer_call_output",
        "code_interpreter_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "shell_call",
        "shell_call_output",
        "mcp_call",
        "mcp_list_tools",
        "mcp_approval_request",
        "mcp_approval_response",
        "tool_search_call",
        "tool_search_output",
        "compaction",
        "compaction_trigger",
        "ghost_snapshot",
    ]
)
_ROLES = ("user", "assistant", "system", "developer")
_MAX_ITEMS = 2 * MAX_MESSAGES


class _Chat:
    """Messages as they grow: thought, text and calls of one turn are one message of the assistant."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._turn: Json | None = None

    def say(self, role: str, text: str) -> None:
        if role != "assistant":
            self.end_turn()
            self.messages.append({"role": role, "content": text})
            return
        turn = self._in_turn()
        if "tool_calls" in turn:
            turn = self._new_turn()
        turn["content"] = f"{turn['content']}\n{text}" if turn["content"] else text

    def think(self, text: str) -> None:
        turn = self._in_turn()
        if turn["content"] or "tool_calls" in turn:
            turn = self._new_turn()
        turn["reasoning"] = f"{turn['reasoning']}\n{text}" if "reasoning" in turn else text

    def call(self, call_id: str, name: str, arguments: str) -> None:
        call = {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        self._in_turn().setdefault("tool_calls", []).append(call)

    def result(self, call_id: str, text: str) -> None:
        self.end_turn()
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def end_turn(self) -> None:
        self._turn = None

    def _in_turn(self) -> Json:
        return self._turn if self._turn is not None else self._new_turn()

    def _new_turn(self) -> Json:
        self._turn = {"role": "assistant", "content": ""}
        self.messages.append(self._turn)
        return self._turn


def read_input(value: Any) -> list[Json]:
    """A chat's messages.

    Raises:
        PydanticCustomError: with the place inside the value.
    """
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise invalid("must be a text or a list of items")
    chat = _Chat()
    for i, item in enumerate(check_list(value, _MAX_ITEMS, "items")):
        _read(check_object(item, f"[{i}]"), f"[{i}]", chat)
    if len(chat.messages) >= MAX_MESSAGES:  # the instructions are one more
        raise invalid(f"has {len(chat.messages)} messages, and fewer than {MAX_MESSAGES} are accepted")
    if not chat.messages:
        raise invalid("holds no message")
    return chat.messages


def _read(item: Json, at: str, chat: _Chat) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role = item.get("role")
        if role not in _ROLES:
            raise invalid("must be 'user', 'assistant', 'system' or 'developer'", f"{at}.role")
        chat.say(role, _text(item.get("content"), f"{at}.content"))
    elif kind == "function_call":
        name = check_name(item.get("name"), f"{at}.name")
        arguments = check_text(item.get("arguments"), f"{at}.arguments")
        chat.call(check_id(item.get("call_id"), f"{at}.call_id"), name, arguments)
    elif kind == "custom_tool_call":
        name = check_name(item.get("name"), f"{at}.name")
        arguments = json.dumps({"input": check_text(item.get("input"), f"{at}.input")}, ensure_ascii=False)
        chat.call(check_id(item.get("call_id"), f"{at}.call_id"), name, arguments)
    elif kind in ("function_call_output", "custom_tool_call_output"):
        chat.result(check_id(item.get("call_id"), f"{at}.call_id"), _text(item.get("output"), f"{at}.output"))
    elif kind == "reasoning":
        if thought := _thought(item, at):
            chat.think(thought)
    elif kind == "item_reference":
        raise invalid("this server keeps no items: send the item itself", at)
    elif kind not in _SKIPPED:
        raise invalid("items of this type are not supported", f"{at}.type")


def _text(value: Any, at: str) -> str:
    if isinstance(value, list) and len(value) <= MAX_PARTS:
        refusals = [p for p in value if isinstance(p, dict) and p.get("type") == "refusal"]
        if refusals:
            value = [{"type": "text", "text": p.get("refusal")} if p in refusals else p for p in value]
    try:
        return content_text(value)
    except PydanticCustomError as e:  # its place is one inside this value
        context = e.context or {}
        raise invalid(context["text"], at + context["at"]) from e


def _thought(item: Json, at: str) -> str:
    """Empty where only another server can read it."""
    for name in ("content", "summary"):
        parts = item.get(name)
        if parts:
            texts = check_list(parts, MAX_PARTS, "parts", f"{at}.{name}")
            found = [check_object(part, f"{at}.{name}[{i}]").get("text") for i, part in enumerate(texts)]
            return "\n".join(check_text(text, f"{at}.{name}[{i}].text") for i, text in enumerate(found))
    return ""
