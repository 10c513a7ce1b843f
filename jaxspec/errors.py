"""Errors that a user can cause, each one clear line in the user's terms.

Everything else that is raised is a bug in jaxspec. The CLI prints these without a traceback; the server turns
`InvalidRequestError` into a 4xx response.
"""


class JaxspecError(Exception):
    """Base of all errors that are the user's to mend. Its text is one line that says what is wrong and what would do."""


class ModelFormatError(JaxspecError):
    """A model folder cannot be used: missing config, unsupported architecture, wrong tensors, unsafe files."""


class ConfigError(JaxspecError):
    """An engine option, or a combination of options, that cannot work."""


class InvalidRequestError(JaxspecError, ValueError):
    """A generation request that cannot be served.

    `param` names the offending request field where there is one; `code` is the OpenAI error code
    (for example `context_length_exceeded`).
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.param = param
        self.code = code
