"""Puts the table of `serve/peer_flags.py` into a parser, and translates what was given of it."""

import argparse
import json
import re
from collections.abc import Sequence
from typing import Any

from jaxspec.config import DEFAULT_SPECULATIVE_TOKENS, PAGE_SIZE, pages_for
from jaxspec.errors import SHOWN_CHARACTERS, UsageError, plain, shown
from serve.peer_flags import (
    PEER_ATTENTION_BACKENDS,
    PEER_FLAGS,
    SHORT_NAMES,
    Alias,
    Collected,
    Ignored,
    PeerFlag,
    Refused,
    Same,
    Switch,
    Variable,
)

_OPTIMIZATION = re.compile(r"-O=?(\d)")
# vLLM's.
_MASTER_PORT = "29501"
_DOTTED = "--speculative-config."
# Algorithms of SGLang that a draft of ours stands for, and whether a draft has to be named.
_ALGORITHMS = {"EAGLE": False, "NEXTN": False, "MTP": False, "EAGLE3": True, "NGRAM": False}


def note(namespace: argparse.Namespace, line: str) -> None:
    """Keeps a line that the user should see when the server starts."""
    namespace.notes = (*getattr(namespace, "notes", ()), line)


class _Ignore(argparse.Action):
    def __init__(self, *, reason: str, **options: Any):
        super().__init__(**options)
        self._reason = reason

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        note(namespace, f"{option_string} has no effect: {self._reason}")


class _Refuse(argparse.Action):
    def __init__(self, *, instead: str, passes: Sequence[str], **options: Any):
        super().__init__(**options)
        self._instead = instead
        self._passes = passes

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        if values not in self._passes:
            value = f" {values}"[:SHOWN_CHARACTERS] if isinstance(values, str) else ""
            raise UsageError(f"{option_string}{value} is not supported: {self._instead}")


class _SetVariable(argparse.Action):
    """Remembers a variable of the environment; `sources` gives it to the process, if nobody has set it."""

    def __init__(self, *, variable: str, **options: Any):
        super().__init__(**options)
        self._variable = variable

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:  # noqa: ARG002
        namespace.variables = {**getattr(namespace, "variables", {}), self._variable: values}


class AttentionBackend(argparse.Action):
    """Our backends as they are; one of the peers' becomes auto, with a note."""

    def __init__(self, *, backends: Sequence[str], **options: Any):
        super().__init__(**options)
        self._backends = backends

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if values.lower() in PEER_ATTENTION_BACKENDS:
            known = ", ".join(self._backends)
            note(
                namespace,
                f"{option_string} {values} has no effect: the kernels are jaxspec's own ({known}); auto is used",
            )
            values = "auto"
        elif values not in self._backends:
            parser.error(f"argument {option_string}: {shown(values)} is none of {', '.join(self._backends)}")
        setattr(namespace, self.dest, values)


def add_peer_flags(parser: Any) -> None:
    """Adds all flags of the table that are not our own, hidden from --help. `parser` is a `serve.flags.Parser`."""
    for flag in PEER_FLAGS:
        if not isinstance(flag.here, Same):
            for name in flag.long_names:
                parser.add_argument(name, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **_options(parser, flag))


def _options(parser: Any, flag: PeerFlag) -> dict[str, Any]:
    values = {"nargs": None if flag.values == 1 else flag.values}
    match flag.here:
        case Alias(to):
            ours = parser.option(to)
            return {"dest": ours.dest, "type": ours.type, "nargs": ours.nargs, "metavar": ours.metavar}
        case Switch(option, value):
            return {"dest": option, "action": "store_const", "const": value}
        case Collected(option):
            return {"dest": option}
        case Variable(name, allowed):
            return {"action": _SetVariable, "variable": name, "choices": allowed or None}
        case Ignored(reason):
            return {"action": _Ignore, "reason": reason, **values}
        case Refused(instead, passes):
            return {"action": _Refuse, "instead": instead, "passes": passes, **values}
    raise AssertionError(flag)


