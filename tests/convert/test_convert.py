"""Conversion and loading, from Hugging Face folders that transformers wrote."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from safetensors.numpy import save_file

from convert.convert import convert_checkpoint
from convert.digests import ShardDigests
from convert.progress import Lines
from jaxspec.errors import ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint, read_model_config
from jaxspec.loading.hf_folder import eos_token_ids
from jaxspec.loading.manifest import read_manifest
from jaxspec.loading.safetensors_reader import read_header
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import declarations, nest
from tests.convert.edits import edit_config, edit_tensors, tensors
from tests.tiny_models import CONFIGS, tiny_checkpoint, variants

pytestmark = pytest.mark.torch
Get = Callable[[str], Path]


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: (tuple(x.shape), jnp.dtype(x.dtype)), tree)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "bfloat16"])
@pytest.mark.parametrize("variant", variants())
def test_tree_is_what_the_model_declares(variant: str, dtype: str, converted: Get, mesh: Mesh):
    model, params = load_params(open_checkpoint(converted(variant)), mesh, dtype)
    expected = nest({path: v.get_value() for path, v in declarations(model).items()})
    assert shapes(params) == shapes(expected)
    if any(isinstance(layer.mlp, MoESpec) for layer in model.config.layers):
        assert params["layers"][1]["mlp"]["router"].dtype == jnp.float32


@pytest.mark.long
@pytest.mark.parametrize("variant", variants("kimi-k25"))  # whose class saves other names than are published
def test_both_spellings_of_a_config_mean_the_same(variant: str, converted: Get, tmp_path: Path, mesh: Mesh):
    folder = tiny_checkpoint(variant, tmp_path / "in", spelling="transformers")
    config = json.loads((folder / "config.json").read_text())
    assert ("rope_parameters" in config) != (variant == "kimi-linear")  # which has no rotary embedding
    assert "scoring_func" not in config
    out = convert_checkpoint(folder, tmp_path / "out")
    ours, hub = read_model_config(out), read_model_config(converted(variant))
    assert dataclasses.replace(ours, dtype=hub.dtype) == hub
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(open_checkpoint(out), mesh, "float32")[1],
        load_params(open_checkpoint(converted(variant)), mesh, "float32")[1],
    )


def test_mla_with_q_lora(source: Get, converted: Get, mesh: Mesh):
    t, params = tensors(source("v3")), load_params(open_checkpoint(converted("v3")), mesh)[1]
    a, prefix = params["layers"][1]["attention"], "model.layers.1.self_attn."
    order = np.r_[0:16:2, 1:16:2]  # interleaved rotary pairs -> halves
    q_b = t[f"{prefix}q_b_proj.weight"].reshape(4, 32, 24)
    kv_a = t[f"{prefix}kv_a_proj_with_mqa.weight"]
    kv_b = t[f"{prefix}kv_b_proj.weight"].reshape(4, 16 + 24, 32)
    np.testing.assert_array_equal(a["qkv_a"][:24], t[f"{prefix}q_a_proj.weight"])
    np.testing.assert_array_equal(a["qkv_a"][24:56], kv_a[:32])
    np.testing.assert_array_equal(a["qkv_a"][56:], kv_a[32:][order])
    np.testing.assert_array_equal(a["q_b"][:, :16], q_b[:, :16])
    np.testing.assert_array_equal(a["q_b"][:, 16:], q_b[:, 16:][:, order])
    np.testing.assert_array_equal(a["w_uk"], kv_b[:, :16])
    np.testing.assert_array_equal(a["w_uv"], kv_b[:, 16:])
    np.testing.assert_array_equal(a["o"], t[f"{prefix}o_proj.weight"].reshape(64, 4, 24))
    np.testing.assert_array_equal(a["q_norm"]["weight"], t[f"{prefix}q_a_layernorm.weight"])
    np.testing.assert_array_equal(a["kv_norm"]["weight"], t[f"{prefix}kv_a_layernorm.weight"])


def test_mla_without_q_lora(source: Get, converted: Get, mesh: Mesh):
    t, params = tensors(source("moonlight")), load_params(open_checkpoint(converted("moonlight")), mesh)[1]
    a, prefix = params["layers"][2]["attention"], "model.layers.2.self_attn."
    order = np.r_[0:16, 16:32:2, 17:32:2]
    np.testing.assert_array_equal(a["q"], t[f"{prefix}q_proj.weight"].reshape(4, 32, 64)[:, order])
    np.testing.assert_array_equal(a["kv_a"], t[f"{prefix}kv_a_proj_with_mqa.weight"][np.r_[0:32, 32:48:2, 33:48:2]])


def test_rope_rows_stay_where_the_config_says_halves(source: Get, tmp_path: Path, mesh: Mesh):
    folder = shutil.copytree(source("v3"), tmp_path / "in")
    edit_config(folder, rope_interleave=False)
    params = load_params(open_checkpoint(convert_checkpoint(folder, tmp_path / "out")), mesh)[1]
    q_b = tensors(folder)["model.layers.0.self_attn.q_b_proj.weight"]
    np.testing.assert_array_equal(params["layers"][0]["attention"]["q_b"], q_b.reshape(4, 32, 24))


def test_moe_and_dense_mlp(source: Get, converted: Get, mesh: Mesh):
    t, params = tensors(source("v3")), load_params(open_checkpoint(converted("v3")), mesh)[1]
    dense, moe = params["layers"][0]["mlp"], params["layers"][1]["mlp"]
    np.testing.assert_array_equal(dense["gate_up"][0], t["model.layers.0.mlp.gate_proj.weight"])
    np.testing.assert_array_equal(dense["gate_up"][1], t["model.layers.0.mlp.up_proj.weight"])
    np.testing.assert_array_equal(dense["down"], t["model.layers.0.mlp.down_proj.weight"])
    prefix = "model.layers.1.mlp."
    for e in range(8):
        np.testing.assert_array_equal(moe["gate_up"][e, 0], t[f"{prefix}experts.{e}.gate_proj.weight"])
        np.testing.assert_array_equal(moe["gate_up"][e, 1], t[f"{prefix}experts.{e}.up_proj.weight"])
        np.testing.assert_array_equal(moe["down"][e], t[f"{prefix}experts.{e}.down_proj.weight"])
    np.testing.assert_array_equal(moe["router"], t[f"{prefix}gate.weight"])
    np.testing.assert_array_equal(moe["router_bias"], t[f"{prefix}gate.e_score_correction_bias"])
    np.testing.assert_array_equal(moe["shared"]["gate_up"][1], t[f"{prefix}shared_experts.up_proj.weight"])


def test_gqa_and_tied_embeddings(source: Get, converted: Get, mesh: Mesh):
    t, params = tensors(source("qwen3-tied")), load_params(open_checkpoint(converted("qwen3-tied")), mesh)[1]
    a, prefix = params["layers"][1]["attention"], "model.layers.1.self_attn."
    q = t[f"{prefix}q_proj.weight"].reshape(2, 2, 32, 64)  # key heads, query heads of each, head size, hidden
    np.testing.assert_array_equal(a["qkv"][:, :2], q)
    np.testing.assert_array_equal(a["qkv"][:, 2], t[f"{prefix}k_proj.weight"].reshape(2, 32, 64))
    np.testing.assert_array_equal(a["qkv"][:, 3], t[f"{prefix}v_proj.weight"].reshape(2, 32, 64))
    np.testing.assert_array_equal(a["o"], t[f"{prefix}o_proj.weight"].reshape(64, 2, 2, 32))
    np.testing.assert_array_equal(a["k_norm"]["weight"], t[f"{prefix}k_norm.weight"])
    assert "head" not in params
    np.testing.assert_array_equal(params["embed"]["weight"], t["model.embed_tokens.weight"])


def test_nextn(source: Get, converted: Get, mesh: Mesh):
    t, (model, params) = tensors(source("v3-mtp")), load_nextn(open_checkpoint(converted("v3-mtp")), mesh)
    assert shapes(params) == shapes(nest({path: v.get_value() for path, v in declarations(model).items()}))
    np.testing.assert_array_equal(params["eh_proj"], t["model.layers.3.eh_proj.weight"])
    np.testing.assert_array_equal(params["norm"]["weight"], t["model.layers.3.shared_head.norm.weight"])
    np.testing.assert_array_equal(params["enorm"]["weight"], t["model.layers.3.enorm.weight"])
    np.testing.assert_array_equal(params["layer"]["mlp"]["router"], t["model.layers.3.mlp.gate.weight"])


def test_nextn_copies_of_embedding_and_head_are_optional(source: Get, converted: Get, tmp_path: Path, mesh: Mesh):
    folder = shutil.copytree(source("v3-mtp"), tmp_path / "in")
    edit_tensors(folder, remove=["model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"])
    out = convert_checkpoint(folder, tmp_path / "out")
    jax.tree.map(
        np.testing.assert_array_equal,
        load_nextn(open_checkpoint(out), mesh)[1],
        load_nextn(open_checkpoint(converted("v3-mtp")), mesh)[1],
    )


def test_several_nextn_layers_are_refused(source: Get, tmp_path: Path):
    folder = shutil.copytree(source("v3-mtp"), tmp_path / "in")
    first, second = "model.layers.3.", "model.layers.4."
    edit_config(folder, num_nextn_predict_layers=2)
    more = {name.replace(first, second): t for name, t in tensors(folder).items() if name.startswith(first)}
    edit_tensors(folder, add=more)
    message = (
        r"the weights of several NextN \(MTP\) layers \(model\.layers\.4\.\* is the second one's\); models with one"
    )
    with pytest.raises(ModelFormatError, match=message):
        convert_checkpoint(folder, tmp_path / "out")


def test_nextn_that_the_config_promises_and_the_weights_lack(source: Get, tmp_path: Path, mesh: Mesh):
    """transformers keeps `num_nextn_predict_layers` and drops the layer when it saves a model."""
    folder = shutil.copytree(source("v3"), tmp_path / "in")
    edit_config(folder, num_nextn_predict_layers=1)
    out = convert_checkpoint(folder, tmp_path / "out")
    assert read_manifest(out).parts == ("embed", "000", "001", "002", "head")
    with pytest.raises(ModelFormatError, match="has no NextN"):
        load_nextn(open_checkpoint(out), mesh)


def test_fp8_equals_the_checkpoint_that_torch_dequantised(source: Get, converted: Get, tmp_path: Path, mesh: Mesh):
    stored = read_header(source("v3-fp8") / "model.safetensors")
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight"].dtype == "F8_E4M3"
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 1)
    fp8 = convert_checkpoint(source("v3-fp8"), tmp_path / "out", quantization="bf16")
    plain = converted("v3-fp8-dequantised")
    assert read_manifest(fp8).dtype == "bfloat16"
    assert "quantization_config" not in json.loads((fp8 / "config.json").read_text())
    for load in (load_params, load_nextn):
        jax.tree.map(
            np.testing.assert_array_equal, load(open_checkpoint(fp8), mesh)[1], load(open_checkpoint(plain), mesh)[1]
        )


def test_bfloat16_load_rounds_the_float32_one(converted: Get, mesh: Mesh):
    wide, narrow = (load_params(open_checkpoint(converted("v3")), mesh, d)[1] for d in ("float32", "bfloat16"))
    jax.tree.map(lambda w, n: np.testing.assert_array_equal(w.astype(n.dtype), n), wide, narrow)
    np.testing.assert_array_equal(wide["layers"][1]["mlp"]["router"], narrow["layers"][1]["mlp"]["router"])


def test_dtype_defaults_to_the_stored_one(converted: Get, mesh: Mesh):
    for variant, dtype in [("llama", jnp.float32), ("v3-fp8", jnp.bfloat16)]:
        assert load_params(open_checkpoint(converted(variant)), mesh)[1]["embed"]["weight"].dtype == dtype


def test_float16_is_kept_in_float32(source: Get, tmp_path: Path, mesh: Mesh):
    folder = shutil.copytree(source("llama"), tmp_path / "in")
    edit_config(folder, torch_dtype="float16")
    half = {name: t.astype(np.float16) for name, t in tensors(folder).items()}
    save_file(half, folder / "model.safetensors")
    out = convert_checkpoint(folder, tmp_path / "out")
    assert read_manifest(out).dtype == "float32"
    np.testing.assert_array_equal(
        load_params(open_checkpoint(out), mesh)[1]["embed"]["weight"],
        half["model.embed_tokens.weight"].astype(np.float32),
    )


def test_manifest(source: Get, converted: Get):
    import hashlib

    manifest = read_manifest(converted("v3-mtp"))
    assert manifest.source == "v3-mtp"
    assert manifest.revision is None
    assert manifest.parts == ("embed", "000", "001", "002", "head", "mtp")
    weights = (source("v3-mtp") / "model.safetensors").read_bytes()
    assert manifest.shards == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    of_target = {n: t for n, t in tensors(source("v3-mtp")).items() if not n.startswith("model.layers.3.")}
    assert manifest.parameters == sum(t.size for t in of_target.values())
    copies = ("embed_tokens.weight", "shared_head.head.weight")
    nextn = {n: t for n, t in tensors(source("v3-mtp")).items() if n.startswith("model.layers.3.")}
    assert manifest.nextn_parameters == sum(t.size for n, t in nextn.items() if not n.endswith(copies))


def test_sharded_checkpoint(source: Get, converted: Get, tmp_path: Path, mesh: Mesh):
    folder = shutil.copytree(source("v2-lite"), tmp_path / "in")
    everything = tensors(folder)
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate(np.array_split(sorted(everything), 3)):
        weight_map |= dict.fromkeys(map(str, names), f"model-{i}.safetensors")
        save_file({str(n): everything[n] for n in names}, folder / f"model-{i}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    out = convert_checkpoint(folder, tmp_path / "out")
    assert list(read_manifest(out).shards) == [f"model-{i}.safetensors" for i in range(3)]
    jax.tree.map(
        np.testing.assert_array_equal,
        load_params(open_checkpoint(out), mesh)[1],
        load_params(open_checkpoint(converted("v2-lite")), mesh)[1],
    )


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [(2, None, (2,)), (2, 2, (2,)), (2, 7, (7, 2)), ([2, 3], [7, 2], (7, 2, 3)), (None, 7, (7,)), (None, None, ())],
)
def test_eos_ids_are_merged(tmp_path: Path, config: Any, generation: Any, expected: tuple[int, ...]):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["llama"] | {"eos_token_id": config}))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert eos_token_ids(tmp_path) == expected
    assert read_model_config(tmp_path).eos_token_ids == expected


def test_plain_lines_show_the_rate(source: Get, tmp_path: Path):
    import io

    stream = io.StringIO()
    convert_checkpoint(source("llama"), tmp_path / "out", progress=Lines(stream))
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("converting llama: ")
    assert "100 %" in lines[-1]
    assert lines[-1].endswith("MB/s")


def test_digests_stop_when_the_conversion_fails(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"x" * 100)
    with pytest.raises(KeyboardInterrupt), ShardDigests([tmp_path / "x"]):
        raise KeyboardInterrupt
