"""Errors that a user can cause, each a single line in the user's terms.

Any other exception is a bug in jaxspec. The CLI prints these without a traceback; the server answers an
`InvalidRequestError` with status 400.
"""

import reprlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# How much of a value that a user or a file gave an error or the log may repeat.
SHOWN_CHARACTERS = 64


class JaxspecError(Exception):
    """Base of all errors that the user can fix. Its text is one line: what is wrong, and what would help."""


class ModelFormatError(JaxspecError):
    """A model folder cannot be used: missing config, unsupported architecture, wrong tensors, unsafe files."""


class ConfigError(JaxspecError):
    """An engine option, or a combination of options, that cannot work."""


class UsageError(JaxspecError):
    """A command line, or another place of options, that makes no sense: exit code 2."""


class GroupError(JaxspecError):
    """A process of a group has ended, does not answer, or does not fit the others: the group ends."""


class InvalidRequestError(JaxspecError, ValueError):
    """A generation request that cannot be served.

    `param` names the request's field that is wrong, if there is one; `code` is OpenAI's error code, such as
    `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Makes a full disk, or a place that may not be written, an error that the user can fix.

    Raises:
        ConfigError: for an `OSError` inside.
    """
    try:
        yield
    except OSError as e:
        raise ConfigError(f"cannot write {path}: {e.strerror or e}") from e


def shown(value: object) -> str:
    """A value in an error: its `repr`, bounded however large or nested it is, and in one line."""
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python does not write integers of thousands of digits
        return f"a {type(value).__name__} that is too large to show"
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."


def flagged(option: str) -> str:
    """An option of `EngineConfig` in an error: its name, and the flag that sets it."""
    return f"{option} (--{option.replace('_', '-')})"


def plain(value: object) -> str:
    """A name in an error: a text as it is, unless that would break the line or fill it."""
    if isinstance(value, str) and value.isprintable() and 0 < len(value) <= SHOWN_CHARACTERS:
        return value
    return shown(value)


_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = SHOWN_CHARACTERS - 4
_SHORT.maxlevel = 3
