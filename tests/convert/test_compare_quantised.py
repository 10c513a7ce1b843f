"""`jaxspec compare` of quantised folders: PyTorch on what their weights stand for."""

import io
from contextlib import redirect_stdout
from pathlib import Path

import numpy as np
import pytest

from convert.convert import convert_checkpoint
from convert.reference import TorchModel
from convert.torch_drafts import DraftChoice
from convert.torch_parts import stored_tensors
from serve import cli
from tests.conftest import few_buckets
from tests.convert.quantised_checkpoints import FORMATS, quantise
from tests.tiny_models import tiny_checkpoint

pytestmark = pytest.mark.torch
SIZES = {"moe_intermediate_size": 160, "intermediate_size": 160, "hidden_size": 160, "num_hidden_layers": 2}


def of_mlps(name: str) -> bool:
    return "_proj.weight" in name and ".mlp." in name


def of_experts(name: str) -> bool:
    return name.endswith(("gate_up_proj", "down_proj"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("v3-mtp", tmp_path_factory.mktemp("source") / "hf", **SIZES)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FORMATS, "gpt-oss"])
def test_pytorch_gets_what_the_weights_stand_for(kind: str, source: Path, tmp_path: Path):
    """To the bit, of each format: the float32 checkpoint of the same values, in the model and in its MTP layer."""
    if kind == "gpt-oss":
        source, chosen = tiny_checkpoint("gpt-oss", tmp_path / "hf", intermediate_size=96), of_experts
        draft = None
    else:
        chosen, draft = of_mlps, DraftChoice(None, 1)
    got, want = (TorchModel(f, draft=draft) for f in quantise(source, tmp_path, kind, chosen))
    state = got.module.state_dict()
    assert state.keys() == want.module.state_dict().keys()
    for name, tensor in want.module.state_dict().items():
        np.testing.assert_array_equal(state[name], tensor, err_msg=name)
    prompt = [5, 6, 7]
    runs = [model.run(prompt, 2) for model in (got, want)]
    np.testing.assert_array_equal(runs[0].logits, runs[1].logits)
    if draft:
        np.testing.assert_array_equal(runs[0].drafts.logits, runs[1].drafts.logits)


def test_weights_that_no_model_keeps_are_rounded_alike(source: Path, tmp_path: Path):
    """Attention is dequantised to bfloat16 while it is read, and PyTorch's is the same."""
    stored, plain = quantise(
        source, tmp_path, "ct-fp8-channel", lambda name: "_proj.weight" in name and "eh_" not in name
    )
    got, want = stored_tensors(stored), stored_tensors(plain)
    attention, expert = "model.layers.0.self_attn.o_proj.weight", "model.layers.1.mlp.experts.3.up_proj.weight"
    assert not np.array_equal(got[attention], want[attention])
    np.testing.assert_array_equal(got[attention], want[attention].bfloat16().float())
    np.testing.assert_array_equal(got[expert], want[expert])


@pytest.mark.long
@pytest.mark.parametrize(
    "kind", [k if k == "ct-int4" else pytest.param(k, marks=pytest.mark.full) for k in [*FORMATS, "gpt-oss"]]
)
def test_compare(kind: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The converted folder beside the published one, with the drafts of its MTP layer."""
    few_buckets(monkeypatch, decode=False)
    chosen, drafts = of_mlps, ["--num-speculative-tokens", "2"]
    if kind == "gpt-oss":
        source, chosen = tiny_checkpoint("gpt-oss", tmp_path / "hf", intermediate_size=96), of_experts
        drafts = []
    stored, _ = quantise(source, tmp_path, kind, chosen)
    converted = convert_checkpoint(stored, tmp_path / "converted")
    sizes = ["--num-prompts", "2", "--new-tokens", "3"]
    with redirect_stdout(io.StringIO()) as out:
        code = cli.main(["compare", str(converted), "--reference", str(stored), *sizes, *drafts])
    assert (code, out.getvalue().splitlines()[-1]) == (0, "PASS")
