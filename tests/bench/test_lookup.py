"""`bench lookup`: rows write the texts that they are given, whatever drafts propose, and its figures and gate."""

import json

import numpy as np
import pytest

from bench.__main__ import main
from bench.harness import models
from bench.harness.agent_traces import Trace
from bench.harness.models import mesh_of_one
from bench.step.lookup import PLAIN, build, gate, proposed, run_once, summary
from bench.step.sizes import Sizes

ROWS, CONTEXT, STEPS, K = 2, 20, 6, 2
ANSWER = (K + 1) * (STEPS + 7)
SIZES = Sizes((ROWS,), CONTEXT, STEPS, (STEPS, STEPS), budget=32, tokens=K)


@pytest.fixture
def weights():
    return models.draw(models.random_config("tiny"), mesh_of_one(), np.dtype(np.float32))


def a_trace(seed, *, repeats):
    """An answer that is its prompt's tokens again, or has nothing in common with it."""
    ids = np.random.default_rng(seed).permutation(256).tolist()
    prompt, rest = tuple(ids[:CONTEXT]), tuple(ids[CONTEXT : CONTEXT + ANSWER])
    return Trace("edit", prompt, (prompt * ANSWER)[:ANSWER] if repeats else rest)


@pytest.mark.long
@pytest.mark.usefixtures("lean_buckets")
@pytest.mark.parametrize("acceptance", [pytest.param(0.0, marks=pytest.mark.full), 1.0])
def test_rows_write_their_texts_with_drafts_of_both_kinds(acceptance, weights):
    """A row that repeats its prompt is looked up; the other's drafts come from the MTP layer, all right or all wrong."""
    written = build(weights, SIZES, "ngram+mtp", CONTEXT + ANSWER, "float32", adaptive=False, acceptance=acceptance)
    written.engine.warm_up()
    for order in (1, -1):  # slots are given to other requests
        traces = [a_trace(3, repeats=True), a_trace(4, repeats=False)][::order]
        load = written.begin(traces)
        figures = run_once(load, ROWS, STEPS, traces)  # raises where a text is not the trace's
        assert figures["drafts_per_step"] == K
        assert figures["tokens_per_step"] == pytest.approx((K + 1 + (K * acceptance + 1)) / 2)
        load.close()


def test_given_drafts_are_right_as_often_as_asked():
    texts = np.random.default_rng(1).integers(0, 50, (8, 4000), np.int32)
    got = proposed(texts, 0.7, 50)
    assert (got == texts).mean() == pytest.approx(0.7, abs=0.01)
    assert got.min() >= 0
    assert got.max() < 50
    assert (proposed(texts, 1.0, 50) == texts).all()
    assert (proposed(texts, 0.0, 50) != texts).all()


def test_the_gate_is_the_worst_of_what_is_looked_up():
    def result(kind, rows, **over_none):
        return {"kind": kind, "rows": rows, "drafts": {name: {"over_none": o} for name, o in over_none.items()}}

    results = [result("edit", 1, none=1.0, mtp=0.5, ngram=1.4), result("new", 128, none=1.0, mtp=0.6, ngram=0.98)]
    found = gate(results)
    assert found is not None
    assert (found["worst"], found["draft"], found["kind"], found["at_rows"], found["met"]) == (
        0.98, "ngram", "new", 128, True,
    )  # fmt: skip
    worse = gate([*results, result("new", 1, none=1.0, suffix=0.96)])
    assert worse is not None
    assert not worse["met"]
    assert gate([result("new", 1, none=1.0, mtp=0.6)]) is None


def test_the_repeat_of_median_speed_counts():
    runs = [{"tokens_per_s": speed, "tokens_per_step": speed / 10} for speed in (30.0, 10.0, 20.0)]
    assert summary(runs) == {
        "tokens_per_s": 20.0, "tokens_per_step": 2.0, "tokens_per_s_of_runs": [30.0, 10.0, 20.0],
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.usefixtures("lean_buckets")
@pytest.mark.parametrize("adaptive", [[], ["--adaptive"]])
def test_a_tiny_run(tmp_path, capsys, adaptive):
    out = tmp_path / "lookup.json"
    options = ["--drafts", "mtp,suffix", "--kinds", "call,new", "--rows", "2", "--context", "300", "--steps", "4"]
    code = main(["lookup", "--model", "tiny", *options, "--repeats", "1", *adaptive, "--out", str(out)])
    result = json.loads(out.read_text())
    assert code == (0 if result["gate"]["met"] else 1)
    assert result["compiles_after_warm_up"] == 0
    assert [(each["kind"], each["rows"]) for each in result["results"]] == [("call", 2), ("new", 2)]
    for each in result["results"]:
        assert list(each["drafts"]) == [PLAIN, "mtp", "suffix"]
        assert all(figures["tokens_per_s"] > 0 for figures in each["drafts"].values())
        assert each["drafts"][PLAIN]["tokens_per_step"] == 1
    if not adaptive:
        calls, new = (each["drafts"]["suffix"]["tokens_per_step"] for each in result["results"])
        assert calls > new
    assert "looked-up drafts over none" in capsys.readouterr().out
