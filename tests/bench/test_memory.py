"""What is said of each device's memory before anything is allocated, beside the arrays that lie there then."""

import gc
import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.device_bytes import held_bytes
from bench.harness.models import declare, draw, random_config
from bench.step import predict
from bench.step.engines import build_engine
from bench.step.sizes import Sizes
from bench.step.step import memory_figures
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.params import random_params, schemes_of

DEVICES = 4
SIZES = Sizes(rows=(1, 4), context=70, steps=4, loops=(4, 4), budget=64, tokens=3)
# The bound of what docs promise; nothing here is more than a few bytes off.
WITHIN = 0.03


def test_slices_keep_one_dense_layer():
    whole, slice_of_four = random_config("deepseek-v3"), random_config("deepseek-v3", 4)
    assert (whole["num_hidden_layers"], whole["first_k_dense_replace"]) == (61, 3)
    assert (slice_of_four["num_hidden_layers"], slice_of_four["first_k_dense_replace"]) == (4, 1)


@pytest.mark.parametrize(("scheme", "owners"), [("bf16", set()), ("fp8", {"mlp", "shared"}), ("int4", {"mlp"})])
def test_declarations_are_what_convert_would_keep(scheme, owners):
    """FP8 for all MLPs, the MTP layer's too; INT4 for routed experts."""
    model, nextn = declare(random_config("deepseek-v3-toy"), np.dtype(np.float32), quantization=scheme)
    assert nextn is not None
    found = schemes_of(model)
    assert {path[-2] for path in found} == owners
    assert ({path[1] for path in found} == {0, 1, 2, 3}) == (scheme == "fp8")  # the first layer is dense
    assert bool(schemes_of(nextn)) == (scheme != "bf16")


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "scheme", "cache"),
    [
        ("deepseek-v3-toy", "fp8", "fp8"),
        pytest.param("kimi-k2-toy", "int4", "auto", marks=pytest.mark.full),
        pytest.param("deepseek-v3-toy", "bf16", "bf16", marks=pytest.mark.full),
    ],
)
def test_live_arrays_are_the_declared_bytes(model, scheme, cache):
    """Random weights and an engine's state over several devices, before it compiles a step: also what `bench plan` says."""
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    mesh = make_mesh(DEVICES)
    hf = random_config(model, 2)
    weights = draw(hf, mesh, np.dtype(np.float32), quantization=scheme, kv_cache_dtype=cache)
    k = SIZES.tokens if weights.draft else 0
    engine = build_engine(weights, SIZES, k, mesh, dtype="float32", lean=False)
    gc.collect()
    live = held_bytes(array for array in jax.live_arrays() if id(array) not in before)
    figures = memory_figures(weights, engine, k, mesh)
    assert set(live) == set(mesh.devices.flat)
    for name in ("weights", "state"):
        assert figures[f"{name}_held"] == pytest.approx(figures[f"{name}_declared"], rel=WITHIN)
    said = predict.memory(weights.model, weights.draft[0] if k else None, devices=DEVICES, max_num_seqs=SIZES.rows[-1])
    assert said.weights == pytest.approx(figures["weights_held"], rel=WITHIN)
    pages = said.kv_token * engine.settings.num_pages * engine.settings.page_size
    assert said.state + pages == pytest.approx(figures["state_held"], rel=WITHIN)
    for held in live.values():
        assert held == pytest.approx(figures["weights_declared"] + figures["state_declared"], rel=WITHIN)


@pytest.mark.long
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.full), DEVICES])
def test_big_tensors_are_drawn_in_pieces(devices):
    """As many numbers of the same distribution as at once, no piece and no device's part like another, on the same shards."""
    hf = random_config("kimi-k2-toy", 2) | {"hidden_size": 128, "moe_intermediate_size": 128, "vocab_size": 256}
    model, _ = declare(hf, np.dtype(np.float32), quantization="int4")
    mesh = make_mesh(devices)
    whole, pieces = (random_params(model, mesh, most_drawn=n) for n in (1 << 28, 1 << 12))
    assert jax.tree.map(lambda a: (a.shape, a.dtype, a.sharding), whole) == jax.tree.map(
        lambda a: (a.shape, a.dtype, a.sharding), pieces
    )
    experts = pieces["layers"][1]["mlp"]["down"]
    codes = np.asarray(experts["codes"]).reshape(16, -1)
    assert len({row.tobytes() for row in codes}) == 16
    assert np.bincount(codes.reshape(-1), minlength=256).min() > 0
    halves = np.asarray(pieces["embed"]["weight"]).reshape(4, -1)
    assert np.abs(np.corrcoef(halves) - np.eye(4)).max() < 0.05
    for arrays in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        want, got = (np.std(np.asarray(array, np.float32)) for array in arrays)
        assert got == pytest.approx(want, rel=0.1, abs=1e-6)


def test_quantization_is_of_random_models(tmp_path, capsys):
    """A folder's weights are what they are."""
    assert main(["step", "--model", str(tmp_path), "--quantization", "fp8"]) == 1
    assert "jaxspec convert --quantization" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "scheme", "stored", "tensor", "ranks"),
    [
        ("deepseek-v3-toy", "fp8", ["fp8_block"], 8, 1),
        ("kimi-k2-toy", "int4", ["int4_g32"], 8, 1),
        ("kimi-k2-toy", "int4", ["int4_g32"], 2, 4),
    ],
)
def test_steps_over_eight_devices(model, scheme, stored, tensor, ranks, tmp_path):
    """The whole command in a process of its own: memory as declared, steps measured, nothing compiled after warm-up."""
    out = tmp_path / "step.json"
    options = ["--model", model, "--layers", "2", "--quantization", scheme, "--kv-cache-dtype", "fp8"]
    options += ["-tp", str(tensor), "-dp", str(ranks)]
    options += [
        "--rows",
        "1",
        "--context",
        "70",
        "--steps",
        "4",
        "--loop",
        "4",
        "--tokens",
        "0",
        "--prefill-budget",
        "64",
    ]
    flags = os.environ["XLA_FLAGS"].replace("device_count=4", "device_count=8")
    subprocess.run(
        [sys.executable, "-m", "bench", "step", *options, "--out", str(out)],
        check=True, env=os.environ | {"XLA_FLAGS": flags}, timeout=1800,
    )  # fmt: skip
    result = json.loads(out.read_text())
    assert (result["tensor_parallel_size"], result["data_parallel_size"]) == (tensor, ranks)
    assert result["quantization"]["target"] == stored
    assert result["compiles_after_warm_up"] == 0
    assert result["rows"][0]["step_ms"] > 0
    for figures in result["memory_of_a_device"].values():
        for name in ("weights", "state"):
            assert figures[f"{name}_held"] == pytest.approx(figures[f"{name}_declared"], rel=WITHIN)
