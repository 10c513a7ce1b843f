"""The arithmetic of `bench cycle` and `bench speculation`, and one small run of the former."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from bench.__main__ import main
from bench.accuracy.speculation import Truth, differences, noise
from bench.harness.models import SHAPES
from bench.step.cycle_drafts import DRAFTS, declare_draft
from bench.step.floor import cycle_bytes, traffic
from bench.step.stages import shares, split, stage_of_operations
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import count_parameters
from jaxspec.models.registry import read_config

H, V, BF16 = 2048, 163840, np.dtype("bfloat16")


@pytest.fixture(scope="module")
def moonlight() -> CausalLM:
    return CausalLM(read_config(SHAPES["moonlight"]), BF16)


def test_drafts_have_published_sizes(moonlight):
    drafts = {kind: declare_draft(kind, SHAPES["moonlight"], moonlight, BF16) for kind in DRAFTS}
    assert drafts["mtp"].capture == ()
    assert drafts["eagle3-llama"].capture == drafts["eagle3-mla"].capture == (2, 13, 24)
    mlp, fc, norms = 3 * H * 11264, 3 * H * H, 4 * H
    llama = 2 * H * 128 * (16 + 2 * 4) + 16 * 128 * H + mlp + fc + norms + 32000 * (H + 1)  # with the map of ids
    assert count_parameters(drafts["eagle3-llama"]) == llama
    attention = 2 * H * (16 * 192 + 576) + 512 * (1 + 16 * 256) + 16 * 128 * H
    assert count_parameters(drafts["eagle3-mla"]) == attention + mlp + fc + norms + V * H


def test_byte_floor_of_a_cycle(moonlight):
    """A window of four tokens touches as many experts as four rows; each draft pass reads layer, head and KV again."""
    draft = declare_draft("eagle3-mla", SHAPES["moonlight"], moonlight, BF16)
    need = cycle_bytes(moonlight, draft, 1, 3, 1000, 1000 * 1152)
    assert need["target"] == pytest.approx(traffic(moonlight, 4, 250).total)
    once = 2 * 3 * H * H
    assert need["draft"] == pytest.approx(once + 3 * (2 * count_parameters(draft) - once + 1000 * 1152))
    mtp = declare_draft("mtp", SHAPES["moonlight"], moonlight, BF16)
    few, many = (cycle_bytes(moonlight, mtp, rows, 3, 0, 0)["draft"] for rows in (1, 2))
    assert few > 3 * 2 * V * H  # the target's head
    assert many - few == pytest.approx(3 * 2 * 3 * H * 1408 * 64 * ((58 / 64) - (58 / 64) ** 2))


HLO = """
  %fusion.1 = f32[4]{0} fusion(%p), kind=kLoop, calls=%f, metadata={op_name="jit(flat_step)/target/layer0/mlp/dot" stack=1}
  %while.2 = (f32[4]) while(%t), condition=%c, body=%b, metadata={op_name="jit(flat_step)/verify/while"}
  %sort.3 = f32[4]{0} sort(%fusion.1), dimensions={0}, metadata={op_name="jit(flat_step)/verify/sort"}
  %custom-call.4 = f32[4]{0} custom-call(%x), custom_call_target="k", metadata={op_name="jit(flat_step)/catch_up/k"}
  ROOT %add.5 = f32[4]{0} add(%a, %b), metadata={op_name="jit(flat_step)/draft/layer/target/add"}
  %copy.6 = f32[4]{0} copy(%a), metadata={op_name="jit(flat_step)/pack"}
"""


def test_stages_of_operations_are_their_outermost_scopes():
    assert stage_of_operations(HLO) == {
        "fusion.1": "target", "sort.3": "verify", "custom-call.4": "catch_up", "add.5": "draft_steps",
    }  # fmt: skip


def test_stages_share_the_time_of_a_step():
    def event(operation, duration):
        return SimpleNamespace(duration_ns=duration, stats=[("hlo_op", operation)] if operation else [])

    events = [event("a", 30), event("b", 10), event("c", 50), event("a", 20), event(None, 99), event("other", 7)]
    trace = SimpleNamespace(planes=[SimpleNamespace(lines=[SimpleNamespace(events=events)])])
    parts = shares(trace, {"a": "target", "b": "verify", "c": "draft_steps"})
    assert parts == pytest.approx({"target": 5 / 11, "verify": 1 / 11, "catch_up": 0, "draft_steps": 5 / 11})
    assert split(11.0, parts) == {"target": 5, "verify": 1, "catch_up": 0, "draft_steps": 5}
    with pytest.raises(RuntimeError, match="no operation"):
        shares(trace, {"d": "target"})


def test_noise_and_gaps_end_at_the_first_difference():
    logits = np.array([[0, 2, 1, 0], [0, 0, 3, 2.5], [0, 0, 0, 9]], np.float32)
    truth = Truth([[1, 2, 3]], [logits])
    change = np.array([[9, 0, 0.25, 0], [0, 0, -0.5, 0.75], [0, 0, 0, 50]], np.float32)
    # Token 0 is not among the best two, and the last position has another prefix.
    assert noise(truth, Truth([[1, 3, 0]], [logits + change])) == (0.75, 2)
    assert noise(truth, Truth([[1, 2, 3]], [logits + change])) == (50, 3)
    assert differences(truth, [[1, 2, 3]], 8) == []
    assert differences(truth, [[1, 3, 0]], 8) == [
        {"prompt": 0, "rows": 8, "position": 1, "plain": 2, "got": 3, "gap": 0.5}
    ]


@pytest.mark.full
@pytest.mark.parametrize("split", [False, True])
def test_a_cycle_is_measured(split, tmp_path, capsys):
    out = tmp_path / "cycle.json"
    options = [
        "--rows",
        "2",
        "--context",
        "70",
        "--tokens",
        "2",
        "--steps",
        "2",
        "--repeats",
        "1",
        "--layers",
        "2",
        *(["--split"] if split else []),
    ]
    assert main(["cycle", "--model", "tiny", "--drafts", "eagle3-llama", *options, "--out", str(out)]) == 0
    (row,) = json.loads(out.read_text())["rows"]
    assert row["compiles_while_measuring"] == 0
    figures = row["drafts"]["eagle3-llama"]
    # float32: the skip changes no draft.
    assert figures["check"]["same_drafts"] == 1
    assert figures["check"]["largest_log_q_difference"] < 1e-3
    assert figures["skip_on"]["read_ms"] > 0
    assert ("where a cycle goes" in capsys.readouterr().out) == split
    if split:
        assert min(figures["split_ms"].values()) > 0
        assert sum(figures["split_ms"].values()) == pytest.approx(figures["skip_on"]["ahead_ms"], abs=1e-3)
