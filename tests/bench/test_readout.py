"""`bench readout`: the arithmetic of idle time, and a whole run on a tiny model."""

import itertools
import json
from types import SimpleNamespace

import pytest

from bench.__main__ import main
from bench.harness.trace import KernelRun, in_launches
from bench.step.idle import idle_part, idle_parts


def test_idle_part():
    assert idle_part([]) is None
    assert idle_part([(5, 9)]) == 0
    assert idle_part([(0, 2), (6, 8)]) == 0.5
    assert idle_part([(6, 8), (0, 2), (1, 3), (0, 1)]) == pytest.approx(3 / 8)  # overlapping, in any order
    assert idle_part([(0, 10), (2, 3)]) == 0


def test_idle_parts_of_a_trace():
    """Of the device's kernels only; copies beside them are none, and a step's kernels are those of one launch."""

    def line(name, *kernels):
        return SimpleNamespace(
            name=name,
            events=[
                SimpleNamespace(start_ns=a, duration_ns=b - a, stats=[("correlation_id", launch), ("tf_op", "x")])
                for a, b, launch in kernels
            ],
        )

    gpu = SimpleNamespace(
        name="/device:GPU:0",
        lines=[
            line("Stream #13(Memset,Compute)", (0, 20, 1), (30, 40, 1), (50, 80, 2), (80, 100, 2)),
            line("Stream #14(MemcpyD2H)", (40, 50, 3)),
        ],
    )
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream #1(Compute)", (0, 100, 1))])
    trace = SimpleNamespace(planes=[host, gpu])
    assert idle_parts(trace, 2) == {"idle_between_steps": 0.1, "idle_between_kernels": 0.2}
    assert idle_parts(trace, 1) == {"idle_between_steps": None, "idle_between_kernels": 0.2}
    assert idle_parts(SimpleNamespace(planes=[host]), 2)["idle_between_kernels"] is None


def test_kernels_of_a_branch_are_of_the_launch_that_ran_them():
    """A branch's kernels have one number in all steps; a launch too many, which lies in no other, stays one."""
    graphs = [KernelRun(100 * i + start, 100 * i + start + 5, f"graph {i}") for i in range(3) for start in (10, 20, 90)]
    branches = [KernelRun(100 * i + start, 100 * i + start + 5, "7") for i in range(3) for start in (30, 50, 80)]
    found = list(in_launches(branches + graphs))
    assert [kernel[:2] for kernel in found] == [kernel[:2] for kernel in branches + graphs]
    assert [kernel.launch for kernel in found] == [f"graph {kernel.start // 100}" for kernel in branches + graphs]
    extra = KernelRun(95, 96, "extra")
    assert {kernel.launch for kernel in in_launches([*graphs, extra])} == {"graph 0", "graph 1", "graph 2", "extra"}


@pytest.mark.full
@pytest.mark.parametrize("drafts", [0, 2])
def test_a_run_on_a_tiny_model(drafts, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    out = tmp_path / "readout.json"
    argv = ["readout", "--model", "tiny", "--rows", "4", "--context", "64", "--tokens", "6", "--depths", "0,2"]
    argv += ["--decodes", "3,2", "--drafts", str(drafts), "--prompt", "400", "--budget", "64", "--out", str(out)]
    assert main(argv) == 0
    result = json.loads(out.read_text())
    assert [each["depth"] for each in result["depths"]] == [0, 2]
    assert all(each["time_per_output_token_ms"] > 0 for each in result["depths"])
    ran = [(each["decodes"], each["mixed"]) for each in result["long_prompt"]]
    assert ran == [(2, True), (2, False), (3, True), (3, False)]
    assert result["compiles_after_warm_up"] == 0
    for kind, decodes in itertools.product(("mixed", "separate"), (3, 2)):
        assert "<svg" in (tmp_path / f"readout_{kind}_{decodes}.svg").read_text()
    assert "between two tokens" in capsys.readouterr().out
