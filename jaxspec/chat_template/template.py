"""Chat templates: Jinja programs from model folders, run in a sandbox and within a budget of time and memory.

They behave as in `transformers`, whose extensions they have (`raise_exception`, `strftime_now`, `tojson` without
escapes, `{% generation %}`, `{% break %}`).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.environment import Template
from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Cycler, Joiner

from jaxspec.chat_template import budget, operations
from jaxspec.chat_template.rewrite import RefusedError, metered
from jaxspec.errors import InvalidRequestError, ModelFormatError

_MAX_SOURCE = 2**18
# A chat's text beside what its messages hold: roles and a system prompt, and twice over for templates that repeat.
_MAX_ADDED = 2**20
_MAX_REPEATED = 4
_UNBOUNDED = (budget.TemplateTooExpensiveError, RecursionError, MemoryError)
_TOO_EXPENSIVE = "needs too much time or memory: a loop, a recursion or a text in it grows without bound"
_WAY_OUT = "correct chat_template.jinja in the model folder, or remove it and use /v1/completions"


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


@pass_context
def _finalized(_context: Context, value: Any) -> Any:
    """Pays for what is written."""
    budget.weigh_text(value)
    text = str(value)
    if not isinstance(value, str):
        budget.weigh(text)
    return text


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalized
        )
        self.filters: dict[str, Any] = operations.filters()  # type: ignore[assignment]
        self.tests: dict[str, Any] = operations.tests()  # type: ignore[assignment]
        self._functions = {
            "range": self.globals["range"],
            "dict": operations.TemplateDict(),
            "namespace": operations.TemplateNamespace,
            "raise_exception": operations.raise_exception,
            "strftime_now": operations.strftime_now,
            "cycler": Cycler,
            "joiner": Joiner,
        }
        self.globals = dict(self._functions)

    # What `rewrite` puts into templates.

    def pay(self, units: int) -> bool:
        budget.spend(units)
        return True

    def weighed(self, value: Any) -> Any:
        budget.weigh_deep(value)
        return value

    def concatenate(self, *values: Any) -> str:
        for each in values:
            budget.weigh_text(each)
        out = "".join(map(str, values))
        budget.weigh(out)
        return out

    def cut(self, value: Any, start: Any, stop: Any, step: Any) -> Any:
        budget.weigh(value)
        return value[start:stop:step]

    # What templates do through the environment by themselves.

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        operations.weigh_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, str | int):
            budget.weigh_deep(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> None:  # noqa: ARG002 - `format` is no method that is available
        return None

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:  # type: ignore[override]
        owner = getattr(obj, "__self__", None)
        if owner is self:
            return obj(*args)
        budget.spend(budget.NODE * (1 + len(args) + len(kwargs)))
        if isinstance(owner, LoopContext):
            budget.weigh_deep(args)
        elif not self._is_function(obj, owner):
            named = {name: value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")}
            operations.weigh_method(owner, getattr(obj, "__name__", type(obj).__name__), args, named)
        return super().call(context, obj, *args, **kwargs)

    def _is_function(self, obj: Any, owner: Any) -> bool:
        return isinstance(obj, Macro | LoopContext | Undefined | Joiner) or (
            isinstance(owner, Cycler) or any(obj is each for each in self._functions.values())
        )


class ChatTemplate:
    """
    Args:
        source: the Jinja text.
        special_tokens: names that the template may use, such as `bos_token`.

    Raises:
        ModelFormatError: it is no template, or one that no budget suffices for.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, Any]):
        self._special_tokens = dict(special_tokens)
        if len(source) > _MAX_SOURCE:
            raise ModelFormatError(
                f"the chat template has {len(source)} characters, and at most {_MAX_SOURCE} are read"
            )
        self._template = _compiled(source)
        try:  # what grows without bound mostly does so with any chat
            self.render([{"role": "user", "content": "hi"}], add_generation_prompt=True)
        except InvalidRequestError as e:  # it may want other messages, or more of them
            if isinstance(e.__cause__, _UNBOUNDED):
                raise ModelFormatError(f"the chat template {_TOO_EXPENSIVE}; {_WAY_OUT}") from e

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """
        Args:
            variables: others that the template may use, such as `tools` and `enable_thinking`: values of JSON.

        Raises:
            InvalidRequestError: the template rejects the messages, or cannot write them within its budget.
        """
        try:
            return self._write(messages, variables or {}, add_generation_prompt=add_generation_prompt)
        except _UNBOUNDED as e:
            raise InvalidRequestError(
                f"the chat template of this model {_TOO_EXPENSIVE} with these messages; {_WAY_OUT}", param="messages"
            ) from e
        except Exception as e:  # the template is a program and may raise anything
            reason = str(e) if isinstance(e, TemplateError) else f"{type(e).__name__}: {e}"
            raise InvalidRequestError(
                f"the chat template rejects these messages: {_one_line(reason)}", param="messages"
            ) from e

    def _write(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, add_generation_prompt: bool
    ) -> str:
        plain = [dict(message) for message in messages]
        num_values, size = budget.extent([plain, dict(variables)])
        most = _MAX_ADDED + _MAX_REPEATED * size
        token = budget.use(budget.Budget(len(plain), size, num_values))
        given: dict[str, Any] = {**self._special_tokens, "tools": None, "documents": None, **variables}
        try:
            parts = self._template.generate(
                {**given, "messages": plain, "add_generation_prompt": add_generation_prompt}
            )
            written = []
            for part in parts:
                most -= budget.text_size(part)
                if most < 0:
                    raise budget.TemplateTooExpensiveError
                written.append(part)
            return "".join(written)
        finally:
            budget.end(token)


def _compiled(source: str) -> Template:
    environment = _Environment()
    try:
        parsed = metered(environment.parse(source))
        code = environment.compile(parsed)  # type: ignore[call-overload]
    except TemplateSyntaxError as e:
        raise ModelFormatError(f"the chat template is wrong in line {e.lineno}: {_one_line(str(e.message))}") from e
    except RefusedError as e:
        raise ModelFormatError(f"the chat template is not supported: {e}") from e
    except (TemplateError, SecurityError, SyntaxError, ValueError, RecursionError, MemoryError) as e:
        raise ModelFormatError(f"the chat template cannot be compiled: {_one_line(str(e))}") from e
    return Template.from_code(environment, code, environment.make_globals(None))


def _one_line(text: str) -> str:
    short = " ".join(text[: operations.MAX_MESSAGE].split())
    return short + ("..." if len(text) > operations.MAX_MESSAGE else "")
