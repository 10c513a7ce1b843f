"""Quantised checkpoints: codes and scales as they are stored, and what they stand for."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh
from safetensors.numpy import save_file

from convert.convert import convert_checkpoint
from convert.progress import Silent
from convert.rounding import rounding_table
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import declare_target, load_nextn, load_params, open_checkpoint
from jaxspec.loading.hf_checkpoint import HFCheckpoint
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.quantise import Unquantised, as_e4m3
from jaxspec.loading.quantise import quantise as quantise_matrix
from jaxspec.loading.stored import StoredWeight
from jaxspec.loading.weight_reader import WeightReader
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import (
    TENSOR_AXIS,
    count_parameters,
    declarations,
    device_bytes,
    quantised,
    schemes_of,
    with_shardings,
)
from jaxspec.models.registry import read_config
from pallas_kernels.quant.reference import dequantise
from pallas_kernels.quant.schemes import FP8_BLOCK, SCHEMES, VALUES
from pallas_kernels.quant.values import Quantised
from tests.convert.edits import edit_config, edit_tensors
from tests.convert.quantised_checkpoints import FORMATS, ct_config, fp8_blocks, fp8_rows, quantise, raw_tensors
from tests.tiny_models import CONFIGS, tiny_checkpoint

pytestmark = pytest.mark.torch
Get = Callable[[str], Path]

# Formats that differ from another one in names or in the dtype of the scale.
ALIKE = ("deepseek-bf16-scales", "ct-fp8-block", "ct-fp8-tensor", "modelopt-nvfp4")


def of_mlps(name: str) -> bool:
    return "_proj.weight" in name and ".mlp." in name


def of_linear_maps(name: str) -> bool:
    return "_proj" in name and "eh_proj" not in name and name.endswith("weight")


class Notes(Silent):
    """What is printed beside the progress."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def note(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Experts of 160 columns and fewer rows, with a NextN layer; float32."""
    sizes = {"intermediate_size": 160, "moe_intermediate_size": 160, "hidden_size": 160, "num_hidden_layers": 2}
    return tiny_checkpoint("v3-mtp", tmp_path_factory.mktemp("source") / "hf", **sizes)


unpacked = jax.jit(dequantise, static_argnums=1)


def values(params: Any, schemes: Any, prefix: tuple[str | int, ...] = ()) -> Any:
    """Parameters, quantised ones as the float32 arrays that they stand for."""
    if not isinstance(params, dict):
        return np.asarray(params)
    if "codes" in params:
        return np.asarray(unpacked(Quantised(**params, scheme=schemes[prefix]), jnp.float32))
    return {key: values(child, schemes, (*prefix, key)) for key, child in params.items()}


def loaded(load: Any, folder: Path, mesh: Mesh) -> Any:
    model, params = load(open_checkpoint(folder), mesh)
    return values(params, schemes_of(model))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k in ALIKE else k for k in FORMATS])
def test_stored_weights_are_what_they_stand_for(kind: str, source: Path, tmp_path: Path, mesh: Mesh):
    """From the Hugging Face folder and the converted one: equal to the float32 checkpoint of the same values, to the bit."""
    stored, plain = quantise(source, tmp_path, kind, of_mlps)
    converted = convert_checkpoint(stored, tmp_path / "converted")
    schemes = read_manifest(converted).schemes
    assert set(schemes) == {"000", "001", "mtp"}
    assert {name for of_part in schemes.values() for name in of_part.values()} == {FORMATS[kind][2]}
    for load in (load_params, load_nextn):
        want = load(open_checkpoint(plain), mesh)[1]
        for folder in (stored, converted):
            jax.tree.map(np.testing.assert_array_equal, loaded(load, folder, mesh), want)


