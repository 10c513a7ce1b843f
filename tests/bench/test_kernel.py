"""`bench kernel`: its arithmetic on invented numbers, its checks on wrong results, and tiny runs on a CPU."""

import json
import os
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.timing import rounds
from bench.harness.trace import kernel_seconds
from bench.kernel import gqa, kernel, report
from bench.kernel.arrays import largest_error
from bench.kernel.case import LARGEST_ERROR, Case
from bench.kernel.gqa import GqaDecode, GqaPrefill
from bench.kernel.kv_write import KV_WRITE
from bench.kernel.loop import Loop
from bench.kernel.mla import DECODE, MlaDecode, MlaPrefill
from bench.kernel.mla_query import MLA_QUERY
from bench.kernel.moe import MOE, Moe
from bench.kernel.row_write import ROW_WRITE
from bench.kernel.sparse import crossover
from pallas_kernels.backend import logger

CEILINGS = {"read_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14}


@pytest.fixture(autouse=True)
def process_is_left_as_it_was(monkeypatch):
    """The command adds to the flags, asks torch's neighbour not to take all memory, and listens to the log."""
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers = handlers


def test_the_rows_are_those_of_the_sheet():
    assert len(DECODE["all"]) == len({tuple(case.label.values()) for case in DECODE["all"]}) == 36
    assert all(len(rows) == 3 for rows in kernel.OPERATIONS.values())


def test_bytes_and_flops():
    decode = MlaDecode(2, 128, 16, 1)
    assert (decode.bytes, decode.flops) == (1152 * 256, 2176 * 16 * 256)
    # The first of two tokens does not see the last key.
    assert MlaDecode(1, 128, 16, 2).flops == 2176 * 16 * (128 + 127)
    gqa = GqaDecode(2, 128, 8, 4, 64, 1)
    assert (gqa.bytes, gqa.flops) == (2 * 2 * 8 * 64 * 256, 4 * 64 * 32 * 256)
    assert GqaPrefill(4, 10, 2, 3, 64).flops == 4 * 64 * 6 * (11 + 12 + 13 + 14)
    assert MlaPrefill(4, 10).flops == 640 * 16 * (11 + 12 + 13 + 14)
    assert Moe(1).bytes == 6 * 3 * 2048 * 1408 * 2
    routes = Moe(32).routes(0)
    assert all(len(set(row)) == 6 for row in routes.tolist())


def test_figures_of_a_row():
    case = MlaDecode(32, 4096, 16, 1)
    row = report.figures(case, {"ours": 50.0, "flashmla": 52.7, "fa3_0": 48.9, "fa3_32": 40.0}, 45.0, CEILINGS)
    assert (row["flashmla_us"], row["fa3_us"], row["fa3_variant"]) == (52.7, 40.0, "fa3_32")
    assert (row["better_peer"], row["ratio"]) == ("fa3_32", 1.25)
    assert row["GB_per_s"] == pytest.approx(1152 * 32 * 4096 / 50e-6 / 1e9, abs=0.01)
    assert row["percent_of_read"] == pytest.approx(100 * row["GB_per_s"] / 4000, abs=0.01)
    assert row["percent_of_matmul"] == pytest.approx(100 * row["TFLOP_per_s"] / 700, abs=0.01)
    alone = report.figures(case, {"ours": 50.0}, None, CEILINGS)
    assert "ratio" not in alone
    assert alone["ours_device_us"] is None


def test_summary_leaves_out_what_failed_or_is_wrong():
    def row(heads, ratio, **more):
        return {"B": 1, "S": 64, "H": heads, "Q": 1, "ratio": ratio} | more

    rows = [
        row(16, 0.5),
        row(16, 2.0),
        row(128, 1.0),
        row(16, 9.0, wrong=["fa3_0"]),
        row(128, 9.0, error="x"),
        {"error": "y"},
    ]
    found = report.summary(rows)
    assert (found["rows"], found["failed"], found["wrong"], found["rows_compared"]) == (6, 2, 1, 3)
    assert found["geometric_mean_ratio"] == 1.0
    assert (found["worst_H16"]["ratio"], found["worst_H128"]["ratio"]) == (2.0, 1.0)
    assert "geometric_mean_ratio" not in report.summary([{"error": "y"}])


def test_one_wrong_vector_does_not_hide():
    true = np.ones((1000, 4))
    computed = true.copy()
    computed[7] *= 1.1
    assert largest_error(computed, true) == pytest.approx(0.1)
    computed[8, 1] = np.nan
    assert np.isnan(largest_error(computed, true))


def test_crossover_of_sparse_and_dense_attention():
    """From the context on from which no measured one is slower."""

    def rows(sparse, dense, **more):
        both = (({"N": 64}, sparse), ({"Q": 1}, dense))
        return [
            {"B": 32, "S": 1024 * n, "H": 128, "ours_us": us} | kind | more
            for kind, times in both
            for n, us in enumerate(times, 1)
        ]

    assert crossover(rows([9, 9, 9], [5, 10, 15])) == {"sparse_faster_from": 2048}
    assert crossover(rows([4, 11, 9], [5, 10, 15])) == {"sparse_faster_from": 3072}
    assert crossover(rows([4, 4, 4], [5, 10, 15])) == {"sparse_faster_from": 1024}
    assert crossover(rows([9, 9, 15], [5, 8, 15])) == {"sparse_faster_from": None}
    failed = {"B": 32, "S": 3072, "H": 128, "N": 64, "error": "none"}
    assert crossover([failed, *rows([9, 9], [5, 10, 15])]) == {"sparse_faster_from": 2048}
    for other in (rows([9], []), rows([], [5]), rows([1], [5], B=8), rows([1], [5], H=64)):
        assert crossover(other) == {}


def test_turns_and_medians():
    order = []

    def timer(name, values):
        left = iter(values)
        return lambda launches: order.append((name, launches)) or next(left)

    first, second = timer("a", [70, 1, 71, 9, 72, 2]), timer("b", [80, 4, 81, 3, 82, 8])
    assert rounds({"a": (first, 5), "b": (second, 6)}, 3) == {"a": 2, "b": 4}
    assert order == [("a", 5), ("a", 5), ("b", 6), ("b", 6)] * 3


def test_kernel_seconds_of_a_trace():
    def line(name, **durations):
        events = [SimpleNamespace(name=kernel[0], duration_ns=d) for kernel, d in durations.items()]
        return SimpleNamespace(name=name, events=events)

    of_gpu = line("XLA Modules", a=90), line("Stream #13(compute)", a1=20, b=30, a2=5), line("Stream #14", b=1)
    gpu = SimpleNamespace(name="/device:GPU:0", lines=of_gpu)
    host = SimpleNamespace(name="/host:CPU", lines=[line("Stream #1", a=1000)])
    assert kernel_seconds(SimpleNamespace(planes=[host, gpu])) == pytest.approx({"a": 25e-9, "b": 31e-9})


# Or whose rows count bytes alone.
WITHOUT_MATMULS = {
    "gated_delta",
    "gated_delta_prompts",
    "gqa_write",
    "kv_write",
    "norm_linear",
    "row_write",
    "sampling",
}


@pytest.mark.long
@pytest.mark.parametrize(
    "operation",
    [
        "mla_decode",
        pytest.param("mla_decode_fp8", marks=pytest.mark.full),
        "mla_prefill",
        "gqa_decode",
        "gqa_prefill",
        "gqa_write",
        "gated_delta",
        "gated_delta_prompts",
        "kv_write",
        "mla_query",
        "sparse_mla",
        "norm_linear",
        "moe",
        pytest.param("moe_int4", marks=pytest.mark.full),
        "moe_fp8",
        "row_write",
        "sampling",
    ],
)
def test_a_tiny_run(operation, tmp_path, capsys):
    out = tmp_path / "kernel.json"
    assert main(["kernel", operation, "--rows", "tiny", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {"environment", "command", "ceilings", "summary", "backend", "implementations"} <= set(result)
    assert result["summary"] == {"rows": len(result["rows"]), "failed": 0, "wrong": 0}
    for row in result["rows"]:
        assert row["ours_us"] > 0
        # XLA on a CPU sums that matmul's products in less than float32.
        assert row["errors"]["float64"] < (LARGEST_ERROR if operation == "mla_query" else 0.01)
        assert ("TFLOP_per_s" in row) == (operation not in WITHOUT_MATMULS)
        assert ("GB_per_s" in row) == (operation not in ("mla_prefill", "gqa_prefill"))
    assert "ceilings" in capsys.readouterr().out


@pytest.mark.parametrize(
    "case",
    [
        DECODE["tiny"][1],
        pytest.param(gqa.DECODE["tiny"][1], marks=pytest.mark.slow),
        pytest.param(gqa.PREFILL["tiny"][1], marks=pytest.mark.slow),
        MOE["tiny"][1],
        KV_WRITE["tiny"][1],
        ROW_WRITE["tiny"][1],
        MLA_QUERY["tiny"][0],
    ],
)
def test_wrong_results_are_found(case: Case):
    loop = Loop(case, case.lower().compile())
    assert case.error(loop.inputs, loop.launch_into_poison()) < 0.01
    results = loop.results if isinstance(loop.results, list) else [loop.results]
    unwritten = [jnp.full_like(array, case.fill) for array in results]
    error = case.error(loop.inputs, unwritten if isinstance(loop.results, list) else unwritten[0])
    assert not error <= LARGEST_ERROR


def test_a_row_that_fails_does_not_stop_the_others(monkeypatch, tmp_path):
    good = DECODE["tiny"][0]

    class Broken(MlaDecode):
        def many(self, *_arguments):
            raise ValueError("no such shape")

    class Wrong(MlaDecode):
        def many(self, inputs, results):
            return [1.5 * each for each in super().many(inputs, results)]

    size = (good.B, good.S, good.H, good.Q, good.calls)
    monkeypatch.setitem(kernel.OPERATIONS["mla_decode"], "tiny", [Broken(*size), Wrong(*size), good])
    out = tmp_path / "kernel.json"
    assert main(["kernel", "mla_decode", "--rows", "tiny", "--out", str(out)]) == 1
    broken, wrong, fine = json.loads(out.read_text())["rows"]
    assert broken["error"] == "ValueError: no such shape"
    assert wrong["wrong"] == ["float64"]
    assert not {"error", "wrong"} & set(fine)


def test_a_backend_that_cannot_run_is_the_rows_error(tmp_path, monkeypatch):
    monkeypatch.setitem(kernel.OPERATIONS["mla_decode"], "tiny", DECODE["tiny"][:1])
    out = tmp_path / "kernel.json"
    code = main(["kernel", "mla_decode", "--rows", "tiny", "--backend", "mosaic", "--out", str(out)])
    rows = json.loads(out.read_text())["rows"]
    # Until an operation has such a kernel it takes no notice of the choice.
    assert code == int(any("error" in row for row in rows))


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ([], "needs --peer-libs FOLDER"),
        (["--peer-libs", "/nowhere"], "--peer-libs /nowhere lacks /nowhere/vllm/_flashmla_C.abi3.so"),
    ],
)
def test_peers_that_are_not_there(flags, reason, capsys):
    assert main(["kernel", "mla_decode", "--rows", "tiny", "--peers", "flashmla,fa3", *flags]) == 1
    assert reason in capsys.readouterr().err


def test_peers_that_cannot_be_loaded(tmp_path, capsys):
    library = tmp_path / "vllm" / "_flashmla_C.abi3.so"
    library.parent.mkdir()
    library.write_text("not a library")
    assert main(["kernel", "mla_decode", "--rows", "tiny", "--peers", "flashmla", "--peer-libs", str(tmp_path)]) == 1
    assert f"--peer-libs {tmp_path} cannot be loaded" in capsys.readouterr().err


def test_peers_are_for_one_operation_and_by_name(capsys):
    assert main(["kernel", "moe", "--peers", "fa3"]) == 1
    assert "not for moe" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["kernel", "mla_decode", "--peers", "flash"])
    assert "there are flashmla, fa3" in capsys.readouterr().err


