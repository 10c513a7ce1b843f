"""DeepSeek sparse attention up to `index_topk` tokens, where it chooses every key: the same model without an indexer."""

import dataclasses

import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.config import EngineConfig, resolve
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import open_checkpoint
from jaxspec.models.layers import DenseSpec
from jaxspec.models.registry import family_of, read_config
from tests.convert.edits import edit_config, edit_tensors, tensors
from tests.tiny_models import CONFIGS, tiny_checkpoint

DSA = {"v32": "v3", "glm-dsa": "glm4-lite"}


@pytest.mark.parametrize("variant", DSA)
def test_dsa_short_equals_dense(variant):
    """The same layers and key map as the dense architecture's; tests/models/test_parity.py runs the real indexer."""
    hf = CONFIGS[variant]
    sparse = read_config(hf)
    dense = read_config(hf | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert sparse.index_topk == hf["index_topk"]
    assert dataclasses.replace(sparse, architecture=dense.architecture, index_topk=None) == dense
    names = [
        sorted(piece.name for pieces in family_of(c).key_map(c).values() for piece in pieces) for c in (sparse, dense)
    ]
    assert names[0] == names[1]


def test_longer_contexts_are_refused_and_the_default_ends_at_index_topk():
    def length(max_model_len, *, on_gpu):
        options = EngineConfig(max_model_len=max_model_len)
        limits = {"model_max_position": 163840, "index_topk": 2048, "page_bytes": 1000, "free_bytes": 10**9}
        return resolve(options, **limits, on_gpu=on_gpu).max_model_len

    assert length(None, on_gpu=True) == length(None, on_gpu=False) == length(2048, on_gpu=True) == 2048
    assert length(100, on_gpu=False) == 100
    with pytest.raises(
        ConfigError, match=r"max_model_len \(\S+\) 2049 is over 2048: .*\(index_topk\).*Use at most 2048"
    ):
        length(2049, on_gpu=True)
    with pytest.raises(ConfigError, match="over the model's own limit of 163840"):
        length(163841, on_gpu=True)


@pytest.mark.torch
def test_an_engine_for_longer_contexts_is_not_built(tmp_path):
    folder = tiny_checkpoint("v32", tmp_path / "hf")
    with pytest.raises(ConfigError, match=r"max_model_len \(\S+\) 129 is over 128: .*index_topk"):
        LLM(str(folder), max_model_len=129)


@pytest.mark.torch
def test_index_share_strict_load(tmp_path):
    """Layers that share another's choice have no indexer; its tensors are harmless by name, nothing else is."""
    folder = tiny_checkpoint("glm-dsa", tmp_path / "hf")
    indexed = {name.split(".")[2] for name in tensors(folder) if ".indexer." in name}
    assert indexed == {"0", "2", "3"}  # 3 is the NextN layer
    assert open_checkpoint(folder).parts == ("embed", "000", "001", "002", "head", "mtp")
    extra = "model.layers.1.self_attn.indexer.wk.bias"
    edit_tensors(folder, add={extra: np.zeros(32, np.float32)})
    with pytest.raises(ModelFormatError, match=rf"holds tensor {extra}, which"):
        open_checkpoint(folder)
    edit_tensors(folder, remove=[extra])
    edit_config(folder, architectures=["DeepseekV3ForCausalLM"])
    with pytest.raises(ModelFormatError, match=r"self_attn\.indexer\.\S+ \(and \d+ more\), which"):
        open_checkpoint(folder)


def test_layers_of_a_kind_each():
    """`mlp_layer_types` says it layer by layer; without it the first are dense, as many as in the architecture's class."""
    hf = CONFIGS["glm4-lite"] | {"num_hidden_layers": 5}
    base = {key: value for key, value in hf.items() if key != "first_k_dense_replace"}

    def dense(**changes):
        layers = read_config(base | changes).layers
        return [i for i, layer in enumerate(layers) if isinstance(layer.mlp, DenseSpec)]

    kinds = ["sparse", "dense", "sparse", "dense", "sparse"]
    assert dense(mlp_layer_types=kinds, first_k_dense_replace=1) == [1, 3]
    assert dense() == [0]
    assert dense(architectures=["GlmMoeDsaForCausalLM"]) == [0, 1, 2]
    assert dense(first_k_dense_replace=2) == [0, 1]
    for wrong, message in (
        (["dense"] * 4, "has 4 mlp_layer_types and num_hidden_layers=5"),
        ([*kinds[:4], "moe"], r"mlp_layer_types='moe', which is not supported \(supported: dense, sparse\)"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            dense(mlp_layer_types=wrong)
