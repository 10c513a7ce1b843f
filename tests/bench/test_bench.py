"""The benchmarks' arithmetic, and one small run of each that needs no GPU."""

import argparse
import json

import jax.numpy as jnp
import numpy as np
import pytest

from bench.__main__ import ROOMS, main
from bench.accuracy import draft_ids, draft_ids_checkpoints
from bench.accuracy.parity import Predictions, choose_windows, compare, top_and_gap
from bench.harness import record
from bench.harness.models import SHAPES, mesh_of_one
from bench.serving.convert import make_checkpoint
from bench.step.floor import traffic
from convert.convert import convert_checkpoint
from jaxspec.errors import ConfigError
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.parts import EMBED, HEAD, MTP
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import count_parameters
from jaxspec.models.registry import read_config
from serve import cli


def test_help_lists_the_benchmarks(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    assert all(
        name in text
        for name in ("step", "step_vllm", "cycle", "speculation", "convert", "parity", "serve", "timeline", "draft_ids")
    )


def test_without_a_command_each_is_a_line(capsys):
    assert main([]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert err == ""
    for room in ROOMS.values():
        for name, text in room.items():
            assert [name, *text.split()] in lines


@pytest.mark.parametrize("command", [main, lambda argv: cli.main(["bench", *argv])], ids=["module", "jaxspec"])
def test_an_unknown_benchmark_is_told_all_that_there_are(capsys, command):
    assert command(["nosuch" * 100, "--out", "x"]) == 2
    out, err = capsys.readouterr()
    names = ", ".join(name for room in ROOMS.values() for name in room)
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("error: unknown benchmark 'nosuchnosuch")
    assert err.endswith(f"(there are {names})\n")
    assert len(err) < 100 + len(names)


def test_records_go_to_the_current_folder_but_in_the_repository_to_its_results(tmp_path, capsys, monkeypatch):
    arguments = argparse.Namespace(out=None, commit=None)
    monkeypatch.chdir(record.CHECKOUT / "docs")
    assert record.results_folder() == record.RESULTS
    monkeypatch.chdir(tmp_path)
    record.write("serve_demo", {"benchmark": "serve"}, arguments, with_device=False)
    assert capsys.readouterr().out == "wrote serve_demo.json\n"
    assert json.loads((tmp_path / "serve_demo.json").read_text())["benchmark"] == "serve"
    (tmp_path / "file").touch()
    arguments.out = tmp_path / "file" / "record.json"
    with pytest.raises(ConfigError, match=rf"cannot write {arguments.out}: "):
        record.write("serve_demo", {}, arguments, with_device=False)


def test_byte_floor_of_the_moonlight_shape():
    """One row reads 6 of 64 experts in 26 layers; many rows read every weight but the embedding."""
    model = CausalLM(read_config(SHAPES["moonlight"]), np.dtype(jnp.bfloat16))
    assert count_parameters(model) == pytest.approx(15.96e9, rel=1e-3)
    one = traffic(model, 1, 1024)
    experts = 26 * 64 * 3 * 2048 * 1408 * 2
    rest = 2 * (count_parameters(model) - 163840 * 2048) - experts
    router = 26 * (64 * 2048 + 64) * 2  # float32: two bytes more each
    assert one.experts == pytest.approx(6)
    assert one.weights == pytest.approx(rest + router + experts * 6 / 64 + 2048 * 2)
    assert one.kv == 1024 * 27 * 576 * 2
    counted = traffic(model, 1, 1024, touched=12)
    assert counted.experts == 12
    assert counted.weights == pytest.approx(one.weights + experts * 6 / 64)
    assert traffic(model, 4096, 1024).weights == pytest.approx(rest + router + experts + 4096 * 2048 * 2)


@pytest.mark.full
def test_a_decode_step_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    out = tmp_path / "step.json"
    options = ["--rows", "2", "--context", "70", "--steps", "4", "--layers", "2", "--tokens", "0", "--lean"]
    assert main(["step", "--model", "tiny", *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["compiles_after_warm_up"] == 0
    assert [r["rows"] for r in result["rows"]] == [2]
    for row in result["rows"]:
        assert row["step_read_ms"] > 0
        assert 0 < row["floor_share_read"] < 1
        assert row["experts_touched_measured"] <= 2 * row["rows"]
        assert 0 < row["floor_of_touched_ms"] < row["step_read_ms"]
    assert result["environment"]["versions"]["jax"]
    assert "of read" in capsys.readouterr().out


def test_generated_checkpoints_convert(tmp_path):
    from jaxspec.loading.checkpoint import load_params, open_checkpoint

    size = make_checkpoint(tmp_path / "source", 2**23)
    assert size >= 2**23
    _, params = load_params(open_checkpoint(convert_checkpoint(tmp_path / "source", tmp_path / "out")), mesh_of_one())
    embed = np.asarray(params["embed"]["weight"], np.float32)
    assert np.isfinite(embed).all()
    assert 0.005 < np.abs(embed).mean() < 0.02


def test_draft_ids_checkpoints_convert(tmp_path, monkeypatch):
    """Both kinds, made smaller: vLLM reads the same files."""
    small = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "q_lora_rank": 8,
        "num_key_value_heads": 2, "kv_lora_rank": 16, "n_routed_experts": 4, "moe_intermediate_size": 8, "head_dim": 16,
    }  # fmt: skip
    for name in ("MTP", "TARGET", "EAGLE3"):
        monkeypatch.setattr(draft_ids_checkpoints, name, getattr(draft_ids_checkpoints, name) | small)
    monkeypatch.setattr(draft_ids_checkpoints, "EAGLE3", draft_ids_checkpoints.EAGLE3 | {"draft_vocab_size": 32})
    draft_ids_checkpoints.make(tmp_path)
    parts = {name: read_manifest(convert_checkpoint(tmp_path / name, tmp_path / f"{name}-out")).parts
             for name in ("mtp", "eagle3", "eagle3-head")}  # fmt: skip
    assert MTP in parts["mtp"]
    assert MTP not in parts["eagle3"]
    assert EMBED not in parts["eagle3-head"]  # it reads the target's
    assert HEAD in parts["eagle3-head"]


def test_draft_ids_prompts_hide_the_first_position():
    prompts = draft_ids_checkpoints.make_prompts(16, 4096)
    assert {prompt[1] for prompt in prompts} == {draft_ids_checkpoints.BLANK}
    assert (len(prompts[0]), len(prompts[-1])) == (3, 300)


def test_draft_ids_are_equal_but_for_near_ties():
    log_q = np.log([[[0.5, 0.3, 0.2]] * 3] * 3)
    theirs = [[0, 0, 0], [0, 1, 1], [2, 0, 0]]
    result = draft_ids.compare(theirs, [[0, 0, 0]] * 3, log_q, 0.6)
    assert (result["steps"], result["positions"], result["equal"]) == (3, 6, 4)  # none after a step's first difference
    assert (result["near_ties"], result["different"]) == (1, 1)
    assert result["largest_near_tie"] == pytest.approx(np.log(5 / 3), abs=1e-5)
    assert result["differences"][1] == {"step": 2, "draft": 0, "vllm": 2, "jaxspec": 0, "gap": 0.91629}
    # In float32 the first difference's drafts had parted before, and of the second one vLLM's token is the better one.
    float32 = ([[0, 0, 0], [1, 0, 0], [0, 0, 0]], np.log([[[0.2, 0.3, 0.5]] * 3] * 3))
    told = draft_ids.compare(theirs, [[0, 0, 0]] * 3, log_q, 0.6, float32)["differences"]
    assert [d["float32_gap"] for d in told] == [None, -0.91629]


def test_rounding_moves_first_choices():
    """Of the third draft nothing counts: the second ones part, and it follows other tokens."""
    exact = np.array([[[0.0, -1, -2], [0, -0.1, -3], [0, -1, -2]]])
    rounded = exact + np.array([[[0.25, 9, 9], [-0.2, 0.5, 9], [8, 8, 8]]])
    assert draft_ids.rounding_noise([[0, 1, 0]], rounded, [[0, 0, 0]], exact) == 0.5
    assert draft_ids.rounding_noise([[0, 1, 0]], exact, [[0, 1, 0]], exact) == 0


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
