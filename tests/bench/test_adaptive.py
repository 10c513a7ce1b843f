"""`bench adaptive`: parts, the gate and the picture of made-up records, and a whole run of a tiny model: every engine runs
every load, and windows have the lengths that were asked for.
"""

import itertools
import json
import re
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from bench.__main__ import main
from bench.step import adaptive
from bench.step.adaptive import Sizes, Traffic

SVG = "{http://www.w3.org/2000/svg}"


def record(rows, loads, share=0.98, **given):
    """Of a run in which k = 3 is the best engine with a fixed number of drafts."""
    rates = {"plain": 80.0, "k = 1": 90.0, "k = 3": 100.0, "adaptive": 100 * share}
    engines = {name: {"tokens_per_s": rate} for name, rate in rates.items()}
    results = [
        {"requests": n, "load": load, "adaptive_of_best": share, "engines": engines}
        for n, load in itertools.product(rows, loads)
    ]
    return {
        "command": f"python -m bench adaptive --rows {rows}", "environment": {"device": "D", "commit": "c", "versions": {}},
        "benchmark": "adaptive", "model": "moonlight", "sizes": {"rows": 128}, "drafts": 3,
        "seconds_of_a_measurement": 2.0, "results": results,
    } | given  # fmt: skip


def merge(folder, *parts):
    files = [folder / f"part{i}.json" for i in range(len(parts))]
    for file, part in zip(files, parts, strict=True):
        file.write_text(json.dumps(part))
    return main(["adaptive", "--merge", *map(str, files), "--out", str(folder / "whole.json")])


@pytest.mark.parametrize(("share", "code"), [(0.97, 0), (0.9699, 1)])
def test_parts_become_one_record_that_is_judged(tmp_path, capsys, share, code):
    loads = [1.0, 3.0, "mixed"]
    assert merge(tmp_path, record([32, 128], loads), record([1], loads, share)) == code
    whole = json.loads((tmp_path / "whole.json").read_text())
    assert [(r["requests"], r["load"]) for r in whole["results"]] == list(itertools.product([1, 32, 128], loads))
    assert [part["environment"]["device"] for part in whole["parts"]] == ["D", "D"]
    gate = whole["gate"]
    assert (gate["worst"], gate["requests"], gate["loads"], gate["met"]) == (share, 1, 9, code == 0)
    assert ("NOT met" in capsys.readouterr().out) == (code == 1)
    picture = ElementTree.parse(tmp_path / "whole.svg").getroot()
    panels = picture.findall(f"{SVG}g")
    assert [panel.find(f"{SVG}text").text for panel in panels] == ["length 1.0", "length 3.0", "mixed"]
    for panel in panels:
        lines = {line.get("class"): line.get("points").split() for line in panel.findall(f"{SVG}polyline")}
        assert {name: len(points) for name, points in lines.items()} == dict.fromkeys(lines, 3)
        # Higher is faster; SVG counts downwards.
        heights = {name: float(points[0].split(",")[1]) for name, points in lines.items()}
        assert sorted(heights, key=heights.get) == ["k = 3", "adaptive", "k = 1", "plain"]


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (record([1], [1.0]), r"two parts have \(1, 1.0\)"),
        (record([2], [1.0], seconds_of_a_measurement=1.0), "of another run than .*: seconds_of_a_measurement"),
        (
            record([2], [1.0], environment={"device": "E", "commit": "c", "versions": {}}),
            "of another run than .*: device",
        ),
        (record([2], [1.0], benchmark="step"), "is no record of bench adaptive"),
    ],
)
def test_parts_of_different_runs_are_refused(tmp_path, capsys, second, message):
    assert merge(tmp_path, record([1], [1.0]), second) == 1
    assert not (tmp_path / "whole.json").exists()
    assert re.search(message, capsys.readouterr().err)


@pytest.mark.full
def test_loads_have_their_lengths(tmp_path, capsys, monkeypatch):
    out = tmp_path / "adaptive.json"
    kept = []

    def measure(*arguments, real=adaptive.measure):
        kept.append(len(json.loads(out.read_text())["results"]) if out.exists() else 0)
        return real(*arguments)

    monkeypatch.setattr(adaptive, "measure", measure)
    options = ["--model", "tiny", "--layers", "2", "--rows", "2", "--lengths", "2.2,mixed,switched", "--seconds", "1"]
    code = main(["adaptive", *options, "--repeats", "1", "--out", str(out)])
    assert out.with_suffix(".svg").exists()
    result = json.loads(out.read_text())
    assert code == (0 if result["gate"]["met"] else 1)
    assert kept == [0] * 4 + [1] * 3 + [2] * 3  # loads that the record had before each measurement
    assert {rows for of_bucket in result["step_ms"].values() for rows in of_bucket} == {"1", "2"}
    assert all(ms > 0 for of_bucket in result["step_ms"].values() for ms in of_bucket.values())
    loads = {each["load"]: each["engines"] for each in result["results"]}
    assert list(loads) == [2.2, "mixed", "switched"]
    for engines in loads.values():
        assert list(engines) == ["plain", "k = 1", "k = 3", "adaptive"]
        assert all(each["tokens_per_s"] > 0 for each in engines.values())
        assert "mean_length" not in engines["plain"]
        assert engines["plain"] == loads[2.2]["plain"]  # which has no drafts and ran once
        assert set(engines["k = 3"]["steps_by_drafts"]) == {"3"}
        assert set(engines["adaptive"]["steps_by_drafts"]) == {"0", "1", "3"}
    fixed = {load: engines["k = 3"]["mean_length"] for load, engines in loads.items()}
    assert fixed[2.2] == pytest.approx(2.2, abs=0.25)
    assert fixed["mixed"] == pytest.approx(1.5, abs=0.3)  # answers are equally long: three windows of 1 for one of 3
    assert 1.2 < fixed["switched"] < 2.8
    before, after = loads["switched"]["k = 3"]["mean_length_of_halves"]
    assert before == 1
    assert after == pytest.approx(3, abs=0.5)
    assert "of the best" in capsys.readouterr().out


def test_every_engine_has_the_same_luck():
    """The n-th request's seed decides what is accepted at each position, whatever an engine has given out before."""
    given = itertools.count(1000)
    seeds = []
    for _ in range(2):
        requests = []

        def add(request, requests=requests):
            request.seed = next(given)  # as an engine does
            requests.append(request)

        Traffic(SimpleNamespace(vocab_size=100, add=add), Sizes(3, 4, 4), 3, [1.5])
        seeds.append([request.seed for request in requests])
    assert seeds[0] == seeds[1] == [0, 1, 2]
