"""`bench events`: a short run of few streams."""

import json

import pytest

from bench.__main__ import main


@pytest.mark.slow
def test_a_run(tmp_path, capsys):
    out = tmp_path / "events.json"
    options = ["--streams", "2", "--step-ms", "2", "--seconds", "0.3", "--repeats", "1", "--out", str(out)]
    assert main(["events", *options]) == 0
    results = json.loads(out.read_text())["results"]
    assert [(each["endpoint"], each["streams"]) for each in results] == [("completions", 2), ("chat", 2)]
    for each in results:
        assert each["step_ms"] > 1.9  # one step more or less may end in the time
        assert 0 < each["engine_thread_us"] < 1e6
        assert 0 < each["loop_us"] < 1e6
    assert "event loop, us" in capsys.readouterr().out
