"""`bench readout`: the arithmetic of idle time, and a whole run on a tiny model."""

import json
from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.readout import idle_part, idle_parts


def test_idle_part():
    assert idle_part([]) is None
    assert idle_part([(5, 9)]) == 0
    assert idle_part([(0, 2), (6, 8)]) == 0.5
    assert idle_part([(6, 8), (0, 2), (1, 3), (0, 1)]) == pytest.approx(3 / 8)  # overlapping, in any order
    assert idle_part([(0, 10), (2, 3)]) == 0


def test_idle_parts_of_a_trace():
    """Of the device only; lines that repeat the kernels under other names do not count as kernels."""

    def line(name, *spans):
        return SimpleNamespace(name=name, events=[SimpleNamespace(start_ns=a, duration_ns=b - a) for a, b in spans])

    gpu = SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("XLA Modules", (0, 40), (50, 100)),
            line("XLA Ops", (0, 100)),
            line("Stream #13(compute)", (0, 20), (50, 80)),
            line("Stream #14(memcpy)", (70, 100)),
        ],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("XLA Modules", (0, 100)), line("Stream #1", (0, 100))])
    parts = idle_parts(SimpleNamespace(planes=[host, gpu]))
    assert parts == {"idle_between_steps": 0.1, "idle_between_kernels": 0.3}
    assert idle_parts(SimpleNamespace(planes=[host])) == {"idle_between_steps": None, "idle_between_kernels": None}


@pytest.mark.full
def test_a_run_on_a_tiny_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    out = tmp_path / "readout.json"
    argv = ["readout", "--model", "tiny", "--rows", "4", "--context", "64", "--tokens", "6", "--depths", "0,2"]
    assert main([*argv, "--decodes", "3", "--prompt", "400", "--budget", "64", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [each["depth"] for each in result["depths"]] == [0, 2]
    assert all(each["time_per_output_token_ms"] > 0 for each in result["depths"])
    mixed, separate = result["long_prompt"]
    assert (mixed["mixed"], separate["mixed"]) == (True, False)
    assert result["compiles_after_warm_up"] == 0
    for kind in ("mixed", "separate"):
        assert "<svg" in (tmp_path / f"readout_{kind}.svg").read_text()
    assert "between two tokens" in capsys.readouterr().out
