"""Random checkpoints of `bench step_vllm make` that are quantised as DeepSeek and Kimi publish theirs, and steps over them."""

import json
import re
import weakref
from pathlib import Path

import numpy as np
import pytest

from bench.__main__ import main
from bench.harness.models import mesh_of_one
from bench.harness.published import PUBLISHED, published
from bench.harness.shards import Tensor, write_checkpoint
from bench.step import checkpoint as random_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.hf_checkpoint import HFCheckpoint
from jaxspec.loading.quantisation_config import check_quantisation
from jaxspec.loading.quantise import quantise
from jaxspec.loading.safetensors_reader import SafetensorsReader
from jaxspec.loading.weight_reader import WeightReader
from jaxspec.models.params import schemes_of
from tests.convert.quantised_checkpoints import fp8_blocks, int4_words, raw_tensors

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
# Several blocks of FP8, the last ones partial, and queries with a latent.
SIZES = {"hidden_size": 160, "intermediate_size": 288, "moe_intermediate_size": 160, "q_lora_rank": 48}
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One model, unquantised and in each format, in several shards."""
    root = tmp_path_factory.mktemp("published")
    hf = random_checkpoint.checkpoint_config("tiny") | SIZES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_checkpoint, "SHARD_BYTES", 2**18)
        for name in ("bf16", *PUBLISHED):
            size = random_checkpoint.make(root / name, hf, published(name, hf))
            reader = SafetensorsReader(root / name)
            assert len(reader.files) > 2
            assert size == sum(info.nbytes for info in reader.tensors.values())
    return {name: root / name for name in ("bf16", *PUBLISHED)}


def are_quantised(name: str, shape: tuple[int, ...], scheme: str) -> bool:
    """Which weights DeepSeek-V3 and Kimi-K2-Thinking have quantised, by what they have not."""
    unquantised = ("embed_tokens", "lm_head", "shared_head", "eh_proj", ".gate.", "norm")
    if scheme == "int4":
        unquantised += ("self_attn", "shared_experts", ".layers.0.")  # the first layer's MLP is dense
    return len(shape) == 2 and not any(part in name for part in unquantised)


def assert_same_bits(got: np.ndarray, want: np.ndarray) -> None:
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    bits = BITS[want.dtype.itemsize]
    np.testing.assert_array_equal(np.ascontiguousarray(got).view(bits), np.ascontiguousarray(want).view(bits))


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_codes_and_scales_are_those_of_the_same_weights(name: str, folders: dict[str, Path]):
    """Every tensor, to the bit: that of a writer by the formats' specifications, and the project's own codes and scales.

    What is not quantised is as in the unquantised checkpoint.
    """
    write = {"fp8": fp8_blocks(), "int4": int4_words}[name]
    reader, stored, want = WeightReader(folders[name]), raw_tensors(folders[name]), {}
    for weight, value in raw_tensors(folders["bf16"]).items():
        if not are_quantised(weight, value.shape, name):
            want[weight] = value
            continue
        want |= write(weight, value.astype(np.float32))[0]
        codes, scale = quantise(value.astype(np.float32), PUBLISHED[name].scheme)
        assert_same_bits(reader.read_codes(weight), codes)
        assert_same_bits(reader.read_scale(weight), scale)
    assert set(stored) == set(want)
    for tensor, value in want.items():
        assert_same_bits(stored[tensor], value)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_conversion(name: str, folders: dict[str, Path]):
    """MLPs, and the MTP layer's, have the codes and scales that `jaxspec convert --quantization` makes of the same weights."""
    mesh, compared = mesh_of_one(), 0
    for load in (load_params, load_nextn):
        model, got = load(open_checkpoint(folders[name]), mesh)
        quantised, want = load(HFCheckpoint(folders["bf16"], name), mesh)
        assert schemes_of(model) == schemes_of(quantised)
        assert set(schemes_of(model).values()) == {PUBLISHED[name].scheme}
        for path in schemes_of(model):
            ours, theirs = got, want
            for key in path:
                ours, theirs = ours[key], theirs[key]
            for array in ("codes", "scale"):
                assert_same_bits(np.asarray(ours[array]), np.asarray(theirs[array]))
                compared += 1
    assert compared == {"fp8": 2 * (2 + 4 + 4), "int4": 2 * (2 + 2)}[name]


@pytest.mark.parametrize("name", PUBLISHED)
def test_configurations_are_read(name: str, folders: dict[str, Path]):
    """As any publisher's, and refused with other blocks or groups."""
    hf = json.loads((folders[name] / "config.json").read_text())
    assert hf["quantization_config"] == PUBLISHED[name].config
    plain = json.loads((folders["bf16"] / "config.json").read_text())
    assert plain == {key: value for key, value in hf.items() if key != "quantization_config"}
    check_quantisation(hf)
    text = json.dumps(hf)
    other = text.replace("[128, 128]", "[64, 128]").replace('"group_size": 32', '"group_size": 64')
    assert other != text
    with pytest.raises(ModelFormatError, match="is not supported"):
        check_quantisation(json.loads(other))


