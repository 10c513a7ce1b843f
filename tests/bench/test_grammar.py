"""`bench grammar`: its arithmetic, its made-up words and its grammar, and a tiny run."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.vocabulary import made_up_tokenizer
from bench.step.grammar import PARAMS, Batches, Group, Turn, figures, gates
from jaxspec.engine.request import Request

HOST = {"step": 1e-3, "masks": 0.0}


def turn(constrained, free, *, accepted=0, blocked=0):
    groups = {"constrained": Group(constrained, 4, accepted, blocked), "free": Group(free, 4, accepted)}
    return Turn(groups, HOST, split_steps=1.0)


def test_ratios_are_over_the_same_rows_of_the_free_batch():
    turns = {
        "free": [turn(1e-3, 2e-3), turn(9e-3, 2e-3), turn(1e-3, 2e-3)],
        "full": [turn(2e-3, 2e-3)],
        "constrained": [turn(1.2e-3, 2.02e-3, accepted=2, blocked=1)],
    }
    row = {"drafted_tokens": 3} | figures(turns)
    assert row["over_free"] == {"constrained": 1.2, "free": 1.01}
    assert row["over_full"] == {"constrained": 0.6, "free": 1.01}
    assert row["accepted_a_window"]["constrained"] == {"constrained": 0.5, "free": 0.5}
    assert row["blocked"] == 0.25
    assert row["split_steps"] == 1
    better = {"drafted_tokens": 0, "over_free": {"constrained": 1.0, "free": 1.0}}
    assert [(g["worst"], g["drafted_tokens"], g["met"]) for g in gates([better, row])] == [
        (1.2, 3, False), (1.01, 3, True),
    ]  # fmt: skip


def test_only_the_full_batch_asks_for_the_full_sampler_by_its_parameters():
    assert {name for name, params in PARAMS.items() if Request("r", [1], params).needs_full} == {"full"}


@pytest.mark.parametrize("size", [256, 3000])
def test_made_up_words_fill_the_vocabulary(size):
    """Twice the same ones; and with them every second row of the batch has a grammar that does not end."""
    tokenizer = made_up_tokenizer(size)
    assert tokenizer.vocab_size == size
    assert tokenizer.encode('{"a": 1}') == made_up_tokenizer(size).encode('{"a": 1}')
    rules = [Batches("tiny", size, 4, 8).rule(constrained=constrained) for constrained in (False, True)]
    assert rules[0].constraint is None
    assert rules[1].feed(tokenizer.encode('{"records": ['), None).error is None
    assert rules[1].feed(tokenizer.encode("]"), None).error is not None


def test_blocked_windows_end_at_a_forbidden_draft():
    batches, encode = Batches("tiny", 256, 2, 8), made_up_tokenizer(256).encode
    words = np.empty((4, 8), np.int32)
    for drafts, emitted, blocked in (('{"x', '{"r', 1), ('{"', "{", 0), ("x", "{", 1), ("", "{", 0)):
        rule = batches.rule(constrained=True)
        rule.fill_masks(encode(drafts), words)
        rule.feed(encode(emitted), None)
        assert rule.blocked == blocked, drafts


@pytest.mark.long
def test_a_tiny_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    out = tmp_path / "grammar.json"
    options = ["--tokens", "0,2", "--rows", "4", "--context", "64", "--steps", "6", "--turns", "1"]
    assert main(["grammar", "--model", "tiny", *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["compiles_after_warm_up"] == 0
    assert [row["drafted_tokens"] for row in result["drafts"]] == [0, 2]
    for row in result["drafts"]:
        assert row["split_steps"] == 1
        assert row["host_ms_a_step"]["constrained"]["masks"] > 0
        assert row["host_ms_a_step"]["free"]["masks"] == 0
    assert "time per token of constrained rows" in capsys.readouterr().out
