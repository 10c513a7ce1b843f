"""What `jaxspec demo` prints, without a model. The drafts themselves are tested where they are."""

import dataclasses
import re
import sys
from types import SimpleNamespace

import pytest

from convert.reference import read_record
from jaxspec.engine.acceptance import Acceptance
from jaxspec.engine.output import FinishReason
from jaxspec.llm import Completion
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import TextStream
from serve import cli, demo
from serve.demo import DECODERS, GREEN, PLAIN, RECORD, Result, show, table
from tests.serve.mock_engine import byte_tokenizer


def completion(text: str, accepted: str, **fields) -> Completion:
    ids = byte_tokenizer().encode(text)
    flags = tuple(c == "x" for c in accepted)
    offsets = TextStream(byte_tokenizer(), (), SamplingParams()).feed(ids, FinishReason.LENGTH).text_offsets
    return Completion(
        tuple(byte_tokenizer().encode("p")), tuple(ids), text, "length", None,
        text_offsets=offsets, accepted=flags, **fields,
    )  # fmt: skip


def test_accepted_drafts_are_green():
    one = completion("abcdef", ".xx.x.")
    assert show(one, byte_tokenizer(), color=False) == "pabcdef"
    painted = show(one, byte_tokenizer(), color=True)
    assert painted.endswith(f"a{GREEN}bc{PLAIN}d{GREEN}e{PLAIN}f")
    assert re.sub(r"\033\[\d+m", "", painted) == "pabcdef"


def test_painting_loses_nothing_where_characters_are_split():
    text = "é😀\n日本x"
    length = len(text.encode())
    for pattern in range(64):
        flags = "".join("x" if (pattern >> i % 6) & 1 else "." for i in range(length))
        painted = show(completion(text, flags), byte_tokenizer(), color=True)
        assert re.sub(r"\033\[\d+m", "", painted) == "p" + text


def test_the_table():
    one = completion("abcdef", "......")
    plain = Result("plain", [one], 100, None, 2.0, 1, 0.0)
    drafted = Result("draft", [one], 40, Acceptance((10, 10, 10, 10), 120), 1.0, 0, 0.0)
    lines = table([plain, drafted]).splitlines()
    assert len({len(line) for line in lines}) == 1
    assert re.split(" {2,}", lines[1]) == ["plain", "1", "-", "100", "100 %", "3", "1 of 1"]
    assert re.split(" {2,}", lines[2]) == ["draft", "2.50", "50 %", "40", "40 %", "6", "0 of 1"]


class FakeLLM:
    """Writes what PyTorch wrote, except for the draft named in `wrong`."""

    wrong: str | None = None

    def __init__(self, model, *, num_speculative_tokens, speculative_model=None, **_options):
        assert model == "demo"
        self.k, self.draft = num_speculative_tokens, speculative_model
        self.tokenizer = SimpleNamespace(decode=lambda ids: f"<{len(ids)} ids>")
        self.acceptance = Acceptance((1,) * (self.k + 1), self.k * (self.k + 1)) if self.k else None
        self.engine = SimpleNamespace(stats=lambda: SimpleNamespace(acceptance=self.acceptance))

    def describe(self):
        return dict.fromkeys(("Architecture", "Dtype", "Device", "Kernels"), "x")

    def generate(self, prompts, params, *, use_tqdm):
        assert not use_tqdm  # a bar would break the lines of the table
        made = []
        for run, prompt, each in zip(read_record(RECORD), prompts, params, strict=True):
            assert (run.prompt_ids, each.temperature) == (prompt, 0)
            ids = (0, *run.new_ids[1:]) if self.wrong and self.wrong == self.draft else run.new_ids
            one = Completion(prompt, ids, "text", "length", tuple(run.logprobs), accepted=(False,) * len(ids))
            made.append(dataclasses.replace(one, acceptance=self.acceptance))
        return made


@pytest.mark.parametrize("wrong", [None, "demo/eagle3-mla"])
def test_every_decoder_is_held_against_pytorch(monkeypatch, capsys, wrong):
    monkeypatch.setattr("jaxspec.llm.LLM", FakeLLM)
    monkeypatch.setattr(FakeLLM, "wrong", wrong)
    assert cli.main(["demo"]) == (1 if wrong else 0)
    out = capsys.readouterr().out
    assert "\033" not in out  # not a terminal
    for name in DECODERS:
        count = 0 if wrong and "MLA" in name else 16
        assert f"Parity with PyTorch ({name}): {count} of 16 greedy continuations identical" in out
        assert re.search(rf"^{name} .* {count} of 16$", out, re.MULTILINE)


@pytest.mark.parametrize("variable", [True, False])
def test_no_color_is_respected(monkeypatch, variable):
    seen = []
    monkeypatch.setattr("jaxspec.llm.LLM", FakeLLM)
    monkeypatch.setattr(demo, "show", lambda _completion, _tokenizer, *, color: seen.append(color) or "text")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    if variable:
        monkeypatch.setenv("NO_COLOR", "1")
    assert cli.main(["demo"]) == 0
    assert set(seen) == {not variable}
