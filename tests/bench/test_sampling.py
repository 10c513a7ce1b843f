"""`bench sampling`: its rules are those of the full sampler, its arithmetic, and a tiny run under `-m full`."""

import json

import pytest

from bench.__main__ import main
from bench.step.sampling import RULES, figures, gate
from jaxspec.engine.request import Request


def test_rules_need_the_full_sampler():
    needs_full = {name for name, params in RULES.items() if Request("r", [1], params).needs_full}
    assert needs_full == RULES.keys() - {"temperature"}


def test_ratios_and_the_gate():
    times = {"greedy": {1: 2e-3, 32: 8e-3}, "top_p": {1: 2.2e-3, 32: 8e-3}, "min_p": {1: 2e-3, 32: 8.2e-3}}
    rows = [{"rows": n, "drafted_tokens": 0, **figures(times, n)} for n in (1, 32)]
    assert rows[0]["step_ms"] == {"greedy": 2.0, "top_p": 2.2, "min_p": 2.0}
    assert rows[0]["over_greedy"] == {"top_p": 1.1, "min_p": 1.0}
    worst = gate(rows)
    assert (worst["worst"], worst["rule"], worst["at_rows"], worst["met"]) == (1.1, "top_p", 1, False)
    assert gate(rows[1:])["met"]


@pytest.mark.full
def test_a_tiny_run(tmp_path):
    out = tmp_path / "sampling.json"
    options = ["--tokens", "2", "--layers", "2", "--context", "70", "--loop", "2", "--rows", "2"]
    assert main(["sampling", "--model", "tiny", *options, "--rules", "top_p,alternatives", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert record["compiles_after_warm_up"] == 0
    assert [row["drafted_tokens"] for row in record["rows"]] == [0, 2]
    for row in record["rows"]:
        assert row["step_ms"].keys() == {"greedy", "top_p", "alternatives"}
        assert min(row["step_ms"].values()) > 0
