"""`jaxspec compare`: PyTorch's batches against single runs, and what the command shows while it runs."""

import io
import json
import re
import shutil
from types import SimpleNamespace

import numpy as np
import pytest

from convert.compare import Collector
from convert.progress import Bar, Lines
from convert.reference import Reference, TorchModel, choose_prompts, read_record
from convert.torch_drafts import DraftChoice
from jaxspec.errors import JaxspecError
from serve import cli
from tests.conftest import few_buckets
from tests.convert.edits import edit_tensors, tensors
from tests.eagle3_models import tiny_draft
from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint("v3-yarn", tmp_path_factory.mktemp("compare") / "hf")


@pytest.fixture(scope="module")
def model(folder):
    return TorchModel(folder)


def assert_same(got, want):
    assert (got.prompt_ids, got.new_ids) == (want.prompt_ids, want.new_ids)
    for name in ("logprobs", "gaps", "residuals", "logits"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("variant", ["v3-yarn", "moonlight", "llama"])
def test_a_batch_is_bit_equal_to_single_runs(variant, tmp_path):
    """Prompts of different lengths, so that the batch is padded, and of equal ones."""
    folder = tiny_checkpoint(variant, tmp_path)
    model = TorchModel(folder)
    prompts = choose_prompts(folder, model.vocab_size, 3)
    assert len(set(map(len, prompts))) == 3
    counted: list[int] = []
    for batch in (prompts, [p[:3] for p in prompts]):
        runs = model.run_batch(batch, 6, counted.append)
        assert sum(counted) == sum(len(p) + 6 + 5 for p in batch)
        counted.clear()
        for run, prompt in zip(runs, batch, strict=True):
            assert_same(run, model.run(prompt, 6))


@pytest.mark.torch
def test_a_prompt_that_the_batch_continues_otherwise_runs_by_itself(folder, model, monkeypatch):
    """As a matmul of another shape may, where two logits are nearly equal."""
    prompts = choose_prompts(folder, model.vocab_size, 2)
    generate = model.generate

    def rounded_otherwise(batch, new_tokens, advance):
        ids = generate(batch, new_tokens, advance)
        if len(batch) > 1:
            ids[1][2] = (ids[1][2] + 1) % model.vocab_size
        return ids

    want = [model.run(prompt, 4) for prompt in prompts]
    monkeypatch.setattr(model, "generate", rounded_otherwise)
    for got, alone in zip(model.run_batch(prompts, 4), want, strict=True):
        assert_same(got, alone)


@pytest.mark.long
@pytest.mark.torch
def test_the_command_shows_progress_and_a_result_early(folder, tmp_path, capsys, monkeypatch):
    few_buckets(monkeypatch, decode=False)
    record = tmp_path / "run.npz"
    assert cli.main(["compare", "record", str(folder), str(record), "--num-prompts", "3", "--new-tokens", "4"]) == 0
    recorded = capsys.readouterr()
    assert "PyTorch: prompts 3 to 3, 100 %" in recorded.err

    figures = tmp_path / "figures.json"
    assert cli.main(["compare", str(folder), "--reference", str(record), "--json", str(figures)]) == 0
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    early = next(i for i, line in enumerate(lines) if line.startswith("2 of 3 prompts: 2 of 2 continuations identical"))
    assert "max logit error " in lines[early]
    assert lines[early].endswith("top-1 agreement 100.00 %")
    assert any(line.startswith("Compiling: ") for line in lines[:early])
    assert any(line.startswith("jaxspec: prompts 3 to 3, 100 %, ") for line in lines[early:])
    assert shown.out.splitlines()[-1] == "PASS"
    report = json.loads(figures.read_text())
    lengths = [len(run.prompt_ids) + len(run.new_ids) - 1 for run in read_record(record)]
    assert (report["prompts"], report["identical"], report["positions"]) == (3, 3, 2 * sum(lengths))


def compare(capsys, *arguments) -> tuple[int, str]:
    code = cli.main(["compare", *map(str, arguments)])
    return code, capsys.readouterr().out


SIZES = ("--num-prompts", 3, "--new-tokens", 4)
# Of the layer after the last one, or under the names of Qwen3.5.
NEXTN_OUT = r"(model\.layers\.3|mtp\.layers\.0)\.self_attn\.o_proj\.weight"
LAYER_IDS = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    "variant",
    [
        "v3-mtp",
        *(pytest.param(v, marks=pytest.mark.full) for v in ("v32", "glm-dsa", "glm4-lite", "glm4-moe", "qwen3.5")),
    ],
)
def test_an_mtp_layer_is_compared_and_a_broken_weight_of_it_found(variant, tmp_path, capsys, monkeypatch):
    """Beside PyTorch's run of the sound checkpoint: the text is the same, the drafts are not."""
    few_buckets(monkeypatch, decode=False)
    folder = tiny_checkpoint(variant, tmp_path / "hf")
    figures, drafts = tmp_path / "figures.json", ("--num-speculative-tokens", 3)
    code, out = compare(capsys, folder, "--reference", folder, *SIZES, *drafts, "--json", figures)
    assert (code, out.splitlines()[-1]) == (0, "PASS")
    report = json.loads(figures.read_text())
    assert report["identical"] == report["prompts"] == 3
    report = report["drafts"]
    assert report["windows"] == report["identical"] > 0  # fewer than tokens, where drafts were accepted
    assert report["tokens"] == report["agreed"] == 3 * report["windows"]
    assert [*report["stages"]] == [
        "draft input",
        *(f"draft step {i}, {w}" for i in (1, 2, 3) for w in ("hidden", "logits")),
    ]
    assert all(0 < errors["max"] < 2e-4 for errors in report["stages"].values())

    broken = shutil.copytree(folder, tmp_path / "broken")
    (name,) = (name for name in tensors(broken) if re.fullmatch(NEXTN_OUT, name))
    edit_tensors(broken, add={name: 1.02 * tensors(broken)[name]})
    code, out = compare(capsys, broken, "--reference", folder, *SIZES, *drafts)
    assert code == 1
    assert "3 of 3 continuations identical" in out
    failures = [line for line in out.splitlines() if line.startswith("FAIL: ")]
    assert "max draft logit error" in failures[0]
    assert "the first stage of the draft that is off: draft step 1, hidden" in failures[-1]


