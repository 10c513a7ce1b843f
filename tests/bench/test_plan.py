"""`bench plan`: what it says of one GPU is what was measured there, and its tables are those of the documentation."""

import dataclasses
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.models import Weights, declare, random_config
from bench.harness.record import RESULTS
from bench.step import predict
from bench.step.floor import routed_experts, touched_share
from bench.step.plan import CASES, CONTEXT, DEVICES, ROWS, Case, figures, memory_table, parts_table, step_table, tables
from bench.step.sizes import Sizes
from bench.step.step import add_expected
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import quantised
from jaxspec.models.registry import read_config
from pallas_kernels.quant.schemes import SCHEMES

PAGE = Path(__file__).parents[2] / "docs" / "large-models.md"


@pytest.mark.long
def test_tables_of_the_documentation():
    """The lines of one case; all of them with `-m full`."""
    found = figures(Case("deepseek-v3", "fp8"), DEVICES, ROWS, CONTEXT)
    text = PAGE.read_text(encoding="utf-8")
    for table in (memory_table(found), step_table(found, CONTEXT), parts_table(found[-1:])):
        header, *lines = table.splitlines()
        assert header in text
        for line in lines[1:]:
            assert f"\n{line}\n" in text


@pytest.mark.full
def test_all_tables_of_the_documentation():
    text = PAGE.read_text(encoding="utf-8")
    for table in tables(CASES, DEVICES, ROWS, CONTEXT):
        assert f"\n{table}\n" in text


def test_steps_of_one_gpu_are_the_measured_ones():
    """The Moonlight shape in bfloat16, at the row counts of the record: plain steps and cycles."""
    measured = {row["rows"]: row for row in json.loads((RESULTS / "step_vllm_h200.json").read_text())["rows"]}
    model, nextn = declare(random_config("moonlight"), np.dtype(jnp.bfloat16))
    assert nextn is not None
    steps = predict.steps(model, measured, CONTEXT, 1)
    cycles = predict.cycles(model, nextn, measured, CONTEXT, 1)
    for rows, row in measured.items():
        assert 1e3 * steps[rows].seconds == pytest.approx(row["step_ms"], rel=0.03)
        assert 1e3 * cycles[rows].seconds == pytest.approx(row["cycle"]["step_ms"], rel=0.03)
        assert steps[rows].sums == cycles[rows].sums == 0


def test_records_have_what_was_expected():
    """Of a run of `bench step` on H200s, beside what it measured."""
    model, nextn = declare(random_config("moonlight"), np.dtype(jnp.bfloat16))
    sizes = Sizes(rows=(1, 32), context=CONTEXT, steps=4, loops=(4, 4), budget=8192, tokens=predict.DRAFTED)
    rows = [{"rows": n, "cycle": {}} for n in sizes.rows]
    add_expected(rows, Weights(model, {}, (nextn, {})), sizes, 2)
    for row in rows:
        n = row["rows"]
        assert row["expected_ms"] == pytest.approx(1e3 * predict.steps(model, [n], CONTEXT, 2)[n].seconds, rel=1e-3)
        assert row["cycle"]["expected_ms"] == pytest.approx(
            1e3 * predict.cycles(model, nextn, [n], CONTEXT, 2)[n].seconds, rel=1e-3
        )
        assert row["cycle"]["expected_ms"] > row["expected_ms"]
    without = [{"rows": 1, "cycle": {}}]
    add_expected(without, Weights(model, {}, (nextn, {})), dataclasses.replace(sizes, tokens=1), 1)
    assert "expected_ms" not in without[0]["cycle"]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=str)
