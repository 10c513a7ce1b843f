"""`bench timeline` on synthetic step logs: what is drawn, what it comes to, and which lines are refused."""

import json
import re
import time
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.latency import summary, time_per_output_token, token_gaps
from bench.step.step_log import StepLogError, parse_steps
from bench.step.timeline import cut, summarise
from bench.step.timeline_svg import COLOURS, draw

NS = {"svg": "http://www.w3.org/2000/svg"}
# r1's prompt comes in two chunks beside r0's windows; the last two steps overlap, as with late readout.
LOG = [
    {
        "step": 0, "start": 1.0, "end": 1.02, "bucket": "prefill 64x4, decode 8, full", "host_ms": 1.0, "device_ms": 18.0,
        "prefill": [{"request": "r0", "start": 0, "tokens": 50, "final": True, "emitted": 1}],
        "decode": [], "waiting": 1,
    },
    {
        "step": 1, "start": 1.03, "end": 1.05, "bucket": "prefill 64x4, decode 8, full", "host_ms": 1.0, "device_ms": 19.0,
        "prefill": [{"request": "r1", "start": 0, "tokens": 64, "final": False, "emitted": 0}],
        "decode": [{"request": "r0", "emitted": 3, "accepted": 2}], "waiting": 0,
    },
    {
        "step": 2, "start": 1.06, "end": 1.08, "bucket": "prefill 64x4, decode 8, lean", "host_ms": 1.0, "device_ms": 18.0,
        "prefill": [{"request": "r1", "start": 64, "tokens": 6, "final": True, "emitted": 1}],
        "decode": [{"request": "r0", "emitted": 1, "accepted": 0}], "waiting": 0,
    },
    {
        "step": 3, "start": 1.07, "end": 1.09, "bucket": "decode 8, <lean> & \"fast\"", "host_ms": 5.0, "device_ms": 9.0,
        "prefill": [], "waiting": 0,
        # r0 stops inside its window: of three accepted drafts it keeps two.
        "decode": [{"request": "r0", "emitted": 2, "accepted": 3}, {"request": "r1", "emitted": 2, "accepted": 1}],
    },
]  # fmt: skip


def steps_of(log):
    return list(parse_steps(map(json.dumps, log), "log"))


def pieces(svg: ET.Element, colour: str) -> int:
    return sum(path.get("d").count("M") for path in svg.findall(f".//svg:path[@class='{colour}']", NS))


def test_each_token_counts():
    """Chunks of 2, 3 and 1 tokens at 1.0, 1.6 and 2.0 s: gaps of 0, three times 0.2, and 0.4."""
    times, counts = [1.0, 1.6, 2.0], [2, 3, 1]
    gaps = token_gaps(times, counts)
    assert gaps.tolist() == pytest.approx([0, 0.2, 0.2, 0.2, 0.4])
    assert time_per_output_token(times, counts) == pytest.approx(gaps.mean()) == pytest.approx(0.2)
    # Sorted, the value at 99 % of the way from the first to the fifth: 0.2 + 0.96 * 0.2.
    assert summary(gaps) == {"mean": 200.0, "p50": 200.0, "p99": 392.0}
    assert token_gaps([], []).tolist() == token_gaps([3.0], [1]).tolist() == []
    assert token_gaps([3.0], [2]).tolist() == [0]
    assert time_per_output_token([3.0], [1]) is time_per_output_token([], []) is None
    assert summary([]) is None
    assert summary([0.5]) == {"mean": 500.0, "p50": 500.0, "p99": 500.0}


def test_percentiles_of_a_hundred():
    assert summary(np.arange(101) / 1000) == {"mean": 50.0, "p50": 50.0, "p99": 99.0}


def test_what_a_log_comes_to():
    result = summarise(steps_of(LOG))
    assert (result["steps"], result["requests"], result["prompt_tokens"]) == (4, 2, 120)
    assert (result["tokens"], result["accepted"]) == (10, 5)
    assert (result["host_ms"], result["device_ms"]) == (2.0, 16.0)
    # 20 ms of 90 ms lie between the steps; the last step counts from the end of the third.
    assert result["seconds"] == pytest.approx(0.09)
    assert result["idle_part"] == pytest.approx(2 / 9)
    # r0: 3 x 10, 30, 2 x 5 ms; r1: 2 x 5 ms.
    assert result["latency_ms"]["all requests"] == summary([0.01, 0.01, 0.01, 0.03, 0.005, 0.005, 0.005, 0.005])
    assert result["latency_ms"]["steps with a prefill"] == summary([0.01, 0.01, 0.01, 0.03])
    assert result["latency_ms"]["steps without"] == summary([0.005] * 4)


