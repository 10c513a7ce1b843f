"""What people see while a model loads, its steps compile and prompts are answered."""

import io
import logging
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from jaxspec import SamplingParams
from jaxspec.engine.buckets import Bucket, bucket_table, parts
from jaxspec.llm import LLM
from jaxspec.progress import PromptsBar, StartBar, wants_bar
from pallas_kernels.backend import choose, hopper_unsupported_reason


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_bars_are_for_terminals_unless_asked_for(monkeypatch):
    for stream, by_default in ((Terminal(), True), (io.StringIO(), False)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert wants_bar(None) is by_default
        assert wants_bar(use_tqdm=True)
        assert not wants_bar(use_tqdm=False)


@pytest.mark.parametrize(
    ("bucket", "words"),
    [
        (Bucket(0, 0, 1, "full"), "decode, 1 row"),
        (Bucket(0, 0, 8, "lean"), "decode, 8 rows, greedy or by temperature"),
        (parts(Bucket(0, 0, 8, "full", 3))[0], "decode, 8 rows, 3 drafts, forward only"),
        (Bucket(64, 4, 8, "full"), "prefill, 64 tokens of up to 4 prompts, beside 8 decode rows"),
        (Bucket(64, 1, 0, "full"), "prefill, 64 tokens of up to 1 prompt"),
    ],
)
def test_a_step_in_words(bucket, words):
    assert bucket.words == words


class Engine:
    """Stands for an engine whose two steps compile at once."""

    settings = SimpleNamespace(synthetic_acceptance_length=None)
    runner = SimpleNamespace(kernels={"moe": {"reference"}})
    vocab_size, eos_token_ids = 16, (0,)

    def warm_up(self, progress, *, announce, wait_for_all):
        assert wait_for_all
        announce(1, 2, "decode, 1 row")
        announce(2, 2, "decode, 8 rows")
        progress(1, 2, "prefill 0x0, decode 1, full: 2.0 s")
        progress(2, 2, "prefill 0x0, decode 8, full: 2.5 s")


@pytest.fixture
def engine(monkeypatch):
    def build(_folder, _config, *, progress, **_options):
        if progress:
            progress(1, 1, "Loading weights: head, 1 of 1 parts")
        return Engine(), {}

    monkeypatch.setattr("jaxspec.loading.engine.build_engine", build)
    return build


@pytest.mark.usefixtures("engine")
def test_a_start_tells_what_begins_and_what_is_done():
    seen = []
    LLM("demo", progress=lambda *event: seen.append(event))
    assert seen == [
        (1, 1, "Loading weights: head, 1 of 1 parts"),
        (0, 2, "Compiling 1 of 2: decode, 1 row"),
        (0, 2, "Compiling 2 of 2: decode, 8 rows"),
        (1, 2, "Compiled 1 of 2 after 2.0 s"),
        (2, 2, "Compiled 2 of 2 after 2.5 s"),
    ]


@pytest.mark.usefixtures("engine")
def test_a_start_shows_bars_on_a_terminal(capsys, caplog, monkeypatch):
    with caplog.at_level(logging.INFO, "jaxspec"):
        LLM("demo")
    assert capsys.readouterr().err == ""
    assert re.search(r"init engine \(.*\) took \d+\.\d\d seconds", caplog.text)
    LLM("demo", use_tqdm=True)
    shown = capsys.readouterr().err
    assert "Loading weights: 100%" in shown
    assert "Compiling: 100%" in shown
    assert "decode, 8 rows" in shown
    monkeypatch.setattr(sys, "stderr", Terminal())
    LLM("demo", use_tqdm=False)
    assert sys.stderr.getvalue() == ""
    LLM("demo")
    assert "Compiling: 100%" in sys.stderr.getvalue()


def test_the_bar_of_a_start_begins_again_with_each_stage():
    stream = Terminal()
    bar = StartBar(stream)
    bar(1, 2, "Loading weights: embed, 1 of 2 parts")
    bar(0, 2, "Compiling 1 of 2: decode, 1 row")
    bar.close()
    assert "Loading weights:  50%" in stream.getvalue()
    assert "Compiling:   0%" in stream.getvalue()


def test_the_bar_of_prompts_has_vllms_words():
    stream = Terminal()
    bar = PromptsBar(2, stream)
    bar.add(10, 3, finished=False)
    bar.add(10, 1, finished=True)
    bar.add(5, 1, finished=True)
    bar.close()
    last = stream.getvalue().rsplit("\r", 1)[-1]
    assert "Processed prompts: 100%" in last
    assert re.search(r"est\. speed input: [\d.]+ toks/s, output: [\d.]+ toks/s", last)


def test_a_cpu_needs_one_line_for_all_kernels(caplog):
    reason = hopper_unsupported_reason()
    assert reason is not None
    with caplog.at_level(logging.INFO, "jaxspec.kernels"):
        for operation in ("one", "two", "three"):
            assert choose(operation, "auto", {"mosaic": reason}) == "reference"
    assert len([m for m in caplog.messages if "this is a CPU" in m]) <= 1
    assert not any("one" in m or "two" in m for m in caplog.messages)


@pytest.mark.long
def test_a_real_start_and_real_prompts(caplog, capsys, monkeypatch):
    # The sampler that greedy requests need; that of all parameters is most of the time.
    lean = lambda settings: tuple(replace(bucket, variant="lean") for bucket in bucket_table(settings))  # noqa: E731
    monkeypatch.setattr("jaxspec.engine.runner.bucket_table", lean)
    params = SamplingParams(max_tokens=8, temperature=0)
    options = {"max_model_len": 128, "max_num_seqs": 1, "max_num_batched_tokens": 16, "num_speculative_tokens": 0}
    seen = []
    with caplog.at_level(logging.INFO, "jaxspec"):
        llm = LLM("demo", progress=lambda *event: seen.append(event), **options)
    for line in (
        r"Loading weights took \d+\.\d\d seconds",
        r"Model loading took \d+\.\d\d GiB memory and \d+\.\d\d seconds",
        r"Available KV cache memory: \d+\.\d\d GiB",
        r"CPU KV cache size: 128 tokens",
        r"Maximum concurrency for 128 tokens per request: 1\.00x",
    ):
        assert any(re.fullmatch(line, message) for message in caplog.messages), line
    texts = [what for _, _, what in seen]
    assert sum(text.startswith("Loading weights: ") for text in texts) > 2
    first = next(i for i, text in enumerate(texts) if text.startswith("Compiled"))
    assert texts[first - 1].startswith("Compiling ")
    assert texts[-1].startswith("Compiled 2 of 2 after ")
    assert len(llm.generate(["a", "b"], params, use_tqdm=True)) == 2
    assert "Processed prompts: 100%" in capsys.readouterr().err
    llm.generate("a", params)
    assert capsys.readouterr().err == ""