def test_records_of_every_scheme_have_what_was_expected(scheme):
    """A mixture whose experts are stored so: a step is expected to be shorter, as its bytes are fewer."""
    rows, found = (1, 128), {}
    sizes = Sizes(rows=rows, context=CONTEXT, steps=4, loops=(4, 4), budget=8192, tokens=predict.DRAFTED)
    for stored in (None, scheme):
        modules = declare(random_config("moonlight", 2), np.dtype(jnp.bfloat16))
        for module, layer in zip(modules, (("layers", 1), ("layer",)), strict=True):
            assert module is not None
            if stored:
                quantised(module, {(*layer, "mlp", name): stored for name in ("gate_up", "down")})
        model, nextn = modules
        found[stored] = [{"rows": n, "cycle": {}} for n in rows]
        add_expected(found[stored], Weights(model, {}, (nextn, {})), sizes, 1)
    for ours, wide in zip(found[scheme], found[None], strict=True):
        assert 0 < ours["expected_ms"] < wide["expected_ms"]
        assert 0 < ours["cycle"]["expected_ms"] < wide["cycle"]["expected_ms"]


def test_sums_and_parts_over_devices():
    """More devices read less, tell each other more, and launch as much."""
    model, _ = declare(random_config("moonlight"), np.dtype(jnp.bfloat16))
    one, two, four = (predict.steps(model, [32], CONTEXT, n)[32] for n in (1, 2, 4))
    assert one.products > two.products > four.products > one.products / 4
    assert one.sums < two.sums < four.sums
    assert one.rest == two.rest == four.rest
    # One latent serves all heads.
    assert one.attention == two.attention == four.attention


def moe_of(name: str) -> MoESpec:
    moe = routed_experts(read_config(random_config(name)))
    assert moe is not None
    return moe


def test_the_busiest_of_two_devices():
    """Of one token's experts the busier one has the mean of max(x, k - x), x hypergeometric."""
    moe = moe_of("moonlight")
    E, k, half = moe.num_experts, moe.top_k, moe.num_experts // 2
    exact = sum(max(x, k - x) * math.comb(half, x) * math.comb(half, k - x) for x in range(k + 1)) / math.comb(E, k)
    assert touched_share(moe, 1, 2) * half == pytest.approx(exact, rel=0.01)


def test_the_busiest_of_several_devices():
    """It has at least the mean; groups put a token's experts closer together; many tokens reach all."""
    grouped = moe_of("deepseek-v3")
    free = dataclasses.replace(grouped, num_groups=1, top_groups=1)
    for tokens in (1, 32):
        shares = [touched_share(free, tokens, n) for n in (1, 2, 8)]
        assert shares == sorted(shares)
        assert touched_share(grouped, tokens, 8) > shares[-1]
    assert touched_share(grouped, 4096, 8) == 1


def test_layers_that_fit_fit():
    """With one more there is no room."""
    case, tokens = Case("deepseek-v3", "int4"), 128 * CONTEXT
    (found,) = figures(case, (1,), ROWS, CONTEXT)
    few, more = (
        predict.memory(*case.declare(n), devices=1, max_num_seqs=ROWS[-1]) for n in (found.layers, found.layers + 1)
    )
    assert few.kv_tokens >= tokens > more.kv_tokens
    assert 2 < found.layers < 61


def test_plan_of_one_model(tmp_path, capsys):
    out = tmp_path / "plan.json"
    words = ["plan", "--model", "moonlight", "--kv-cache-dtype", "fp8", "--rows", "1,32", "--out", str(out)]
    assert main([*words, "--tensor-parallel-size", "1,2"]) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["tensor_parallel_size"] for row in rows] == [1, 2]
    assert rows[0]["weight_bytes"] > rows[1]["weight_bytes"] > rows[0]["weight_bytes"] / 2
    assert rows[0]["kv_bytes_per_token"] == rows[1]["kv_bytes_per_token"] == 656 * 28
    assert "| moonlight, bf16, FP8 latents | 2 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--model", "moonlight", "--tensor-parallel-size", "3"], "tensor parallel size 3 does not divide"),
        (["--model", "qwen3-30b-a3b", "--kv-cache-dtype", "fp8"], "has grouped-query attention"),
    ],
)
def test_plans_that_no_engine_has_are_refused(options, message, capsys):
    assert main(["plan", *options]) == 1
    assert message in capsys.readouterr().err