@pytest.mark.parametrize("kind", ["deepseek", "ct-fp8-channel"])
def test_rotary_rows_take_their_scales(kind: str, source: Path, tmp_path: Path, mesh: Mesh):
    """Attention is dequantised, and so is all with "bf16": rows that change places had their own scales before."""
    stored, plain = quantise(source, tmp_path, kind, of_linear_maps)
    want = load_params(open_checkpoint(plain), mesh, "bfloat16")[1]
    got = load_params(open_checkpoint(stored), mesh, "bfloat16")[1]
    for layer in (0, 1):
        jax.tree.map(
            np.testing.assert_array_equal, got["layers"][layer]["attention"], want["layers"][layer]["attention"]
        )
    everything = convert_checkpoint(stored, tmp_path / "bf16", quantization="bf16")
    assert read_manifest(everything).schemes == {}
    got = load_params(open_checkpoint(everything), mesh, "bfloat16")[1]
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_gpt_oss(tmp_path: Path, mesh: Mesh):
    """MXFP4 experts in one tensor, whose rows of gate and up take turns and take their scales along."""
    source = tiny_checkpoint("gpt-oss", tmp_path / "hf", intermediate_size=96)
    stored, plain = quantise(source, tmp_path, "gpt-oss", lambda name: name.endswith(("gate_up_proj", "down_proj")))
    assert {str(scheme) for scheme in open_checkpoint(stored).schemes["000"].values()} == {"mxfp4"}
    want = load_params(open_checkpoint(plain), mesh)[1]
    for folder in (stored, convert_checkpoint(stored, tmp_path / "converted")):
        jax.tree.map(np.testing.assert_array_equal, loaded(load_params, folder, mesh), want)
    narrow = load_params(open_checkpoint(convert_checkpoint(stored, tmp_path / "bf16", quantization="bf16")), mesh)[1]
    for layer, unquantised in narrow["layers"].items():
        for name in ("gate_up", "down"):
            rounded = np.asarray(want["layers"][layer]["mlp"][name]).astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(unquantised["mlp"][name], rounded)


def test_words_of_compressed_tensors():
    """The codes -8 to 7 as the library packs them, with the offset of 8 and the first one low."""
    words = np.array([[0x76543210, 0xFEDCBA98] * 2], np.uint32).view(np.int32)
    weight = StoredWeight(SCHEMES["int4_g32"], "packed", "scale", (1, 32))
    pairs = weight.read_codes(lambda *_: words)
    numbers = VALUES["int4"][np.stack([pairs & 15, pairs >> 4], axis=-1).reshape(1, -1)]
    np.testing.assert_array_equal(numbers, [[*range(-8, 8)] * 2])


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight_scale", "scale"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e8m0fnu])
def test_scale_dtypes(dtype: Any, suffix: str, tmp_path: Path):
    """Scales in any of their dtypes under any of their names are the same float32."""
    weight = np.random.default_rng(0).normal(size=(130, 260)).astype(np.float32)
    parts, value = fp8_blocks(suffix, dtype)("a.weight", weight)
    save_file(parts, tmp_path / "model.safetensors")
    reader = WeightReader(tmp_path)
    assert reader.quantised["a.weight"].scheme == FP8_BLOCK
    assert reader.read_scale("a.weight").dtype == np.float32
    np.testing.assert_array_equal(reader.read("a.weight"), value.astype(ml_dtypes.bfloat16))


def test_nvfp4_global_scales(source: Path, tmp_path: Path, mesh: Mesh):
    """ModelOpt stores the factor and compressed-tensors its reciprocal; gate and up keep theirs."""
    name = "model.layers.1.mlp.experts.3.{}_proj.{}"
    for kind, tensor in (("modelopt-nvfp4", "weight_scale_2"), ("ct-nvfp4", "weight_global_scale")):
        stored, _ = quantise(source, tmp_path / kind, kind, of_mlps)
        factor = load_params(open_checkpoint(stored), mesh)[1]["layers"][1]["mlp"]["gate_up"]["factor"][3]
        raw = raw_tensors(stored)
        want = [raw[name.format(half, tensor)].item() for half in ("gate", "up")]
        assert want[0] != want[1]
        np.testing.assert_allclose(factor, want if kind == "modelopt-nvfp4" else 1 / np.array(want), rtol=1e-6)


