"""`bench tune`: what is chosen from which times, what is written, and one tiny run."""

import dataclasses
import json

import pytest

from bench.__main__ import main
from bench.kernel import tune
from bench.kernel.moe import Moe
from pallas_kernels import tuning
from pallas_kernels.tuning import Tuning

# What `bench comm` measures, and `bench step`.
OF_NO_KERNEL = {"peer_sum_bytes", "host_readback"}
CASE = Moe(6, 32, 8, 2, 16, 2, 4)


def test_choices_are_fields_and_their_candidates_make_tunings():
    assert set(tune.CHOICES) | OF_NO_KERNEL == {field.name for field in dataclasses.fields(Tuning)}
    for name, choice in tune.CHOICES.items():
        assert len(set(choice.candidates)) == len(choice.candidates) > 1
        for value in choice.candidates:
            there_and_back = tuning.from_json(json.loads(json.dumps(tuning.to_json(Tuning(**{name: value})))))
            assert getattr(there_and_back, name) == value


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [
        ({5: 1.0, 3: 0.95, 8: 0.9}, 8),
        ({5: 1.0, 3: 0.995}, 5),  # within the margin
        ({5: 1.0, 3: None, 8: 0.97}, 8),  # the fastest was wrong
        ({5: None, 3: 0.9}, 3),
        ({5: 1.0, 3: 1.2}, 5),
    ],
)
def test_the_fastest_right_one_is_chosen(scores, chosen):
    assert tune.choose(5, scores) == chosen


def test_scores_are_geometric_means_over_the_cases(capsys):
    times = {CASE: [4.0, 2.0, 1.0], dataclasses.replace(CASE, T=7): [1.0, 1.0, 1.0]}
    errors = iter([[0.001, 0.001, 0.001], [0.001, 0.001, float("nan")]])
    variants = []

    def compare(case, given):
        variants.append([each.most_piece_rows for each in given])
        return times[case], next(errors)

    result = tune.tune("most_piece_rows", Tuning(), list(times), (32, 64, 128), compare)
    assert variants == [[128, 32, 64]] * 2  # the present one first, and once
    assert result["candidates"] == [
        {"value": 128, "score": 1.0}, {"value": 32, "score": 0.7071}, {"value": 64, "score": None},
    ]  # fmt: skip
    assert (result["present"], result["chosen"], result["wrong"]) == (128, 32, [64])
    assert "T=7" in capsys.readouterr().out


def test_what_is_written_keeps_other_devices(tmp_path):
    file = tmp_path / "tuned.json"
    tune.write(file, "B", Tuning(split_overhead_pages=9))
    tune.write(file, "A", Tuning(slot_rows=((1.0, 16),)))
    tune.write(file, "B", Tuning(norm_linear_tokens=4))
    data = json.loads(file.read_text())
    assert list(data) == ["A", "B"]
    assert tuning.from_json(data["A"]) == Tuning(slot_rows=((1.0, 16),))
    assert tuning.from_json(data["B"]) == Tuning(norm_linear_tokens=4)
    # In the form that is checked in.
    file.unlink()
    for kind in json.loads(tuning.FILE.read_text()):
        tune.write(file, kind, tuning.of_device(kind))
    assert file.read_text() == tuning.FILE.read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "choices",
    [("norm_linear_tokens", "split_overhead_pages"), pytest.param((), marks=pytest.mark.full)],
    ids=["two", "all"],
)
def test_a_tiny_run(choices, tmp_path, capsys):
    out = tmp_path / "tune.json"
    chosen = ["--choices", ",".join(choices)] if choices else []
    assert main(["tune", "--rows", "tiny", *chosen, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert {each["choice"] for each in result["choices"]} == set(choices or tune.CHOICES)
    for each in result["choices"]:
        assert each["wrong"] == []
        assert each["chosen"] in [candidate["value"] for candidate in each["candidates"]]
    assert set(result["chosen"]) == set(tune.CHOICES) | OF_NO_KERNEL
    assert "norm_linear_tokens" in capsys.readouterr().out


def test_tiny_shapes_are_not_written(tmp_path, capsys, monkeypatch):
    file = tmp_path / "tuned.json"
    monkeypatch.setattr(tuning, "FILE", file)
    assert main(["tune", "--rows", "tiny", "--write"]) == 1
    assert "--rows all" in capsys.readouterr().err
    assert not file.exists()


def test_an_unknown_choice_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["tune", "--choices", "nothing"])
    assert "unknown choice nothing" in capsys.readouterr().err
