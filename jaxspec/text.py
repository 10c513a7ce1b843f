"""Text for an engine that itself knows only ids: `Tokenizer`, and `TextStream`, the host rule of one output.

Decoding works on bytes. Every id of a byte-level (or sentencepiece) vocabulary has fixed bytes, so the text of a
sequence is the UTF-8 decoding of the joined bytes. The incremental form is the standard library's incremental UTF-8
decoder, which holds an unfinished character back and never has to correct text.
"""

import codecs
import functools
import json
import re
import sys
import types
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.chat_template.dialect import Dialect, dialect_of
from jaxspec.chat_template.reserved import ReservedStrings
from jaxspec.chat_template.template import ChatTemplate
from jaxspec.engine.host_rule import RuleResult
from jaxspec.engine.output import FinishReason
from jaxspec.errors import InvalidRequestError, ModelFormatError
from jaxspec.sampling.params import SamplingParams

# Reasoning tags are added tokens that templates parse out of earlier answers; they open no role.
_REASONING_TAGS = ("<think>", "</think>")
# Names of templates, where a folder has several.
_DEFAULT, _TOOL_USE = "default", "tool_use"
# A text is encoded in two goes if it has more characters than this many a token of the context.
_CHARACTERS_A_TOKEN = 16


class Tokenizer:
    """The tokenizer of a model folder (`tokenizer.json`), and its chat template where it has one.

    All methods may be called from several threads at once: only the immutable Rust object is used.

    Attributes:
        special_ids: of special tokens, which text leaves out.
        chat_template: the Jinja text; empty where there is none.
    """

    def __init__(self, hf: Any, chat_template: str | None = None):
        """
        Args:
            hf: a `transformers.PreTrainedTokenizerFast`.
            chat_template: Jinja text to use instead of the folder's own.

        Raises:
            ModelFormatError: a template or a decoder that cannot be used.
        """
        self._hf = hf
        self._backend = hf.backend_tokenizer
        self._backend.no_truncation()
        self._backend.no_padding()
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        self._sentencepiece = _is_sentencepiece(self._backend.decoder)
        self._bytes: dict[int, bytes] = {}
        self._longest_token = max(len(t.encode("utf-8")) for t in self._backend.get_vocab(with_added_tokens=True))
        sources = _templates(hf.chat_template if chat_template is None else chat_template)
        self._templates = {name: ChatTemplate(text, hf.special_tokens_map) for name, text in sources.items()}
        self.chat_template = "\n".join(sources.values())
        self._added = {token.content: i for i, token in added.items()}
        self._reserved = ReservedStrings(
            token.content
            for token in added.values()
            if (token.special or token.content in self.chat_template)
            and token.content.strip()
            and token.content not in _REASONING_TAGS
        )

    @classmethod
    def from_folder(cls, folder: str | Path) -> "Tokenizer":
        """Loads a folder's tokenizer. Runs no code from the folder and makes no network request.

        Raises:
            ModelFormatError: there is no tokenizer.json, or it cannot be read.
        """
        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise ModelFormatError(f"{folder} has no tokenizer (tokenizer.json): use token ids instead of text")
        fast_tokenizer = _import_fast_tokenizer()
        try:
            hf = fast_tokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as e:  # the Rust parser raises bare Exception
            raise ModelFormatError(f"cannot read the tokenizer in {folder}: {e}") from e
        return cls(hf)

    def with_chat_template(self, source: str) -> "Tokenizer":
        """The same vocabulary with another template.

        Raises:
            ModelFormatError: it is no template.
        """
        return Tokenizer(self._hf, source)

    @functools.cached_property
    def dialect(self) -> Dialect:
        """What the chat template wants to be given."""

        def render(messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
            return self._template(variables).render(messages, add_generation_prompt=True, variables=variables)

        if not self._templates:
            return Dialect(tools=False)
        return dialect_of(render, names_thinking="message.thinking" in self.chat_template)

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """The ids of those of the texts that are added tokens."""
        return frozenset(self._added[token] for token in tokens if token in self._added)

    def special_id(self, text: str) -> int | None:
        """The id of a special token that is spelt so, if there is one: no other text can spell it."""
        token_id = self._added.get(text)
        return token_id if token_id in self.special_ids else None

    @property
    def hugging_face(self) -> Any:
        """The `transformers.PreTrainedTokenizerFast`, for libraries that read one. Not to be changed."""
        return self._hf

    @property
    def special_tokens(self) -> dict[str, str | None]:
        """bos_token, eos_token, pad_token and unk_token, as text."""
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {name: None if (token := getattr(self._hf, name)) is None else str(token) for name in names}

    @property
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows; a model may have more rows (padding)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, add_special_tokens: bool = True, limit: int | None = None) -> list[int]:
        """Encodes as Hugging Face does: special-token strings in the text become those tokens.

        Args:
            limit: where given, a text of far more tokens is refused without encoding all of it.

        Raises:
            InvalidRequestError: the text has more than `limit` tokens. Not raised for each such text.
        """
        if limit is not None:
            self._refuse_too_long(text, limit, "prompt")
        # Unlike `encode`, the batch call lets other threads run meanwhile: a long text takes seconds.
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def least_tokens(self, text: str) -> int:
        """A cheap lower bound of a text's number of tokens, to reject a text that is far too long without encoding it."""
        return len(text.encode("utf-8")) // self._longest_token

    def _refuse_too_long(self, text: str, limit: int, param: str) -> None:
        """Where a text's beginning alone has twice the tokens, and those that one across its end could hide, all cannot fit."""
        least = self.least_tokens(text)
        if least <= limit and len(text) > limit * _CHARACTERS_A_TOKEN:
            least = (len(self.encode(text[: limit * _CHARACTERS_A_TOKEN])) - self._longest_token) // 2
        if least > limit:
            raise InvalidRequestError(
                f"the prompt has at least {least} tokens, but the maximum context length is {limit} tokens",
                param=param,
                code="context_length_exceeded",
            )

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. (No clean-up of spaces before punctuation.)"""
        skipped = self.special_ids if skip_special_tokens else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text.removeprefix(" ") if self._sentencepiece else text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one id; empty for an id beyond the vocabulary."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**31 else None
            if token is None:  # any client can name such ids, so they are not remembered
                return b""
            known = _sentencepiece_bytes(token) if self._sentencepiece else _byte_level_bytes(token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """One id's text, for log-probabilities; a part of a character shows as U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        limit: int | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Renders the chat template (`jaxspec.chat_template`) and encodes the result.

        Messages are OpenAI's: `tool_calls` have their arguments as texts, and an earlier thought is `reasoning_content`.

        Contents cannot forge a role: where one spells a special token, or an added token that the template uses (some
        vocabularies do not mark their role tokens as special), the spelling is encoded as plain characters. Contents
        without such strings encode exactly as Hugging Face does.

        Args:
            limit: as in `encode`.
            variables: other variables of the template, such as `tools` and `enable_thinking`: values of JSON.

        Raises:
            InvalidRequestError: there is no template, it rejects the messages, or they are far too long.
        """
        template = self._template(variables or {})
        if variables and variables.get("tools") and not self.dialect.tools:
            raise InvalidRequestError(
                "the chat template of this model has no place for tools: serve it with --chat-template", param="tools"
            )
        (plain, others), marks = self._reserved.marked([self._adapted(messages), dict(variables or {})])
        text = template.render(plain, add_generation_prompt=add_generation_prompt, variables=others)
        if limit is not None:
            self._refuse_too_long(text, limit, "messages")
        if not marks:
            return self.encode(text, add_special_tokens=False)
        spelt = {mark: [i for c in literal for i in self.encode(c, add_special_tokens=False)]
                 for mark, literal in marks.items()}  # fmt: skip
        parts = re.split(f"([{''.join(marks)}])", text)
        between = self._backend.encode_batch_fast(parts[::2], add_special_tokens=False)
        ids = list(between[0].ids)
        for mark, following in zip(parts[1::2], between[1:], strict=True):
            ids += spelt[mark]
            ids += following.ids
        return ids

    def _adapted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        plain = all(m["role"] in ("user", "assistant") and m.keys() <= {"role", "content"} for m in messages[1:])
        if plain and all(m["role"] != "developer" and m.keys() <= {"role", "content"} for m in messages[:1]):
            return [dict(m) for m in messages]  # no template takes such messages in another way
        return self.dialect.adapted(messages)

    def _template(self, variables: Mapping[str, Any]) -> ChatTemplate:
        """A folder may have one of its own for chats with tools."""
        if not self._templates:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions (LLM.generate) with a prompt", param="messages"
            )
        return self._templates[_TOOL_USE if variables.get("tools") and _TOOL_USE in self._templates else _DEFAULT]


def _templates(template: str | Mapping[str, str] | None) -> dict[str, str]:
    """By name. A folder may have several."""
    named = template if isinstance(template, Mapping) else {_DEFAULT: template or ""}
    known = {name: named[name] for name in (_DEFAULT, _TOOL_USE) if named.get(name)}
    return known if _DEFAULT in known else {}


def text_stream(
    tokenizer: Tokenizer | None, prompt_ids: Sequence[int], params: SamplingParams, shown: frozenset[int] = frozenset()
) -> "TextStream | None":
    """The host rule that gives a request its text; None where the model has no tokenizer.

    Args:
        shown: special tokens that are part of the text also where it leaves the others out.

    Raises:
        InvalidRequestError: stop strings, and no tokenizer.
    """
    if tokenizer is None:
        if params.stop:
            raise InvalidRequestError("this model has no tokenizer: stop strings need one", param="stop")
        return None
    return TextStream(tokenizer, prompt_ids, params, shown)


class TextStream:
    """The text of one growing output: incremental decoding and stop strings. A `HostRule`, fed by the engine alone.

    Text is *final* once neither a later token nor a stop string can change it; only final text is handed out. The
    output ends at the first character that completes a stop string (of several that end there, the longest), wherever
    the tokens' borders are, so no part of a stop string ever leaks.
    """

    needs_readback = False
    constraint = None

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        shown: frozenset[int] = frozenset(),
    ):
        """`prompt_ids` matter where they end inside a character: the output then begins with its missing bytes."""
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids - shown if params.skip_special_tokens else frozenset()
        self._keep_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._matchers = [_StopMatcher(s) for s in params.stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.decode(b"".join(self._visible_bytes(i) for i in prompt_ids[-3:])[-3:])
        self._num_ids = 0
        self._text = ""
        self._final = 0  # characters of _text that are final
        self._given = 0  # of these, how many have been handed out

    def feed(self, ids: Sequence[int], ended: FinishReason | None) -> RuleResult:
        """The text that the newest ids make final, and how many of them to keep where a stop string ends the output.

        The token that completes a stop string is kept (its text is not). Where the output has ended, an end-of-text or
        stop id contributes no text, and everything held back becomes final.
        """
        offsets: list[int] = []
        keep = None
        for index, token_id in enumerate(ids):
            offsets.append(len(self._text))
            self._num_ids += 1
            is_stop_id = ended is FinishReason.STOP and index == len(ids) - 1
            if not is_stop_id and self._append(self._decoder.decode(self._visible_bytes(token_id))):
                keep = index + 1
                break
        if ended and keep is None:
            if self._append(self._decoder.decode(b"", final=True)):
                keep = len(ids)
            self._final = len(self._text)
        new_text, self._given = self._text[self._given : self._final], self._final
        return RuleResult(keep, new_text, tuple(offsets))

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._skipped else self._tokenizer.token_bytes(token_id)

    def _append(self, piece: str) -> bool:
        """Adds decoded text; True if it completed a stop string that may end the output, which is then cut off."""
        start = len(self._text)
        may_stop = self._num_ids > self._min_tokens  # like an end-of-text id, it must follow so many tokens
        self._text += piece
        if not self._matchers:
            self._final = len(self._text)
            return False
        for end, character in enumerate(piece, start + 1):
            hits = [m.length for m in self._matchers if m.push(character)]
            if hits and may_stop:
                self._final = end if self._keep_stop else end - max(hits)
                self._text = self._text[: self._final]
                return True
        self._final = len(self._text) - max(m.matched for m in self._matchers)
        return False


class _StopMatcher:
    """Knuth-Morris-Pratt: how much of a stop string the text's end matches, at constant cost a character."""

    def __init__(self, stop: str):
        self._stop = stop
        self.length = len(stop)
        self.matched = 0
        self._fallback = [0] * (len(stop) + 1)  # [m]: the longest shorter match that is a suffix of the first m
        for m in range(1, len(stop)):
            k = self._fallback[m]
            while k and stop[m] != stop[k]:
                k = self._fallback[k]
            self._fallback[m + 1] = k + 1 if stop[m] == stop[k] else 0

    def push(self, character: str) -> bool:
        """Whether the stop string ends with this character; the search then goes on, for there may be a later one."""
        while self.matched and self._stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        if self._stop[self.matched] == character:
            self.matched += 1
        if self.matched < self.length:
            return False
        self.matched = self._fallback[self.length]
        return True


