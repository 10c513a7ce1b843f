"""Command-line conventions on top of argparse: one-line errors, `_` for `-` in flags, suggestions, engine flags."""

import argparse
import difflib
import json
import re
import types
import typing
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NoReturn

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError, UsageError, plain, shown
from jaxspec.speculative_config import with_speculative_config
from serve.peers import AttentionBackend, translate_words

_METAVARS = {int: "N", float: "X", str: "TEXT"}
# Numbers that may be written as vLLM has them: 4k is 4000, 4K is 4096.
_SIZES = frozenset(
    ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override", "state_interval")
)
_SIZE = re.compile(r"([0-9]{1,12}(?:\.[0-9]{1,6})?)([kKmMgG]?)", re.ASCII)
_SIMILAR = 0.75
_HALF = ("half", "float16", "fp16")


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing the usage and exiting.

    Attributes:
        fallbacks: the defaults of what is declared with `declare`, which a namespace does not have until
            `serve.sources.resolve` has looked everywhere.
    """

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)
        self.fallbacks: dict[str, Any] = {}

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def declare(self, group: argparse._ActionsContainer, name: str, *, default: Any = None, **options: Any) -> None:
        """Adds an argument that appears in a namespace only where it is given."""
        action = group.add_argument(name, default=argparse.SUPPRESS, **options)
        self.fallbacks[action.dest] = default

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]

    def option(self, flag: str) -> argparse.Action:
        """The argument with this name. KeyError if there is none."""
        return self._option_string_actions[flag]

    def own_options(self) -> list[argparse.Action]:
        """What --help lists, except --help itself."""
        return [action for action in self._actions if action.help != argparse.SUPPRESS and action.dest != "help"]


def parse(parser: Parser, commands: dict[str, Parser], argv: Sequence[str]) -> argparse.Namespace:
    """Parses; for an unknown flag the error suggests a similar one."""
    words = dashed(argv)
    arguments, unknown = parser.parse_known_args(translate_words(words) if words[:1] == ["serve"] else words)
    if unknown:
        used = commands.get(getattr(arguments, "command", None) or "", parser)
        raise UsageError(unknown_word(used, unknown[0]))
    return arguments


def dashed(words: Sequence[str]) -> list[str]:
    """Flags as the parser knows them."""
    return [_with_dashes(word) for word in words]


def unknown_word(parser: Parser, word: str) -> str:
    """What to say of a word that the parser does not know."""
    flag = word.partition("=")[0]
    what = "flag" if flag.startswith("-") else "argument"
    close = similar(flag, parser.flags()) if flag.startswith("--") else None
    hint = f"did you mean {close}?" if close else f"see {parser.prog} --help"
    return f"unknown {what} {plain(flag)} ({hint})"


def similar(flag: str, known: Iterable[str]) -> str | None:
    """A known flag that was probably meant: spelt almost alike, and not its opposite."""
    candidates = [name for name in known if _is_negative(name) == _is_negative(flag)]
    close = difflib.get_close_matches(flag, candidates, n=1, cutoff=_SIMILAR)
    return close[0] if close else None


def _is_negative(flag: str) -> bool:
    return flag.startswith(("--no-", "--disable-"))


def _with_dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def add_engine_flags(parser: Parser) -> None:
    """One flag for each field of `EngineConfig`, and vLLM's --speculative-config. Flags have no defaults of their own."""
    group = parser.add_argument_group("engine")
    for field, hint in zip(fields(EngineConfig), typing.get_type_hints(EngineConfig).values(), strict=True):
        text = field.metadata["help"]
        options: dict[str, Any] = {"dest": field.name, "default": argparse.SUPPRESS}
        if field.default is not None:
            text += f" (default: {field.default})"
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        if field.name == "attention_backend":
            options |= {"action": AttentionBackend, "backends": kinds, "metavar": f"{{{','.join(map(str, kinds))}}}"}
        elif field.name == "dtype":
            options |= {"type": _dtype, "choices": kinds}
        elif field.name == "kv_cache_dtype":
            options |= {"type": _kv_cache_dtype, "choices": kinds}
        elif typing.get_origin(hint) is typing.Literal:
            options["choices"] = kinds
        elif kinds and typing.get_origin(kinds[0]) is typing.Literal:
            options |= {"choices": typing.get_args(kinds[0]), "metavar": "METHOD"}
        elif bool in (hint, *kinds):
            options["action"] = argparse.BooleanOptionalAction
        else:
            kind = kinds[0] if kinds else hint
            if typing.get_origin(kind) is tuple:
                options |= {"type": _numbers, "metavar": "N,N,..."}
            else:
                options |= {"type": size if field.name in _SIZES else kind, "metavar": _METAVARS[kind]}
        group.add_argument(f"--{field.name.replace('_', '-')}", help=text.replace("%", "%%"), **options)
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help='speculation as vLLM\'s flag gives it: {"method": one of --speculative-method, "model": the draft, '
        '"num_speculative_tokens": N (default: 3), "prompt_lookup_max": N, "prompt_lookup_min": N}',
    )