def test_kimis_list_names_what_is_not_quantised(folders: dict[str, Path]):
    """Of the modules that compressed-tensors looks at: engines that go by the list expect the tensors that are there."""
    config, reader = PUBLISHED["int4"].config, WeightReader(folders["int4"])
    linear = [
        name.removesuffix(".weight") for name in reader.tensors if re.search(r"_proj(_with_mqa)?\.weight$|^lm_", name)
    ]
    linear = [module for module in linear if not module.endswith("eh_proj")]  # no engine's quantised class
    assert len(linear) > 60

    def ignored(module: str) -> bool:
        return any(
            re.match(entry.removeprefix("re:"), module) if entry.startswith("re:") else entry == module
            for entry in config["ignore"]
        )

    for module in linear:
        assert ignored(module) == (f"{module}.weight" not in reader.quantised), module


@pytest.mark.parametrize(
    ("model", "layers", "name", "mtp", "text"),
    [
        ("moonlight", None, "bf16", True, "(34.4 GB)"),
        ("moonlight", None, "fp8", True, "DeepSeek-V3 (18.6 GB)"),
        ("moonlight", None, "int4", True, "experts only (13.0 GB)"),
        ("deepseek-v3", 2, "fp8", False, "folders of 15.8 GB"),
        ("deepseek-v3", 4, "fp8", False, "38.8 GB (a dense layer and three mixtures"),
        ("deepseek-v3", 4, "fp8", True, "54.3 with the MTP layer"),
    ],
)
def test_sizes_of_the_documentation(model: str, layers: int | None, name: str, mtp: bool, text: str):
    hf = random_checkpoint.checkpoint_config(model, layers, mtp=mtp)
    weights = random_checkpoint.stored_weights(hf, published(name, hf))
    size = sum(tensor.nbytes for weight in weights.values() for tensor in weight.values())
    assert re.search(r"\d+\.\d", text)[0] == f"{size / 1e9:.1f}"
    assert text in " ".join(PAGE.read_text(encoding="utf-8").split())


def test_other_architectures_are_not_published_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["step_vllm", "make", str(tmp_path / "out"), "--model", "qwen3-30b-a3b"]
    assert main([*words, "--quantization", "fp8"]) == 1
    assert "is for DeepseekV3ForCausalLM, and this model is Qwen3MoeForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_slices_without_their_mtp_layer(tmp_path: Path):
    words = ["step_vllm", "make", str(tmp_path), "--model", "tiny", "--quantization", "int4"]
    assert main([*words, "--layers", "1", "--no-mtp"]) == 0
    assert open_checkpoint(tmp_path).parts == ("embed", "000", "head")


def test_one_weight_is_in_memory_at_a_time(tmp_path: Path):
    """And each is made once, though it is several tensors."""
    weights = {f"w{i}": {f"w{i}.{part}": Tensor("F32", (64,)) for part in "ab"} for i in range(6)}
    made: dict[str, list[weakref.ref[np.ndarray]]] = {}

    def make(name: str) -> dict[str, np.ndarray]:
        assert name not in made
        assert not [ref for refs in made.values() for ref in refs if ref() is not None]
        arrays = {part: np.full(64, len(made), np.float32) for part in weights[name]}
        made[name] = [weakref.ref(array) for array in arrays.values()]
        return arrays

    assert write_checkpoint(tmp_path, weights, make, shard_bytes=1200) == 6 * 2 * 256
    reader = SafetensorsReader(tmp_path)
    assert len(reader.files) == 3
    for i in range(6):
        assert {reader.tensors[f"w{i}.{part}"].file for part in "ab"} == {reader.files[i // 2]}
        assert (reader.read(f"w{i}.b") == i).all()


@pytest.mark.long
@pytest.mark.usefixtures("lean_buckets")
@pytest.mark.parametrize("name", PUBLISHED)
def test_steps_of_a_published_folder(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The engine steps from it, and the record says what its weights are in."""
    monkeypatch.setenv("XLA_FLAGS", "")  # it adds to them
    out = tmp_path / "step.json"
    options = [
        "--rows",
        "2",
        "--context",
        "70",
        "--steps",
        "4",
        "--loop",
        "4",
        "--tokens",
        "0",
        "--lean",
        "--no-expert-count",
    ]
    assert main(["step", "--model", str(folders[name]), *options, "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    scheme = str(PUBLISHED[name].scheme)
    assert (result["model"], result["quantization"]) == (name, {"target": [scheme], "draft": [scheme]})
    assert result["rows"][0]["step_ms"] > 0
    memory = result["memory_of_a_device"]["plain"]
    assert memory["weights_held"] == memory["weights_declared"]


@pytest.mark.parametrize("command", ["step", "grammar", "readout", "adaptive"])
def test_layers_are_of_random_models(command: str, folders: dict[str, Path], capsys: pytest.CaptureFixture[str]):
    """A folder has the layers that it has."""
    assert main([command, "--model", str(folders["bf16"]), "--layers", "1"]) == 1
    assert "--layers 1 is for random models" in capsys.readouterr().err
