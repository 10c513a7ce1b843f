"""The benchmarks' arithmetic, and one small run of each that needs no GPU."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench import record
from bench.__main__ import main
from bench.convert import make_checkpoint
from bench.parity import Predictions, choose_windows, compare, top_and_gap
from bench.step import SHAPES, traffic
from jaxspec.models.config import read_config
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import count_parameters


def test_help_lists_the_benchmarks(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in ("step", "cycle", "speculation", "convert", "parity"))


def test_byte_floor_of_the_moonlight_shape():
    """One row reads 6 of 64 experts in 26 layers; many rows read every weight but the embedding."""
    model = CausalLM(read_config(SHAPES["moonlight"]), jnp.bfloat16)
    assert count_parameters(model) == pytest.approx(15.96e9, rel=1e-3)
    one = traffic(model, 1, 1024, 27 * 576 * 2)
    experts = 26 * 64 * 3 * 2048 * 1408 * 2
    rest = 2 * (count_parameters(model) - 163840 * 2048) - experts
    router = 26 * (64 * 2048 + 64) * 2  # float32: two bytes more each
    assert one.experts == pytest.approx(6)
    assert one.weights == pytest.approx(rest + router + experts * 6 / 64 + 2048 * 2)
    assert one.kv == 1024 * 27 * 576 * 2
    assert traffic(model, 4096, 1024, 0).weights == pytest.approx(rest + router + experts + 4096 * 2048 * 2)


@pytest.mark.slow
def test_a_decode_step_is_measured(tmp_path, capsys):
    out = tmp_path / "step.json"
    options = ["--rows", "1,2", "--context", "70", "--steps", "4", "--layers", "2", "--out", str(out)]
    assert main(["step", "--model", "tiny", *options]) == 0
    result = json.loads(out.read_text())
    assert result["compiles_after_warm_up"] == 0
    assert [r["rows"] for r in result["rows"]] == [1, 2]
    for row in result["rows"]:
        assert row["step_read_ms"] > 0
        assert 0 < row["floor_share_read"] < 1
        assert row["experts_touched_measured"] <= 2 * row["rows"]
    assert result["environment"]["versions"]["jax"]
    assert "of read" in capsys.readouterr().out


def test_generated_checkpoints_convert(tmp_path):
    from bench.step import mesh_of_one
    from convert.checkpoint import load_params
    from convert.convert import convert_checkpoint

    size = make_checkpoint(tmp_path / "source", 2**23)
    assert size >= 2**23
    _, params = load_params(convert_checkpoint(tmp_path / "source", tmp_path / "out"), mesh_of_one())
    embed = np.asarray(params["embed"]["weight"], np.float32)
    assert np.isfinite(embed).all()
    assert 0.005 < np.abs(embed).mean() < 0.02


def test_agreement_and_gaps():
    truth = Predictions(
        *map(list, zip(*(top_and_gap(np.array([[1.0, 3, 2.5], [0, 0, 4]])) for _ in range(2)), strict=True))
    )
    assert truth.top[0].tolist() == [1, 2]
    assert truth.gap[0].tolist() == [0.5, 4]
    trial = Predictions([np.array([2, 2]), np.array([1, 0])], truth.gap)
    everywhere = compare(truth, trial, [0, 0])
    assert (everywhere["positions"], everywhere["agreed"], everywhere["largest_gap"]) == (4, 2, 4)
    assert everywhere["disagreements"][0] == {"window": 0, "position": 0, "float32": 1, "got": 2, "gap": 0.5}
    assert compare(truth, trial, [1, 1])["agreed"] == 1


def test_windows_come_from_many_files_first():
    texts = ["a" * 25, "b" * 8, "c" * 4]
    windows = choose_windows(texts, list, 4, 10)
    assert ["".join(w) for w in windows] == ["a" * 10, "b" * 8, "a" * 10, "a" * 5]


def test_json_keeps_its_values():
    value = {"a": [1, 2], "text": "with  {two} [spaces]", "rows": [{"x": 1.5}] * 3, "long": list(range(200))}
    text = record.dumps(value)
    assert json.loads(text) == value
    assert '{ "x": 1.5 }' in text
