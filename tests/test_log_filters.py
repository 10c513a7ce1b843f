"""What is hidden of other packages' warnings, each one provoked; errors stay."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from jaxspec import log_filters
from jaxspec.text import Tokenizer

ROOT = Path(__file__).parents[1]
# XLA warns that it cannot dump what it compiles there, then reports an error.
COMPILE = "import jaxspec, jax; jax.jit(lambda x: x + 1)(1)"
UNWRITABLE = "--xla_dump_to=/proc/nowhere"


def xla_log(**variables: str) -> list[str]:
    """Levels of the lines that XLA logs in a process that imports jaxspec and then compiles."""
    environment = {name: value for name, value in os.environ.items() if name not in log_filters.ENVIRONMENT}
    environment |= {"XLA_FLAGS": UNWRITABLE, "JAX_PLATFORMS": "cpu", **variables}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return [line[:1] for line in done.stderr.splitlines()]


def test_xla_shows_errors_and_no_warnings():
    assert set(xla_log()) == {"E"}


@pytest.mark.slow
@pytest.mark.parametrize("level", ["0", "1"])
def test_the_level_that_the_user_has_set_stays(level):
    assert "W" in xla_log(TF_CPP_MIN_LOG_LEVEL=level)


def test_a_large_vocabulary_is_no_reason_to_warn_about_mistral(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING, logger="transformers")  # others may have asked for errors only
    tokenizer = RustTokenizer(models.BPE({f"t{i}": i for i in range(100_001)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["DeepseekV3ForCausalLM"]}))
    shown: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: shown.append(record.getMessage())
    logger = logging.getLogger("transformers")
    monkeypatch.setattr(logger, "handlers", [handler])
    Tokenizer.from_folder(tmp_path)
    assert shown == []

    # What it would have been, and that nothing else of this logger is lost.
    ((name, text),) = log_filters.MESSAGES.items()
    source = logging.getLogger(name)
    source.warning("something else")
    monkeypatch.setattr(source, "filters", [])
    Tokenizer.from_folder(tmp_path)
    assert shown[0] == "something else"
    assert text in shown[1]