def test_groups_and_cuts():
    groups = summarise(steps_of(LOG), re.compile("r[1-9]"))["latency_ms"]
    assert groups["r1"] == summary([0.005, 0.005])
    assert groups[""] == summary([0.01, 0.01, 0.01, 0.03, 0.005, 0.005])  # r0 has no match
    steps = steps_of(LOG)
    assert [s.number for s in cut(steps, 1.04, 1.07)] == [1, 2]
    assert [s.number for s in cut(steps, None, 1.02)] == [0]
    assert [s.number for s in cut(steps, 1.08, None)] == [3]


def test_the_picture(tmp_path, capsys):
    log, out = tmp_path / "steps.jsonl", tmp_path / "a" / "picture.svg"
    log.write_text("".join(json.dumps(line) + "\n" for line in LOG))
    assert main(["timeline", str(log), "--out", str(out)]) == 0
    svg = ET.parse(out).getroot()
    lanes = svg.findall("svg:g[@class='lane']", NS)
    assert [lane.get("data-request") for lane in lanes] == ["r0", "r1"]
    assert lanes[0].find("svg:title", NS).text == "r0: 50 prompt tokens, 7 tokens (4 of them drafted)"
    assert pieces(svg, "prefill") == 3
    assert pieces(svg, "own") == 3  # r0's window that was cut off emitted drafts only
    assert pieces(svg, "accepted") == 3
    for name, colour in COLOURS.items():
        assert {p.get("stroke") for p in svg.findall(f".//svg:path[@class='{name}']", NS)} == {colour}
    titles = [t.text for t in svg.findall("svg:g[@class='steps']/svg:rect/svg:title", NS)]
    assert len(titles) == 4
    assert titles[3] == 'step 3: decode 8, <lean> & "fast"; 20.00 ms; host 5.00 ms; device 9.00 ms; 0 waiting'
    rects = [(float(r.get("x")), float(r.get("width"))) for r in svg.findall("svg:g[@class='steps']/svg:rect", NS)]
    plot = 1600 - 120 - 24
    assert rects[0] == pytest.approx((120, plot * 2 / 9), abs=0.01)
    assert rects[3] == pytest.approx((120 + plot * 8 / 9, plot / 9), abs=0.01)  # drawn from the end of the third
    ticks = [t.text for t in svg.findall("svg:g[@class='axis']/svg:text", NS)]
    assert ticks == [*map(str, range(0, 91, 10)), "ms"]  # the engine had run for a second before
    legend = " ".join(t.text for t in svg.findall("svg:g[@class='legend']/svg:text", NS))
    assert all(word in legend for word in ("prompt", "own", "accepted", "steps"))
    shown = capsys.readouterr().out
    assert "4 steps in 0.090 s, host 2.00 ms and device 16.00 ms a step (means), idle 22.2%" in shown
    assert f"wrote {out}" in shown


