"""Where the options of `jaxspec serve` come from: the command line, else the environment, else a file, else a default."""

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError, UsageError, plain, shown
from jaxspec.speculative_config import SPECULATIVE_OPTIONS
from serve import peers
from serve.flags import Parser, dashed, engine_config, similar, unknown_word

COMMAND_LINE = "the command line"
PREFIX = "JAXSPEC_"
SECRETS = frozenset(("api_key", "ssl_keyfile_password"))
# Of other parts of jaxspec.
_OTHER_VARIABLES = frozenset(("JAXSPEC_CACHE", "JAXSPEC_COMMIT", "JAXSPEC_TEST_GPU"))
# Kubernetes gives every container JAXSPEC_PORT=tcp://... and others for a Service that is called jaxspec.
_OF_KUBERNETES = re.compile(r"JAXSPEC_(SERVICE_|PORT_)[A-Z0-9_]+")
_KUBERNETES_PORT = re.compile(r"(tcp|udp|sctp)://.*")
_TRUTHS = {**dict.fromkeys(("1", "true", "yes", "on"), True), **dict.fromkeys(("0", "false", "no", "off"), False)}
# Of a namespace, but no options.
_NO_OPTIONS = frozenset(("command", "run", "notes", "variables"))


@dataclass(frozen=True)
class Resolved:
    """
    Attributes:
        arguments: every option of the server, and those of the engine that were given.
        sources: option -> where it comes from; not for defaults.
        notes: lines that warn of what was given and has no effect.
        variables: of the environment, to be set for libraries.
    """

    arguments: argparse.Namespace
    sources: Mapping[str, str]
    notes: tuple[str, ...]
    variables: Mapping[str, str]

    def shown(self, fallbacks: Mapping[str, Any]) -> dict[str, dict[str, str]]:
        """Source -> option -> value, of what differs from its default. Secrets are not shown."""
        defaults = {**{f.name: f.default for f in fields(EngineConfig)}, **fallbacks}
        found: dict[str, dict[str, str]] = {}
        for name, source in self.sources.items():
            value = getattr(self.arguments, name)
            if value != defaults.get(name) and name not in ("model", "config"):
                found.setdefault(source, {})[name] = "***" if name in SECRETS else _shown(value)
        return found

    def blame(self, message: str) -> str:
        """An error's message, with the source of the options that it names, where that is not the command line."""
        words = {word.replace("-", "_") for word in re.findall(r"[a-z][a-z0-9_-]*", message)}

        def is_named(name: str) -> bool:
            # A short name may be a word of the text.
            return name in words if "_" in name else f"--{name}" in message or message.startswith(f"{name} ")

        named = {source for name, source in self.sources.items() if source != COMMAND_LINE and is_named(name)}
        return f"{message} (from {', '.join(sorted(named))})" if named else message