def test_codes_keep_their_bits(source: Path, tmp_path: Path, mesh: Mesh):
    """In any dtype of the model; and a part whose codes are no codes is refused instead of cast."""
    stored, _ = quantise(source, tmp_path, "deepseek", of_mlps)
    converted = convert_checkpoint(stored, tmp_path / "converted")
    codes = raw_tensors(stored)["model.layers.1.mlp.experts.3.up_proj.weight"].view(np.uint8)
    for folder in (stored, converted):
        for dtype in ("bfloat16", "float32"):
            got = load_params(open_checkpoint(folder), mesh, dtype)[1]["layers"][1]["mlp"]["gate_up"]
            assert got["codes"].dtype == FP8_BLOCK.codes
            assert got["scale"].dtype == jnp.float32
            np.testing.assert_array_equal(np.asarray(got["codes"])[3, 1].view(np.uint8), codes)
    checkpoint = open_checkpoint(converted)
    targets = with_shardings(declare_target(checkpoint, np.float32), mesh)
    part = {path[2:]: target for path, target in targets.items() if path[:2] == ("layers", 1)}
    place = ("mlp", "gate_up", "codes")
    cast = jax.ShapeDtypeStruct(part[place].shape, jnp.bfloat16, sharding=part[place].sharding)
    with pytest.raises(ModelFormatError, match=r"gate_up\.codes in float8_e4m3fn, not in bfloat16"):
        list(checkpoint.read_parts({"001": part | {place: cast}}))
    manifest = json.loads((converted / "manifest.json").read_text())
    del manifest["schemes"]["001"]["mlp.gate_up"]
    (converted / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ModelFormatError, match=r"disagree on mlp\.gate_up"):
        load_params(open_checkpoint(converted), mesh)


def test_draft_keeps_its_own_scheme(source: Path, tmp_path: Path, mesh: Mesh):
    """Which layers are quantised is read off their tensors: an MTP layer may be left out, or be the only one."""
    for draft in (True, False):

        def chosen(name: str, draft: bool = draft) -> bool:
            return of_mlps(name) and (".layers.2." in name) == draft

        stored, plain = quantise(source, tmp_path / str(draft), "deepseek", chosen)
        checkpoint = open_checkpoint(stored)
        assert {part for part, schemes in checkpoint.schemes.items() if schemes} == (
            {"mtp"} if draft else {"000", "001"}
        )
        for load in (load_params, load_nextn):
            want = load(open_checkpoint(plain), mesh)[1]
            jax.tree.map(np.testing.assert_array_equal, loaded(load, stored, mesh), want)


def test_weights_stored_in_several_ways_are_dequantised(source: Path, tmp_path: Path, mesh: Mesh):
    """One expert that a publisher left out, and another one with a scale of each row."""

    def chosen(name: str) -> bool:
        return of_mlps(name) and "experts.2.gate_proj" not in name

    stored, plain = quantise(source, tmp_path, "deepseek", chosen)
    name = "model.layers.1.mlp.experts.4.down_proj.weight"
    parts, value = fp8_rows(name, raw_tensors(plain)[name])
    unchanged = {n: t for n, t in raw_tensors(stored).items() if n != f"{name}_scale_inv"}
    save_file(unchanged | parts, stored / "model.safetensors")
    edit_tensors(plain, add={name: value})
    checkpoint = open_checkpoint(stored)
    assert set(checkpoint.schemes["001"]) == {("mlp", "shared", "gate_up"), ("mlp", "shared", "down")}
    got, want = (load_params(open_checkpoint(f), mesh, "bfloat16")[1]["layers"][1]["mlp"] for f in (stored, plain))
    for key in ("gate_up", "down"):
        np.testing.assert_array_equal(got[key], want[key])


