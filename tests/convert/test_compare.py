"""`jaxspec compare`: PyTorch's batches against single runs, and what the command shows while it runs."""

import io
import json

import numpy as np
import pytest

from convert.progress import Bar, Lines
from convert.reference import Reference, TorchModel, choose_prompts, read_record
from jaxspec.errors import JaxspecError
from serve import cli
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


@pytest.mark.slow
@pytest.mark.torch
def test_the_command_shows_progress_and_a_result_early(folder, tmp_path, capsys):
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