def size(text: str) -> int:
    """A number of tokens, requests or pages: 4096, 4k (4000) or 4K (4096)."""
    match = _SIZE.fullmatch(text)
    number = 0.5
    if match:
        unit = match[2]
        number = float(match[1]) * (1000 if unit.islower() else 1024) ** " kmg".index(unit.lower() or " ")
    if number != int(number):
        raise argparse.ArgumentTypeError(
            f"must be a whole number such as 4096, 4k (4000) or 4K (4096), got {shown(text)}"
        )
    return int(number)


def _dtype(text: str) -> str:
    if text in _HALF:
        raise argparse.ArgumentTypeError(f"{text} is not supported: use bfloat16, or auto")
    return "float32" if text == "float" else text


def _kv_cache_dtype(text: str) -> str:
    return {"bfloat16": "bf16", "fp8_e4m3": "fp8"}.get(text, text)


def names(text: str) -> tuple[str, ...]:
    """A list of texts, as JSON (as vLLM has it) or with commas between them."""
    if not text.lstrip().startswith("["):
        return tuple(name.strip() for name in text.split(",") if name.strip())
    try:
        given = json.loads(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {e}") from e
    if not all(isinstance(name, str) for name in given):
        raise argparse.ArgumentTypeError("must be a list of texts")
    return tuple(given)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise argparse.ArgumentTypeError(f"is not valid JSON: {e}") from e
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {shown(text)}")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from e


# Other names that vLLM has for methods.
_METHODS = {"deepseek_mtp": "mtp", "ngram_gpu": "ngram"}


def _as_ours(speculative_config: Any) -> Any:
    """Without what vLLM has for it and means nothing more here."""
    if not isinstance(speculative_config, dict):
        return speculative_config
    config = dict(speculative_config)
    if isinstance(method := config.get("method"), str):
        config["method"] = _METHODS.get(method, method)
    if config.get("draft_tensor_parallel_size") == 1:
        del config["draft_tensor_parallel_size"]
    return config


def engine_config(arguments: argparse.Namespace) -> tuple[EngineConfig, dict[str, Any]]:
    """The configuration, and those options that the command line gives."""
    given = {f.name: getattr(arguments, f.name) for f in fields(EngineConfig) if hasattr(arguments, f.name)}
    config = EngineConfig(**given)
    if hasattr(arguments, "speculative_config"):
        try:
            config = with_speculative_config(config, _as_ours(json.loads(arguments.speculative_config)))
        except ValueError as e:
            raise UsageError(f"--speculative-config is not valid JSON: {e}") from e
        except ConfigError as e:
            raise UsageError(f"--speculative-config: {e}") from e
        given["speculative_config"] = arguments.speculative_config
    return config, given