class FakePeers:
    """FlashMLA always takes 1 microsecond and is right; FA3 has two variants, or fails."""

    names = ("flashmla", "fa3")

    def __init__(self, fa3_fails):
        self.fa3_fails = fa3_fails

    def release(self):
        pass

    def record(self, name, case, inputs):
        outputs = case.many(inputs, None)
        if name == "flashmla":
            return {name: SimpleNamespace(calls=case.calls, time=lambda _: 1e-6, outputs=outputs)}
        if self.fa3_fails:
            raise RuntimeError("no kernel\nfor this")
        half = [output / 2 for output in outputs]
        return {
            "fa3_0": SimpleNamespace(calls=case.calls, time=lambda _: 3e-6, outputs=outputs),
            "fa3_32": SimpleNamespace(calls=case.calls, time=lambda _: 2e-6, outputs=half),
        }

    def error(self, results, others):
        return max(largest_error(np.float64(a), np.float64(b)) for a, b in zip(results, others, strict=True))


def test_a_row_beside_peers():
    case = DECODE["tiny"][0]
    executable = case.lower().compile()
    row = kernel.measure(case, executable, FakePeers(fa3_fails=False), CEILINGS)
    assert (row["flashmla_us"], row["fa3_us"], row["better_peer"]) == (1.0, 2.0, "flashmla")
    assert row["ratio"] == pytest.approx(row["ours_us"], rel=1e-3)
    # Whom a wrong one differs from tells which one it is.
    assert row["wrong"] == ["fa3_32", "fa3_32 to flashmla", "fa3_32 to fa3_0"]
    assert row["errors"]["float64"] < 0.01
    row = kernel.measure(case, executable, FakePeers(fa3_fails=True), CEILINGS)
    assert row["error"] == "fa3: RuntimeError: no kernel for this"
    assert row["ours_us"] > 0
    assert "wrong" not in row