def _shown(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def resolve(parser: Parser, given: argparse.Namespace, environ: Mapping[str, str]) -> Resolved:
    """Adds what the environment and the file of --config give, and the defaults.

    Args:
        parser: of `jaxspec serve`.
        given: the command line, parsed.

    Raises:
        UsageError, ConfigError: something there makes no sense; the message names the source.
    """
    from_environment, labels, notes = _environment(parser, environ)
    path = getattr(given, "config", getattr(from_environment, "config", None))
    layers: list[tuple[argparse.Namespace, Mapping[str, str], str]]
    layers = [] if path is None else [(_file(parser, path), {}, str(path))]
    layers += [(from_environment, labels, "the environment"), (given, {}, COMMAND_LINE)]
    values: dict[str, Any] = dict(parser.fallbacks)
    sources: dict[str, str] = {}
    variables: dict[str, str] = {}
    keys: list[str] = []
    for namespace, label_of, label in layers:
        _normalise(namespace, label)
        notes += getattr(namespace, "notes", ())
        asked = getattr(namespace, "variables", {})
        variables |= {n: v for n, v in asked.items() if label == COMMAND_LINE or n not in environ}
        options = {name: value for name, value in vars(namespace).items() if name not in _NO_OPTIONS}
        keys = [*options.get("api_key", ()), *keys]
        values |= options
        sources |= {name: label_of.get(name, label) for name in options}
    values["api_key"] = keys  # any key opens the server, wherever it comes from
    tokenizer = values.pop("tokenizer", values.get("model"))
    sources.pop("tokenizer", None)
    if tokenizer != values.get("model"):
        raise UsageError(
            f"--tokenizer {plain(tokenizer)} is not supported: the tokenizer is the one in the model's folder"
        )
    return Resolved(argparse.Namespace(**values), sources, notes, variables)


def _normalise(given: argparse.Namespace, label: str) -> None:
    """Options of the peers and --speculative-config become the fields of `EngineConfig` that they stand for."""
    try:
        peers.finish(given)
        if hasattr(given, "speculative_config"):
            config, _ = engine_config(given)
            del given.speculative_config
            for option in SPECULATIVE_OPTIONS:
                setattr(given, option, getattr(config, option))
    except (UsageError, ConfigError) as e:
        if label == COMMAND_LINE:
            raise
        raise type(e)(f"{label}: {e}") from e


# --- the environment ---


def variable_of(action: argparse.Action) -> str:
    """The variable that stands for an option."""
    return PREFIX + action.dest.upper()


def _environment(
    parser: Parser, environ: Mapping[str, str]
) -> tuple[argparse.Namespace, dict[str, str], tuple[str, ...]]:
    """What the variables give, the variable of each option, and warnings."""
    options = {variable_of(action): action for action in parser.own_options()}
    merged, notes = argparse.Namespace(), []
    labels: dict[str, str] = {}
    for name, text in environ.items():
        if not name.startswith(PREFIX) or name in _OTHER_VARIABLES or _OF_KUBERNETES.fullmatch(name):
            continue
        action = options.get(name)
        if action is None:
            close = similar(name, options)
            notes.append(f"${name} is no variable of jaxspec" + (f": did you mean ${close}?" if close else ""))
        elif name == "JAXSPEC_PORT" and _KUBERNETES_PORT.fullmatch(text):
            notes.append(f"${name} has no effect: Kubernetes sets it for a Service called jaxspec; use --port")
        elif text or action.dest in SECRETS | {"api_key_file"}:  # a key that is empty is an error, not no key
            one = _parse(parser, _words_of_text(action, text), f"${name}")
            vars(merged).update(vars(one))
            labels |= dict.fromkeys(vars(one), f"${name}")
    return merged, labels, tuple(notes)


def _words_of_text(action: argparse.Action, text: str) -> list[str]:
    if action.nargs == 0:
        return _switch(action, _TRUTHS.get(text.strip().lower(), text))
    flag = action.option_strings[0] if action.option_strings else "--model"
    return [flag, *text.split(",")] if action.nargs == "+" else [f"{flag}={text}"]


def _switch(action: argparse.Action, value: Any) -> list[str]:
    """The words that turn a switch on or off."""
    if not isinstance(value, bool):
        raise UsageError(f"{action.option_strings[0]} must be true or false, got {shown(value)}")
    on, off = action.option_strings[0], f"--no-{action.option_strings[0][2:]}"
    if value:
        return [on]
    return [off] if off in action.option_strings else []


def _parse(parser: Parser, words: Sequence[str], label: str) -> argparse.Namespace:
    try:
        namespace, unknown = parser.parse_known_args(list(words), argparse.Namespace())
        if unknown:
            raise UsageError(unknown_word(parser, unknown[0]))
    except UsageError as e:
        raise UsageError(f"{label}: {e}") from e
    for name in _NO_OPTIONS & {"command", "run"}:
        vars(namespace).pop(name, None)
    return namespace


# --- the file ---


def _file(parser: Parser, path: Path) -> argparse.Namespace:
    """A file as vLLM has it: YAML, names of flags and their values."""
    merged = argparse.Namespace()
    for key, value in _read(path).items():
        if not isinstance(key, str):
            raise UsageError(f"{path}: {key!r} is not the name of an option")
        one = _parse(parser, _words_of_yaml(parser, key, value, path), str(path))
        notes = (*getattr(merged, "notes", ()), *getattr(one, "notes", ()))
        variables = {**getattr(merged, "variables", {}), **getattr(one, "variables", {})}
        vars(merged).update({**vars(one), "notes": notes, "variables": variables})
    return merged


def _read(path: Path) -> dict[Any, Any]:
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses keys that are given twice, of which YAML itself keeps the last."""

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
            for i, key in enumerate(keys):
                if key in keys[:i]:
                    raise yaml.YAMLError(f"{key} is given twice")
            return super().construct_mapping(node, deep)

    try:
        content = yaml.load(path.expanduser().read_text(encoding="utf-8"), Loader)
    except OSError as e:
        raise ConfigError(f"cannot read --config {path}: {e.strerror or e}") from e
    except (ValueError, yaml.YAMLError) as e:
        raise ConfigError(f"{path} is not valid YAML: {' '.join(str(e).split())}") from e
    if not isinstance(content, dict | None):
        raise ConfigError(f"{path} must map names of flags to values, as in `port: 8000`")
    return content or {}


def _words_of_yaml(parser: Parser, key: str, value: Any, path: Path) -> list[str]:
    flag = dashed([f"--{key}"])[0]
    if flag == "--config":
        raise UsageError(f"{path}: a file cannot name another with config")
    try:
        action = parser.option(flag)
    except KeyError:
        close = similar(flag, parser.flags())
        hint = f" (did you mean {close[2:]}?)" if close else ""
        raise UsageError(f"{path}: unknown option {shown(key)}{hint}") from None
    if value is None:
        return []
    if action.nargs == 0:
        try:
            return _switch(action, value)
        except UsageError as e:
            raise UsageError(f"{path}: {e}") from e
    return list(_values(action, flag, value))


def _values(action: argparse.Action, flag: str, value: Any) -> Iterator[str]:
    """The words for a value of a file. The value is in the flag's own word, so that it may begin with a dash."""
    if isinstance(value, list) and action.nargs == "+":
        yield from (flag, *map(str, value))
    elif isinstance(value, list) and isinstance(action, argparse._AppendAction):
        yield from (f"{flag}={item}" for item in value)
    elif isinstance(value, list | dict):
        yield f"{flag}={json.dumps(value)}"
    else:
        yield f"{flag}={value}"