def test_the_picture_has_the_logs_name_by_default(tmp_path, capsys, monkeypatch):
    log = tmp_path / "logs" / "steps.jsonl"
    log.parent.mkdir()
    log.write_text("".join(json.dumps(line) + "\n" for line in LOG))
    monkeypatch.chdir(tmp_path)
    assert main(["timeline", str(log)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "wrote steps.svg"
    assert ET.parse(tmp_path / "steps.svg").getroot().findall("svg:g[@class='lane']", NS)
    # Times of a cut are those of the picture: the third step ends 80 ms after the first has begun, and the last 90.
    assert main(["timeline", str(log), "--from", "0.085", "--to", "1"]) == 0
    assert "1 steps in 0.010 s" in capsys.readouterr().out
    assert main(["timeline", str(log), "--out", str(log)]) == 1
    assert "must be another file than the log" in capsys.readouterr().err
    assert main(["timeline", str(log), "--out", str(log / "x.svg")]) == 1
    assert f"error: cannot write {log / 'x.svg'}: " in capsys.readouterr().err


def test_green_is_the_drafted_part():
    svg = ET.fromstring(draw(steps_of(LOG[1:2]), 1.0, 1.1))
    (own,), (accepted,) = (svg.findall(f".//svg:path[@class='{name}']", NS) for name in ("own", "accepted"))
    assert float(accepted.get("stroke-width")) == pytest.approx(2 * float(own.get("stroke-width")), abs=0.02)


def test_hostile_names_stay_text():
    line = LOG[0] | {"bucket": "\x00\ud800]]>", "prefill": [LOG[0]["prefill"][0] | {"request": "<script>\"'&\x07\n"}]}
    svg = ET.fromstring(draw(steps_of([line]), 1.0, 1.1).encode("utf-8"))
    assert not svg.findall(".//svg:script", NS)
    assert svg.find("svg:g[@class='lane']", NS).get("data-request").startswith("<script>\"'&\ufffd")


@pytest.mark.long
def test_ten_thousand_steps(tmp_path, capsys):
    """Seconds and megabytes, not minutes and hundreds of them; a cut of it is small."""
    log, out = tmp_path / "steps.jsonl", tmp_path / "picture.svg"
    with log.open("w") as file:
        for i in range(10_000):
            rows = [
                {"request": f"r{i // 500 * 8 + j}", "emitted": 1 + (i + j) % 4, "accepted": (i + j) % 4}
                for j in range(8)
            ]
            line = {"step": i, "start": i / 100, "end": (i + 1) / 100, "bucket": "decode 8, lean", "host_ms": 1,
                    "device_ms": None, "prefill": [], "decode": rows, "waiting": 0}  # fmt: skip
            file.write(json.dumps(line) + "\n")
    began = time.process_time()
    assert main(["timeline", str(log), "--out", str(out)]) == 0
    assert time.process_time() - began < 20
    assert out.stat().st_size < 8e6
    assert len(ET.parse(out).getroot().findall("svg:g[@class='lane']", NS)) == 160
    assert "device not measured" in capsys.readouterr().out
    assert main(["timeline", str(log), "--out", str(out), "--from", "10", "--to", "10.2"]) == 0
    svg = ET.parse(out).getroot()
    assert len(svg.findall("svg:g[@class='steps']/svg:rect", NS)) == 20
    assert len(svg.findall("svg:g[@class='lane']", NS)) == 8
    assert pieces(svg, "own") == 160
    assert main(["timeline", str(log), "--out", str(out), "--from", "200"]) == 1
    assert "between 0 and 100 s" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("", "not JSON"),
        ("[1]", "the line must be an object, got [1]"),
        ({"start": None}, "start must be a number of at least 0, got None"),
        ({"start": float("nan")}, "start must be a number"),
        ({"start": True}, "start must be a number"),
        ({"end": 0.5}, "end (0.5) is before start (1)"),
        ({"bucket": 5}, "bucket must be a text, got 5"),
        ({"waiting": 1.5}, "waiting must be a whole number"),
        ({"decode": {}}, "decode must be a list"),
        ({"decode": [5]}, "a row of decode must be an object"),
        ({"decode": [{"request": "r0", "emitted": 1}]}, "accepted is missing"),
        ({"prefill": [{"request": 3, "tokens": 1, "emitted": 0}]}, "request must be a text"),
        ({"device_ms": -1}, "device_ms must be a number"),
        ({"start": 0.5, "end": 0.9}, "ends at 0.9 s, before the one above it (1.02 s)"),
    ],
)
def test_bad_lines_are_named(tmp_path, capsys, line, message):
    bad = line if isinstance(line, str) else json.dumps(LOG[0] | line)
    with pytest.raises(StepLogError) as caught:
        list(parse_steps([json.dumps(LOG[0]), bad], "steps.jsonl"))
    assert str(caught.value).startswith("steps.jsonl, line 2: ")
    assert message in str(caught.value)
    log = tmp_path / "steps.jsonl"
    log.write_text(json.dumps(LOG[0]) + "\n" + bad + "\n")
    assert main(["timeline", str(log), "--out", str(tmp_path / "x.svg")]) == 1
    assert f"error: {log}, line 2: " in capsys.readouterr().err
    assert not (tmp_path / "x.svg").exists()


def test_a_log_that_is_not_there_or_empty(tmp_path, capsys):
    log = tmp_path / "steps.jsonl"
    assert main(["timeline", str(log), "--out", str(tmp_path / "x.svg")]) == 1
    assert "cannot read" in capsys.readouterr().err
    log.write_text("")
    assert main(["timeline", str(log), "--out", str(tmp_path / "x.svg")]) == 1
    assert "holds no steps" in capsys.readouterr().err


def test_flags_behind_dashes_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["timeline", "x", "--out", "y", "--", "--max-num-seqs", "4"])
    assert "does not accept flags after --" in capsys.readouterr().err