def test_mesh_that_cuts_a_block_is_refused():
    """Half a block's rows, and Moonlight's shared experts: 22 blocks over 4 devices. Whole blocks are fine."""
    config = CONFIGS["llama"] | {"num_attention_heads": 4, "num_key_value_heads": 4}
    for inner, devices, fits in ((192, 2, False), (2816, 4, False), (2816, 2, True)):
        model = CausalLM(read_config(config | {"intermediate_size": inner}), np.dtype(np.float32))
        schemes = {("layers", 0, "mlp", "gate_up"): FP8_BLOCK, ("layers", 0, "mlp", "down"): FP8_BLOCK}
        mesh = jax.sharding.AbstractMesh((devices,), (TENSOR_AXIS,))
        if fits:
            assert with_shardings(quantised(model, schemes), mesh)["layers", 0, "mlp", "down", "scale"].shape == (1, 22)
        else:
            with pytest.raises(
                ConfigError, match=rf"size {devices} cuts layers\.0\.mlp\.\w+ inside a block of 128.*use 1.* or convert"
            ):
                with_shardings(quantised(model, schemes), mesh)


@pytest.mark.parametrize(("kind", "saved", "each_scale"), [("deepseek", 1, 4), ("ct-int4", 3, 2), ("ct-mxfp4", 3, 1)])
def test_bytes_of_packed_weights(kind: str, saved: float, each_scale: int, source: Path, tmp_path: Path):
    """Parameters are what a weight stands for, bytes what it is stored in; `saved` bytes for each element of codes."""
    stored, plain = quantise(source, tmp_path, kind, of_mlps)
    got, want = (declare_target(open_checkpoint(folder), ml_dtypes.bfloat16) for folder in (stored, plain))
    assert count_parameters(got) == count_parameters(want)
    codes, scales = (
        sum(v.get_value().size for v in declarations(got).values() if v.get_metadata()["init"] == array)
        for array in ("codes", "scale")
    )
    one: Any = jax.sharding.AbstractMesh((1,), (TENSOR_AXIS,))
    assert device_bytes(want, one) - device_bytes(got, one) == saved * codes - each_scale * scales
    converted = convert_checkpoint(stored, tmp_path / "converted")
    manifest = read_manifest(converted)
    assert manifest.parameters == count_parameters(want)
    on_disk = sum(file.stat().st_size for file in (converted / "weights").rglob("*") if file.is_file())
    checkpoint = HFCheckpoint(stored)
    needed = sum(map(checkpoint.converted_bytes, checkpoint.parts))
    assert needed <= on_disk < 1.2 * needed


@pytest.mark.parametrize(("quantization", "name", "error"), [("fp8", "fp8_block", 0.0265), ("int4", "int4_g32", 0.095)])
def test_unquantised_weights_are_quantised(
    quantization: Any, name: str, error: float, source: Path, tmp_path: Path, mesh: Mesh
):
    """With the error that the format has on normal weights, within a tenth; routers, attention and ends stay as they are."""
    notes = Notes()
    folder = convert_checkpoint(source, tmp_path / "out", quantization=quantization, progress=notes)
    schemes = read_manifest(folder).schemes
    experts = {"mlp.gate_up", "mlp.down"}
    both = experts | {"mlp.shared.gate_up", "mlp.shared.down"}
    assert schemes["001"] == dict.fromkeys(both if quantization == "fp8" else experts, name)
    assert set(schemes) == ({"000", "001", "mtp"} if quantization == "fp8" else {"001", "mtp"})
    printed = {line.split()[0]: line.split()[1:] for line in notes.lines if not line.startswith("changed")}
    columns = dict(zip(printed["layer"], printed["001"], strict=True))
    assert set(columns) == set(schemes["001"])
    for load in (load_params, load_nextn):
        got, want = loaded(load, folder, mesh), load(open_checkpoint(source), mesh)[1]
        wrong = jax.tree.map(lambda a, b: float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-9)), got, want)
        for path, value in jax.tree_util.tree_leaves_with_path(wrong):
            keys = [key.key for key in path]
            is_quantised = keys[-1] in ("gate_up", "down") and (quantization == "fp8" or "shared" not in keys)
            if is_quantised and keys[:2] != ["layers", 0]:
                assert value == pytest.approx(error, rel=0.1), path
                if keys[:2] == ["layers", 1]:
                    assert columns[".".join(keys[2:])] == f"{100 * value:.2f}"
            elif not (quantization == "fp8" and is_quantised):
                assert value == 0, path


