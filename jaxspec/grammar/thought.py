"""Thoughts in front of what a grammar holds: how each family writes them, and which of them its model opens itself.

A grammar is for the answer. What may come before it depends on the prompt: a template may have opened the thought, or
closed it, or may leave it to the model to open one. Sources: the models' published chat templates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxspec.text import Tokenizer

# A text in pieces: an added token of the vocabulary is a piece of its own.
Pieces = tuple[str, ...]

# The prompt's last tokens: they say whether the template has opened a thought.
_LAST_IDS = 16
# Variables by which templates turn thoughts off.
_SWITCHES = ("enable_thinking", "thinking")


@dataclass(frozen=True)
class Thought:
    """A thought with which an output begins, or may begin; nothing holds its text.

    Attributes:
        openings: how it may be opened; empty: the output begins inside.
        close: the tag that ends it.
        answers: tags with which the answer begins and which also end a thought that was not closed.
    """

    openings: tuple[Pieces, ...]
    close: str
    answers: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Preface:
    """What an output has in front of what its grammar holds.

    Attributes:
        thought: None: it has none.
        headers: of the answer, which has one of these; empty: none.
    """

    thought: Thought | None = None
    headers: tuple[Pieces, ...] = ()


NO_PREFACE = Preface()


@dataclass(frozen=True)
class ThinkTags:
    """A thought between tags.

    Attributes:
        spaces: what a model that opens a thought itself may write in front of the first tag; empty: it never opens one,
            since its template does.
        starts_inside: an output without the first tag begins inside the thought, whatever the prompt ends with.
    """

    open: str = "<think>"
    close: str = "</think>"
    spaces: tuple[str, ...] = ("",)
    starts_inside: bool = False

    @property
    def tokens(self) -> tuple[str, str]:
        return (self.open, self.close)

    def begins_inside(self, prompt_end: str) -> bool:
        """Whether an output begins inside the thought, after a prompt that ends so."""
        return self._opened(prompt_end) is True or (self._opened(prompt_end) is None and self.starts_inside)

    def preface(self, prompt_end: str, *, may_think: bool = True) -> Preface:
        """In front of an answer.

        Args:
            prompt_end: the prompt's last characters.
            may_think: the model may open a thought, where the prompt has not settled that.
        """
        if self.begins_inside(prompt_end):
            return Preface(Thought((), self.close))
        if not may_think or not self.spaces or self._opened(prompt_end) is False:
            return NO_PREFACE
        openings = tuple(tuple(filter(None, (space, self.open))) for space in self.spaces)
        return Preface(Thought(openings, self.close))

    def _opened(self, prompt_end: str) -> bool | None:
        """Whether the prompt has opened a thought; False where it has also closed it, None where it says neither."""
        end = prompt_end.rstrip()
        return end.endswith(self.open) if end.endswith(self.tokens) else None


@dataclass(frozen=True)
class HarmonyThoughts:
    """gpt-oss's messages of the channel `analysis`; the answer is another message, of the channel `final`."""

    tokens: Pieces = (
        "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>", "<|constrain|>",
    )  # fmt: skip

    def preface(self, prompt_end: str, *, may_think: bool = True) -> Preface:  # noqa: ARG002 - no prompt opens a message's text
        """See `ThinkTags.preface`."""
        header = ("<|channel|>", "final", "<|message|>")
        if not may_think:
            return Preface(None, (header,))
        thought = Thought((("<|channel|>", "analysis", "<|message|>"),), "<|end|>")
        return Preface(thought, (header, ("<|start|>", "assistant", *header)))


ReasoningFormat = ThinkTags | HarmonyThoughts

NONE = "none"
REASONING_PARSERS: Mapping[str, ReasoningFormat] = {
    # R1's template opens the thought; its first one left that to the model, which often wrote no tag.
    "deepseek_r1": ThinkTags(spaces=(), starts_inside=True),
    # V3.1 and later open or close it in the prompt; the first template of R1 and its distilled models did neither.
    "deepseek_v3": ThinkTags(),
    # 4.5 and 4.6 leave it to the model, on a line of its own; 4.7 opens or closes it in the prompt.
    "glm45": ThinkTags(spaces=("", "\n")),
    "gpt-oss": HarmonyThoughts(),
    # K2-Thinking leaves it to the model; K2.5 opens or closes it in the prompt.
    "kimi_k2": ThinkTags(),
    "minimax_m2": ThinkTags(spaces=(), starts_inside=True),
    # Qwen3 leaves it to the model unless `enable_thinking` is false; its Thinking editions and Qwen3.5 open it.
    "qwen3": ThinkTags(),
}
# Other names of vLLM and SGLang.
_ALIASES = {
    "deepseek-r1": "deepseek_r1", "deepseek_v31": "deepseek_v3", "deepseek-v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v3", "deepseek-v4": "deepseek_v3", "glm47": "glm45",
    "openai_gptoss": "gpt-oss", "gpt_oss": "gpt-oss", "kimi": "kimi_k2", "kimi_k25": "kimi_k2", "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2", "qwen3-thinking": "qwen3", "qwen3_thinking": "qwen3",
}  # fmt: skip
REASONING_NAMES = (*REASONING_PARSERS, *_ALIASES, NONE)
# What a template that teaches a format has in it: the first that has all of its texts counts.
_SIGNS = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|im_middle|>", "think>")),
    ("minimax_m2", ("<minimax:tool_call>", "think>")),
    ("glm45", ("<|observation|>", "think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "think>")),
    ("qwen3", ("think>",)),
)


def reasoning_parser(chosen: str | None, template: str) -> ReasoningFormat | None:
    name = reasoning_parser_name(chosen, template)
    return REASONING_PARSERS[name] if name else None


def reasoning_parser_name(chosen: str | None, template: str) -> str | None:
    """
    Args:
        chosen: one of `REASONING_NAMES`; None: as the model's template has it.
    """
    return chosen_name(chosen, _ALIASES, _SIGNS, template)


def chosen_name(
    chosen: str | None, aliases: Mapping[str, str], signs: Sequence[tuple[str, tuple[str, ...]]], template: str
) -> str | None:
    """The format that is chosen by name, or which the template has the signs of."""
    if chosen is not None:
        return None if chosen == NONE else aliases.get(chosen, chosen)
    return next((name for name, texts in signs if all(text in template for text in texts)), None)


def prompt_end(tokenizer: "Tokenizer", prompt_ids: Sequence[int]) -> str:
    """The prompt's last characters, as `ThinkTags.begins_inside` wants them."""
    return tokenizer.decode(prompt_ids[-_LAST_IDS:], skip_special_tokens=False)


def answer_preface(form: ReasoningFormat | None, end: str, variables: Mapping[str, Any]) -> Preface:
    """What may come in front of an answer that a grammar holds.

    Args:
        form: how the model thinks; None: it does not.
        end: `prompt_end` of a chat's prompt.
        variables: what its template was given: they may turn thoughts off.
    """
    if form is None:
        return NO_PREFACE
    return form.preface(end, may_think=all(variables.get(name) is not False for name in _SWITCHES))
