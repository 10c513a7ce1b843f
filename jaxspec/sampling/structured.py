"""What a request wants its output to look like, as users give it. Compiled by `jaxspec.grammar`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from jaxspec.errors import InvalidRequestError

MAX_CHOICES = 1024
# Characters of a schema, expression or grammar, and of all choices together.
MAX_GRAMMAR_LENGTH = 2**18


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of these, by vLLM's names.

    Attributes:
        json: a JSON schema, as text or as an object; the output is JSON that it accepts.
        regex: the whole output matches it.
        choice: the output is one of these texts.
        grammar: in llguidance's variant of Lark.
        json_object: the output is any JSON object.
        structural_tag: {"type": "structural_tag", "format": object}: a tree of pieces of the output (see
            `jaxspec.grammar.structural_tag`), or the older {"structures": [{"begin": str, "schema": object, "end": str}],
            "triggers": [str]}: free text, in which a structure follows its trigger; as text or as an object.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None

    def __post_init__(self):
        given = [f.name for f in fields(self) if getattr(self, f.name) not in (None, False)]
        if len(given) != 1:
            names = ", ".join(f.name for f in fields(self))
            found = "none" if not given else " and ".join(given)
            raise _invalid(f"structured_outputs needs exactly one of {names}, got {found}")
        if self.choice is not None:
            if isinstance(self.choice, str) or not all(isinstance(c, str) and c for c in self.choice):
                raise _invalid("structured_outputs.choice must be a list of texts that are not empty")
            object.__setattr__(self, "choice", tuple(dict.fromkeys(self.choice)))
            if not 0 < len(self.choice) <= MAX_CHOICES:
                raise _invalid(f"structured_outputs.choice must have from 1 to {MAX_CHOICES} texts")
        try:
            length = len(self.source)
        except (TypeError, ValueError, RecursionError):
            raise _invalid(f"structured_outputs.{self.kind} is not JSON, or nested too deeply") from None
        if length > MAX_GRAMMAR_LENGTH:
            raise _invalid(f"structured_outputs.{self.kind} is longer than {MAX_GRAMMAR_LENGTH} characters")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(f.name for f in fields(self) if getattr(self, f.name) is not None)

    @property
    def source(self) -> str:
        """The field's value as text; objects as JSON, keys in their order."""
        value = getattr(self, self.kind)
        return value if isinstance(value, str) else json.dumps(value)


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="structured_outputs")