def _import_fast_tokenizer() -> Any:
    """transformers' `PreTrainedTokenizerFast`, without PyTorch.

    Where PyTorch is installed, the class's module imports it to read GGUF files, which nobody does here: five seconds in which
    a server's other threads wait for Python's lock. Meanwhile an empty module stands for the one that does.
    """
    name = "transformers.modeling_gguf_pytorch_utils"
    empty = types.ModuleType(name)
    empty.__dict__["load_gguf_checkpoint"] = None
    is_first = sys.modules.setdefault(name, empty) is empty
    try:
        from transformers import PreTrainedTokenizerFast
    finally:
        if is_first:
            del sys.modules[name]
    return PreTrainedTokenizerFast


def _is_sentencepiece(decoder: Any) -> bool:
    """Tells a sentencepiece decoder from a byte-level one; anything else is refused, since its ids have no bytes."""
    state = json.loads(decoder.__getstate__()) if decoder is not None else {}
    kinds = {d.get("type") for d in [state, *state.get("decoders", [])]}
    if "ByteLevel" in kinds:
        return False
    if kinds & {"ByteFallback", "Metaspace"}:
        return True
    raise ModelFormatError(
        f"tokenizer.json has the decoder {state.get('type')}: byte-level and sentencepiece vocabularies are supported"
    )


def _byte_of_character() -> dict[str, int]:
    """GPT-2's byte-level alphabet: printable bytes are themselves, the 68 others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()


def _byte_level_bytes(token: str) -> bytes:
    """A token outside the byte-level alphabet (an added token with a space, say) has its own UTF-8 bytes."""
    try:
        return bytes(_BYTE_OF_CHARACTER[c] for c in token)
    except KeyError:
        return token.encode("utf-8")


def _sentencepiece_bytes(token: str) -> bytes:
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode("utf-8")