@pytest.mark.long
@pytest.mark.torch
@pytest.mark.parametrize(
    "variant", ["llama", *(pytest.param(v, marks=pytest.mark.full) for v in ("qwen3-moe", "minimax-m2", "gpt-oss"))]
)
def test_an_eagle3_draft_is_compared_also_with_a_record(variant, tmp_path, capsys, monkeypatch):
    """With a head of fewer tokens, EAGLE3.1's norms, and each broken weight named by its stage."""
    few_buckets(monkeypatch, decode=False)
    folder = tiny_checkpoint(variant, tmp_path / "hf")
    draft = tiny_draft(tmp_path / "draft", draft_vocab_size=100, fc_norm=True, norm_output=True, **LAYER_IDS)
    record, speculation = tmp_path / "run.npz", ("--speculative-model", draft, "--num-speculative-tokens", 2)
    assert compare(capsys, "record", folder, record, *SIZES, *speculation)[0] == 0
    code, out = compare(capsys, folder, "--reference", record, *speculation)
    assert (code, out.splitlines()[-1]) == (0, "PASS")
    assert "draft step 2, logits" in out
    with pytest.raises(JaxspecError, match="no run of a draft for 3 steps"):
        Reference(record, num_prompts=1, new_tokens=1, draft=DraftChoice(draft, 3))

    for name, stage in (("fc_norm.1.weight", "draft input"), ("lm_head.weight", "draft step 1, logits")):
        broken = shutil.copytree(draft, tmp_path / name)
        edit_tensors(broken, add={name: 1.02 * tensors(broken)[name]})
        speculation = ("--speculative-model", broken, "--num-speculative-tokens", 2)
        code, out = compare(capsys, folder, "--reference", record, *speculation)
        assert code == 1
        assert f"the first stage of the draft that is off: {stage} (" in out


def test_drafts_of_a_window_that_is_cut_follow_what_was_accepted():
    """A request that ends inside its last window: the draft went on from a token that the request never had."""
    request = SimpleNamespace(id="a", tokens=[5, 6, 7])
    array = np.arange(6.0).reshape(6, 1)  # the bucket's: two prompt rows and one row with a window of 4 tokens
    drafted = SimpleNamespace(inputs=array, hidden=(array,), logits=(array,))
    step = SimpleNamespace(
        plan=SimpleNamespace(prefill=[], decode=[request]), bucket=SimpleNamespace(prefill_rows=2),
        emitted=np.array([1]), accepted=np.array([2]), drafts=np.array([[9, 9, 9]]),
        probe=SimpleNamespace(residuals=array[None], logits=array, drafted=drafted),
        token_offsets=lambda: (np.array([], int), np.array([2])),
    )  # fmt: skip
    collector = Collector()
    collector(step)
    assert list(collector.rows["a"]) == list(collector.inputs["a"]) == [2]  # the newest token is the request's own
    ((position, row),) = collector.drafts["a"].items()
    assert (position, row.ids.tolist(), row.hidden.tolist()) == (5, [9], [[2.0]])


@pytest.mark.torch
def test_drafts_that_pytorch_cannot_run_are_refused(folder, tmp_path, capsys):
    draft = tiny_draft(tmp_path / "draft", **LAYER_IDS)
    for choice, message in (
        (DraftChoice(None, 1), "has no NextN .MTP. layer to compare with; name an EAGLE3 draft"),
        (
            DraftChoice(folder, 1),
            "is DeepseekV3ForCausalLM: there is a PyTorch reference of EAGLE3 and MTP drafts only",
        ),
    ):
        with pytest.raises(JaxspecError, match=message):
            TorchModel(folder, draft=choice)
    (draft / "model.safetensors").unlink()  # as in a folder that `jaxspec convert` made
    with pytest.raises(JaxspecError, match=r"PyTorch reads a draft from its Hugging Face folder \(--draft-reference\)"):
        TorchModel(folder, draft=DraftChoice(draft, 1))
    for arguments, message in (
        (("--num-speculative-tokens", "-1"), "compared in at least one step"),
        (("--speculative-model", "x", "--num-speculative-tokens", "0"), "compared in at least one step"),
        (("--num-speculative-tokens", "1", "--draft-reference", "x"), "is for EAGLE3 drafts"),
    ):
        code = cli.main(["compare", str(folder), "--reference", str(folder), *arguments])
        assert code != 0
        assert message in capsys.readouterr().err


@pytest.mark.torch
def test_a_comparison_of_nothing_is_refused(folder):
    with pytest.raises(JaxspecError, match="must be at least 1"):
        Reference(folder, num_prompts=0, new_tokens=4)


def test_bars_and_lines_count_tokens():
    for kind in (Bar, Lines):
        stream = io.StringIO()
        progress = kind(stream)
        progress.start("PyTorch", 20, "tokens")
        for _ in range(2):
            progress.advance("prompts 1 to 2", 10)
        progress.close()
        text = stream.getvalue()
        assert text.startswith(("\rPyTorch: ", "PyTorch: 20 tokens\n"))
        assert "prompts 1 to 2" in text
        assert "tokens/s" in text
        assert "100" in text
