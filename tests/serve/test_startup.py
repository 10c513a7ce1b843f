"""What the start shows: a bar on a terminal, lines elsewhere, and a command that the server answers."""

import io
import json
import os
import shlex
import shutil
import subprocess

import pytest

from serve.model import ServedModel
from serve.startup import console_progress, suggested_curl
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

NAMES = ["mock", "it's", 'say "hi"', "$HOME/`id`", "a b;c", "模型", "back\\slash", "-d"]


class Terminal(io.StringIO):
    def isatty(self):
        return True


def start(progress):
    """What `LLM` reports: two parts are loaded, then two steps compile at once."""
    for done, part in enumerate(("embed", "head"), 1):
        progress(done, 2, f"Loading weights: {part}, {done} of 2 parts")
    progress(0, 3, "Compiling 1 of 3: decode, 1 row")
    progress(0, 3, "Compiling 2 of 3: decode, 8 rows")
    progress(1, 3, "Compiled 1 of 3 after 2.0 s")
    progress(1, 3, "Compiling 3 of 3: prefill, 64 tokens of up to 4 prompts")
    progress(2, 3, "Compiled 2 of 3 after 2.1 s")
    progress(3, 3, "Compiled 3 of 3 after 2.2 s")


def test_a_terminal_gets_a_bar_for_each_stage_that_ends_full():
    stream = Terminal()
    start(console_progress(stream))
    loading, compiling = stream.getvalue().rstrip("\n").split("\n")
    for bar, words in ((loading, ("Loading weights", "2/2", "head")), (compiling, ("Compiling", "3/3", "after 2.2 s"))):
        last = bar.rsplit("\r", 1)[-1]
        assert "100%" in last
        assert all(word in last for word in words)
    assert "decode, 8 rows" in compiling


def test_elsewhere_each_compilation_is_a_line_before_it_begins(capsys):
    start(console_progress(io.StringIO()))
    lines = [line.split("] ")[1] for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "Loading weights: embed, 1 of 2 parts",
        "Loading weights: head, 2 of 2 parts",
        "Compiling 1 of 3: decode, 1 row",
        "Compiling 2 of 3: decode, 8 rows",
        "Compiling 3 of 3: prefill, 64 tokens of up to 4 prompts",
        "Compiled 3 of 3 after 2.2 s",
    ]


@pytest.mark.parametrize("with_tokenizer", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_suggested_command_says_what_it_should(name: str, with_tokenizer: bool):
    model = served(MockEngine(), byte_tokenizer() if with_tokenizer else None)
    words = shlex.split(suggested_curl(model, name, "http://0.0.0.0:8000", with_key=True))
    assert words[:2] == ["curl", "http://127.0.0.1:8000/v1/completions"]
    assert words[words.index("-H") + 1] == "content-type: application/json"
    assert "authorization: Bearer $JAXSPEC_API_KEY" in words
    assert json.loads(words[words.index("-d") + 1])["model"] == name
    elsewhere = shlex.split(suggested_curl(model, name, "http://[::]:80", with_key=False))
    assert elsewhere[1] == "http://[::1]:80/v1/completions"
    assert not any("authorization" in word for word in elsewhere)


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize("with_tokenizer", [True, False])
def test_the_suggested_command_works_as_printed(start_server, with_tokenizer: bool):
    model: ServedModel = served(MockEngine(), byte_tokenizer() if with_tokenizer else None)
    server = start_server(model, served_model_names=tuple(NAMES), api_keys=("a key",))
    for name in NAMES:
        command = suggested_curl(model, name, server.base_url, with_key=True)
        environment = {**os.environ, "JAXSPEC_API_KEY": "a key"}
        done = subprocess.run(["bash", "-c", f"{command} -sS"], capture_output=True, env=environment, check=True)
        answer = json.loads(done.stdout)
        assert answer["model"] == name
        assert answer["usage"]["completion_tokens"] >= 1
