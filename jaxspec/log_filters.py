"""Hides warnings of other packages that a user of jaxspec can do nothing about: the whole list, with reasons.

Errors are never hidden, and an environment variable that the user has set stays as it is.
"""

import logging
import os

# Read by the packages when they are imported.
ENVIRONMENT = {
    # XLA's C++ log has levels but no filters; 2 leaves out warnings. The usual one comes on a GPU while XLA times
    # kernels ("Delay kernel timed out: measured time has sub-optimal accuracy"), others now and then while it compiles.
    # jax's own default, 1, would show them.
    "TF_CPP_MIN_LOG_LEVEL": "2",
    # transformers: "PyTorch was not found". Tokenizers need no PyTorch.
    "TRANSFORMERS_NO_ADVISORY_WARNINGS": "1",
}

# Name of a Python logger -> a text that the messages it drops contain.
MESSAGES = {
    # For Mistral's tokenizers, but given for every large vocabulary whose config.json names no model_type. No
    # architecture that jaxspec supports uses them.
    "transformers.tokenization_utils_tokenizers": "with an incorrect regex pattern: https://huggingface.co/mistralai/",
}


def install() -> None:
    """Hides them in this process. `import jaxspec` calls this before any of its modules imports jax."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, text in MESSAGES.items():
        logging.getLogger(name).addFilter(_Without(text))


class _Without(logging.Filter):
    def __init__(self, text: str):
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()