@pytest.mark.parametrize("name", ["fp8_block", "int4_g32"])
def test_weights_are_quantised_once(name: str):
    """Though codes and scales are two parameters, of which a reader may want either first."""
    matrix, reads = np.random.default_rng(0).normal(size=(130, 160)).astype(np.float32), []

    def read(tensor: str, _: np.ndarray | None) -> np.ndarray:
        reads.append(tensor)
        return matrix

    weight, want = Unquantised(SCHEMES[name], "a", "a", matrix.shape), quantise_matrix(matrix, SCHEMES[name])
    for got in (weight.read_codes(read), weight.read_scale(read)):
        np.testing.assert_array_equal(got, want[0 if got.shape == want[0].shape else 1])
    assert reads == ["a"]
    np.testing.assert_array_equal(weight.read_scale(read), want[1])


def test_layers_with_the_same_figures_share_a_row():
    same = {"mlp.gate_up": 0.0265, "mlp.down": 0.02649}
    errors = {
        "embed": {},
        "000": {"mlp.gate_up": 0.03},
        "001": same,
        "002": same,
        "003": {},
        "004": same,
        "mtp": same,
        "head": {},
    }
    title, *lines = rounding_table(errors)
    assert "root mean square" in title
    assert [line.split() for line in lines] == [
        ["layer", "mlp.gate_up", "mlp.down"], ["000", "3.00", "-"], ["001-002", "2.65", "2.65"], ["004-mtp", "2.65", "2.65"],
    ]  # fmt: skip
    assert len({len(line) for line in lines}) == 1
    assert rounding_table({"embed": {}, "000": {}}) == []


def test_scales_of_a_cache_are_left_out(source: Path, tmp_path: Path, mesh: Mesh):
    """A cache here never takes them; a tensor with another name beside them is still an error."""
    stored, plain = quantise(source, tmp_path, "ct-int4", of_mlps)
    attention = "model.layers.0.self_attn"
    names = ("k_scale", "v_scale", "kv_b_proj.k_scale", "k_proj.k_scale", "v_proj.v_scale", "k_proj.output_scale")
    tensors = raw_tensors(stored) | {f"{attention}.{name}": np.full(1, 0.5, np.float32) for name in names}
    save_file(tensors, stored / "model.safetensors")
    want = load_params(open_checkpoint(plain), mesh)[1]
    for folder in (stored, convert_checkpoint(stored, tmp_path / "converted")):
        jax.tree.map(np.testing.assert_array_equal, loaded(load_params, folder, mesh), want)
    save_file(tensors | {f"{attention}.o_proj.output_scale": np.ones(1, np.float32)}, stored / "model.safetensors")
    with pytest.raises(
        ModelFormatError, match=r"holds tensor .*o_proj\.output_scale, which the architecture does not have"
    ):
        open_checkpoint(stored)


def test_clamps_before_the_cast():
    """A cast of more than 464 gives NaN; the largest of a block may be rounded up there, and is 448 times its scale."""
    weight = np.array([[460.0, -1e-6], [1e30, 447.0]], np.float32)
    for matrix in (weight, weight[:1], np.zeros((1, 2), np.float32)):
        codes, scale = quantise_matrix(matrix, FP8_BLOCK)
        assert np.isfinite(codes.astype(np.float32)).all()
        assert np.log2(scale) == np.round(np.log2(scale))
        np.testing.assert_allclose(codes.astype(np.float32) * scale, matrix, atol=0.04 * np.abs(matrix).max())
    codes, scale = quantise_matrix(np.zeros((1, 32), np.float32), SCHEMES["int4_g32"])
    assert scale.tolist() == [[1.0]]
    assert not codes.astype(np.float32).any()


