"""`bench health` against the real server with the mock engine."""

import json
import sys

import pytest

from bench.__main__ import main
from bench.serving import endpoint
from bench.serving.health import failures
from tests.serve.server_processes import SCRIPT


@pytest.mark.long
def test_a_run(tmp_path, monkeypatch):
    command = [sys.executable, "-c", SCRIPT, "serve", "mock", "--port", "0"]
    monkeypatch.setattr(endpoint, "server_command", lambda _model, _flags: command)
    out = tmp_path / "health.json"
    options = ["--only", "prompt: letters", "--random", "2", "--repeats", "1", "--most-ms", "5000"]
    assert main(["health", "--out", str(out), *options]) == 0
    (round_,) = json.loads(out.read_text())["rounds"]
    parts = round_["parts"]
    assert list(parts) == ["idle", "one at a time", "random", "at once"]
    assert parts["idle"]["health_requests"] > 20
    for part in parts.values():
        assert 0 < part["p50_ms"] <= part["p99_ms"] <= part["max_ms"]
    assert parts["one at a time"]["answers"] == {"400": 1}
    # The body itself is eight megabytes.
    assert 5 < parts["one at a time"]["most_mib"] < 200
    assert parts["one at a time"]["most_mib_by"] == "prompt: letters"


def test_what_fails():
    def part(p99: float, mib: float, status: str) -> dict:
        return {"p99_ms": p99, "most_mib": mib, "most_mib_by": "deep", "answers": {status: 1}}

    good, slow, big, bad = part(10, 10, "400"), part(60, 10, "400"), part(10, 300, "400"), part(10, 10, "500")
    rounds = [{"parts": {"one at a time": good, "at once": slow}}, {"parts": {"one at a time": slow, "random": big}}]
    assert failures(rounds, 50, 200) == [
        "round 2, one at a time: /health takes 60 ms at the 99th percentile",
        "round 2, random: 300 MiB for deep",
    ]
    assert failures([{"parts": {"at once": bad}}], 50, 200) == ["round 1, at once: answers [500]"]


def test_a_word_that_no_body_has(capsys):
    assert main(["health", "--only", "no such body"]) == 1
    assert "no body has that in its name" in capsys.readouterr().err
