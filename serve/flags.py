"""Command-line conventions on top of argparse: one-line errors, `_` for `-` in flags, suggestions, engine flags."""

import argparse
import difflib
import json
import types
import typing
from collections.abc import Sequence
from dataclasses import fields
from typing import Any, NoReturn

from jaxspec.config import EngineConfig, with_speculative_config
from jaxspec.errors import ConfigError

_METAVARS = {int: "N", float: "X", str: "TEXT"}


class UsageError(Exception):
    """A command line that makes no sense: exit code 2."""


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` instead of printing the usage and exiting."""

    def __init__(self, **options: Any):
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see {self.prog} --help)")

    def flags(self) -> list[str]:
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def parse(parser: Parser, commands: dict[str, Parser], argv: Sequence[str]) -> argparse.Namespace:
    """Parses; for an unknown flag the error suggests a similar one."""
    arguments, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    if unknown:
        used = commands.get(arguments.command or "", parser)
        flag = unknown[0].partition("=")[0]
        what = "flag" if flag.startswith("-") else "argument"
        close = difflib.get_close_matches(flag, used.flags(), n=1)
        hint = f"did you mean {close[0]}?" if close else f"see {used.prog} --help"
        raise UsageError(f"unknown {what} {flag} ({hint})")
    return arguments


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
        if typing.get_origin(hint) is typing.Literal:
            options["choices"] = kinds
        elif bool in (hint, *kinds):
            options["action"] = argparse.BooleanOptionalAction
        else:
            kind = kinds[0] if kinds else hint
            if typing.get_origin(kind) is tuple:
                options |= {"type": _numbers, "metavar": "N,N,..."}
            else:
                options |= {"type": kind, "metavar": _METAVARS[kind]}
        group.add_argument(f"--{field.name.replace('_', '-')}", help=text.replace("%", "%%"), **options)
    group.add_argument(
        "--speculative-config",
        metavar="JSON",
        default=argparse.SUPPRESS,
        help='speculation as vLLM\'s flag gives it: {"method": "mtp" or "eagle3", "model": the draft, '
        '"num_speculative_tokens": N (default: 3)}',
    )


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(","))
    except ValueError as e:
        raise argparse.ArgumentTypeError(f"must be whole numbers with commas between them, got {text!r}") from e


def engine_config(arguments: argparse.Namespace) -> tuple[EngineConfig, dict[str, Any]]:
    """The configuration, and those options that the command line gives."""
    given = {f.name: getattr(arguments, f.name) for f in fields(EngineConfig) if hasattr(arguments, f.name)}
    config = EngineConfig(**given)
    if hasattr(arguments, "speculative_config"):
        try:
            config = with_speculative_config(config, json.loads(arguments.speculative_config))
        except ValueError as e:
            raise UsageError(f"--speculative-config is not valid JSON: {e}") from e
        except ConfigError as e:
            raise UsageError(f"--speculative-config: {e}") from e
        given["speculative_config"] = arguments.speculative_config
    return config, given
