"""`bench adaptive` on a tiny model: every engine runs every load, and windows have the lengths that were asked for."""

import json

import pytest

from bench.__main__ import main


@pytest.mark.full
def test_loads_have_their_lengths(tmp_path, capsys):
    out = tmp_path / "adaptive.json"
    options = [
        "--model",
        "tiny",
        "--layers",
        "2",
        "--rows",
        "2",
        "--lengths",
        "2.2",
        "--seconds",
        "1",
        "--repeats",
        "1",
    ]
    assert main(["adaptive", *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    loads = {each["load"]: each["engines"] for each in result["results"]}
    assert list(loads) == [2.2, "mixed", "switched"]
    for engines in loads.values():
        assert list(engines) == ["plain", "k = 1", "k = 3", "adaptive"]
        assert all(each["tokens_per_s"] > 0 for each in engines.values())
        assert "mean_length" not in engines["plain"]
        assert set(engines["k = 3"]["steps_by_drafts"]) == {"3"}
        assert set(engines["adaptive"]["steps_by_drafts"]) == {"0", "1", "3"}
    fixed = {load: engines["k = 3"]["mean_length"] for load, engines in loads.items()}
    assert fixed[2.2] == pytest.approx(2.2, abs=0.25)
    assert fixed["mixed"] == pytest.approx(1.5, abs=0.3)  # answers are equally long: three windows of 1 for one of 3
    assert 1.2 < fixed["switched"] < 2.8
    before, after = loads["switched"]["k = 3"]["tokens_per_s_of_halves"]
    assert after > 1.5 * before
    assert "of the best" in capsys.readouterr().out