def translate_words(words: Sequence[str]) -> list[str]:
    """Short names become long ones, and dotted keys of --speculative-config one JSON object."""
    translated: list[str] = []
    dotted: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        name, equals, value = word.partition("=")
        if name in SHORT_NAMES:
            translated.append(SHORT_NAMES[name] + equals + value)
        elif optimization := _OPTIMIZATION.fullmatch(word):
            translated.append(f"--optimization-level={optimization[1]}")
        elif name.startswith(_DOTTED):
            key = name.removeprefix(_DOTTED).replace("-", "_")
            dotted[key] = _scalar(value if equals else next(rest, ""))
        else:
            translated.append(word)
    if dotted:
        translated.append(f"--speculative-config={json.dumps(dotted)}")
    return translated


def _scalar(text: str) -> str | int:
    return int(text) if text.isascii() and text.isdecimal() else text


def finish(given: argparse.Namespace) -> None:
    """Turns what was given of `Collected` flags into our own options.

    Raises:
        UsageError: they contradict each other, or ask for what there is not.
    """
    taken = {name: vars(given).pop(name) for name in _COLLECTED if name in given}
    if "model_flag" in taken:
        if getattr(given, "model", taken["model_flag"]) != taken["model_flag"]:
            raise UsageError(f"the model is given twice: {plain(given.model)} and --model {plain(taken['model_flag'])}")
        given.model = taken["model_flag"]
    if "tokenizer_flag" in taken:
        given.tokenizer = taken["tokenizer_flag"]
    if "sampling_defaults" in taken:
        given.generation_config = _generation_config(taken["sampling_defaults"])
    if "max_total_tokens" in taken:
        # And the page that is for padding.
        pages = pages_for(_whole("--max-total-tokens", taken["max_total_tokens"]), PAGE_SIZE) + 1
        given.num_gpu_blocks_override = pages
    if "master_addr" in taken:
        if "coordinator" in given:
            raise UsageError("--master-addr and --coordinator name the same place: give one of them")
        given.coordinator = f"{taken['master_addr']}:{taken.get('master_port', _MASTER_PORT)}"
    elif "master_port" in taken:
        raise UsageError("--master-port needs --master-addr; or give --coordinator HOST:PORT")
    _finish_speculation(given, taken)


_COLLECTED = frozenset(flag.here.option for flag in PEER_FLAGS if isinstance(flag.here, Collected))


def _finish_speculation(given: argparse.Namespace, taken: dict[str, str]) -> None:
    steps = _whole("--speculative-num-steps", taken.get("speculative_num_steps"))
    drafts = _whole("--speculative-num-draft-tokens", taken.get("speculative_num_draft_tokens"))
    if steps is not None and drafts is not None and drafts != steps + 1:
        raise UsageError(
            f"--speculative-num-draft-tokens {drafts} is not --speculative-num-steps {steps} and one: drafts are chains, not "
            "trees"
        )
    if steps is None and drafts is not None:
        steps = drafts - 1
    if steps is not None:
        given.num_speculative_tokens = steps
    algorithm = taken.get("speculative_algorithm")
    if algorithm is None:
        return
    if algorithm.upper() not in _ALGORITHMS:
        raise UsageError(
            f"--speculative-algorithm {plain(algorithm)} is not supported: use EAGLE3 with --speculative-draft-model-path, "
            "NEXTN for the model's own layer, or NGRAM for the request's own text"
        )
    if _ALGORITHMS[algorithm.upper()] and "speculative_model" not in given:
        raise UsageError(f"--speculative-algorithm {algorithm} needs a draft: give --speculative-draft-model-path")
    if algorithm.upper() == "NGRAM":
        given.speculative_method = "ngram"
    if "num_speculative_tokens" not in given:
        given.num_speculative_tokens = DEFAULT_SPECULATIVE_TOKENS


def _generation_config(sampling_defaults: str) -> str:
    meant = {"model": "auto", "openai": "none"}
    if sampling_defaults not in meant:
        raise UsageError(f"--sampling-defaults must be model or openai, got {shown(sampling_defaults)}")
    return meant[sampling_defaults]


def _whole(flag: str, text: Any) -> Any:
    """The number, or None for None."""
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise UsageError(f"{flag} must be a whole number, got {shown(text)}")
    return int(text)
