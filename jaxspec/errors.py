"""Errors that a user can cause, each a single line in the user's terms.

Any other exception is a bug in jaxspec. The CLI prints these without a traceback; the server answers an
`InvalidRequestError` with status 400.
"""


class JaxspecError(Exception):
    """Base of all errors that the user can fix. Its text is one line: what is wrong, and what would help."""


class ModelFormatError(JaxspecError):
    """A model folder cannot be used: missing config, unsupported architecture, wrong tensors, unsafe files."""


class ConfigError(JaxspecError):
    """An engine option, or a combination of options, that cannot work."""


class InvalidRequestError(JaxspecError, ValueError):
    """A generation request that cannot be served.

    `param` names the request's field that is wrong, if there is one; `code` is OpenAI's error code, such as
    `context_length_exceeded`.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code
