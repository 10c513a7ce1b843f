"""`bench comm` on CPU devices, where XLA alone makes sums."""

import json

import jax
import pytest
from jax import lax

from bench.__main__ import main
from bench.kernel import comm


def test_a_tiny_run(tmp_path, capsys):
    out = tmp_path / "comm.json"
    assert main(["comm", "--bytes", "4096,8192", "--sums", "2", "--out", str(out)]) == 0
    record = json.loads(out.read_text())
    assert [row["bytes"] for row in record["rows"]] == [4096, 8192]
    for row in record["rows"]:
        assert row["xla_us"] > 0
        assert row["two_phase_us"] > 0
        assert "GPU" in row["peer_memory"]
    assert record["gates"] == []
    assert "two_phase_us" in capsys.readouterr().out


def test_a_wrong_sum_is_no_time(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(comm, "WAYS", {"halved": lambda part, _: lax.psum(part, comm.AXIS) * 0.5})
    assert main(["comm", "--bytes", "4096", "--sums", "2", "--out", str(tmp_path / "comm.json")]) == 1
    assert "halved sums 4096 bytes wrong" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("devices", "size", "message"), [(1, "4096", "several devices"), (4, "5000", "multiple of 4096")]
)
def test_what_cannot_be_measured(devices, size, message, monkeypatch, tmp_path, capsys):
    there = jax.devices()
    monkeypatch.setattr(jax, "devices", lambda: there[:devices])
    assert main(["comm", "--bytes", size, "--out", str(tmp_path / "comm.json")]) == 1
    assert message in capsys.readouterr().err


def test_gates_are_of_our_kernel_at_their_sizes():
    rows = [
        {"bytes": 4096, "xla_us": 15.0, "peer_memory_us": 7.9},
        {"bytes": 1 << 17, "xla_us": 15.0, "peer_memory_us": 9.1},
        {"bytes": 1 << 16, "xla_us": 15.0, "peer_memory_us": 99.0},
        {"bytes": 1 << 19, "xla_us": 15.0, "peer_memory": "it cannot"},
    ]
    assert [(gate["us"], gate["bound"], gate["met"]) for gate in comm.gates(rows)] == [
        (7.9, 8.0, True),
        (9.1, 9.0, False),
    ]
