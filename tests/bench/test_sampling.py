"""`bench sampling`: rules of the full sampler, its arithmetic, a tiny run under `-m full`; and cuts of `bench kernel`."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.kernel.sampling import Cutoffs
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


def test_what_a_row_keeps_decides_whether_a_cut_is_right():
    """A cut may lie below the least logit that it keeps, and is not finite where all is kept."""
    case = Cutoffs(R=3, top_k=0, top_p=0.9, V=40, calls=1)
    inputs = case.inputs()
    cuts = np.asarray(case.many(inputs, None)[0])
    assert case.error(inputs, [cuts]) == 0
    assert case.error(inputs, [np.nextafter(cuts, np.float32(-100))]) == 0
    logits = np.asarray(inputs[0][0], np.float32)
    for least in (np.where(logits < cuts[:, None], logits, -np.inf).max(axis=1), logits.max(axis=1)):
        assert case.error(inputs, [least]) == np.inf
    everything = Cutoffs(R=3, top_k=0, top_p=1.0, V=40, calls=1)
    cuts = np.asarray(everything.many(inputs, None)[0])
    assert np.isfinite(cuts).all()
    assert everything.error(inputs, [cuts]) == 0
