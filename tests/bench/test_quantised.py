"""`bench quantised`."""

import json

import pytest

from bench.__main__ import main
from bench.accuracy.quantised import CASES, gates


@pytest.mark.parametrize(
    ("fp8", "both", "int4", "cache", "met"),
    [
        ((1.009, 2.92), (1.011, 2.92), (1.049, 1.0), (1.051, 3.0), [True, True, False, True, True, False]),
        ((1.011, 2.92), (1.009, 2.92), (1.051, 3.0), (1.049, 1.0), [False, True, True, True, False, True]),
        ((0.9, 2.90), (0.9, 2.90), (0.9, 3.0), (0.9, 3.0), [True, False, True, False, True, True]),
    ],
)
def test_gates(fp8, both, int4, cache, met):
    rows = [
        {"scheme": name, "nats": nats, "tokens_a_cycle": tokens}
        for name, (nats, tokens) in zip(CASES, ((1.0, 3.0), fp8, both, int4, cache), strict=True)
    ]
    assert [gate["met"] for gate in gates(rows)] == met


@pytest.mark.full
def test_a_short_run(tmp_path):
    out = tmp_path / "quantised.json"
    options = ["--windows", "4", "--prompts", "4", "--tokens", "8"]
    assert main(["quantised", *options, "--out", str(out)]) == 0
    base, fp8, both, int4, cache = json.loads(out.read_text())["schemes"]
    assert base["agreement"] == 1
    assert abs(fp8["nats"] - base["nats"]) < 0.1 > abs(int4["nats"] - base["nats"]) / 3
    assert 0 < abs(both["nats"] - fp8["nats"]) < 0.1
    assert 0 < abs(cache["nats"] - base["nats"]) < 0.05
    assert min(each["tokens_a_cycle"] for each in (base, fp8, both, int4, cache)) > 1.5