@settings(max_examples=30)
@given(st.lists(st.floats(width=32), min_size=1, max_size=64), st.integers(-2, 2))
def test_casts_to_e4m3_are_those_of_ml_dtypes(numbers: list[float], ulps: int):
    """Of any numbers, of all values of e4m3 and all that lie between two of them, and of their neighbours in float32."""
    values = np.sort(VALUES["e4m3"][np.isfinite(VALUES["e4m3"])])
    ties = (values[1:] + values[:-1]) / 2
    bits = np.concatenate([values, ties, np.array(numbers, np.float32)]).astype(np.float32).view(np.int32) + ulps
    x = bits.view(np.float32)
    with np.errstate(invalid="ignore"):
        want = x.astype(FP8_BLOCK.codes)
    np.testing.assert_array_equal(as_e4m3(x).view(np.uint8), want.view(np.uint8))


def test_weights_that_are_quantised_already_stay_so(source: Path, tmp_path: Path):
    stored, _ = quantise(
        source, tmp_path, "ct-int4", lambda name: of_mlps(name) and "experts." in name and "shared" not in name
    )
    schemes = read_manifest(convert_checkpoint(stored, tmp_path / "out", quantization="fp8")).schemes
    assert schemes["001"] == {
        "mlp.gate_up": "int4_g32", "mlp.down": "int4_g32", "mlp.shared.gate_up": "fp8_block", "mlp.shared.down": "fp8_block",
    }  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), [
    ({"num_bits": 8, "type": "int"}, r"8 bits \('int'\)"),
    ({"num_bits": 4, "type": "int", "group_size": 128}, "4 bits in groups of 128"),
    ({"num_bits": 4, "type": "int", "group_size": 32, "actorder": "group"}, "g_idx"),
    ({"num_bits": 8, "type": "float", "symmetric": False}, "zero points"),
    ({"num_bits": 8, "type": "float", "strategy": "group"}, "scales of a 'group'"),
    ({"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [64, 64]}, r"blocks \[64, 64\]"),
])  # fmt: skip
def test_other_formats_are_refused_by_name(changes: dict[str, Any], message: str, source: Path, tmp_path: Path):
    folder = shutil.copytree(source, tmp_path / "in")
    edit_config(folder, quantization_config=ct_config(**changes))
    with pytest.raises(ModelFormatError, match=f"'compressed-tensors' with .*{message}.*is not supported"):
        open_checkpoint(folder)
    for method in ("gptq", "awq"):
        edit_config(folder, quantization_config={"quant_method": method})
        with pytest.raises(ModelFormatError, match=f"quantization '{method}' is not supported"):
            open_checkpoint(folder)


@pytest.mark.parametrize("scheme", ["int2", None, ["fp8_block"]])
def test_manifest_with_a_scheme_that_nobody_knows(scheme: Any, source: Path, tmp_path: Path):
    stored, _ = quantise(source, tmp_path, "deepseek", of_mlps)
    converted = convert_checkpoint(stored, tmp_path / "converted")
    manifest = json.loads((converted / "manifest.json").read_text())
    for part, path, name in (
        ("001", "mlp.gate_up", scheme),
        ("001", "norm", "fp8_block"),
        ("head", "norm", "fp8_block"),
    ):
        (converted / "manifest.json").write_text(json.dumps(manifest | {"schemes": {part: {path: name}}}))
        with pytest.raises(
            ModelFormatError, match=r"manifest\.json is damaged.*" + "|".join(SCHEMES) + "|is no weight"
        ):
            declare_target(open_checkpoint(converted), np.float32)
