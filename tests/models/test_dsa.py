"""DeepSeek sparse attention: layers that read the keys which an indexer chooses.

tests/models/test_parity.py and test_mtp.py compare it with the classes of transformers, tests/engine/test_equality.py runs it
with speculation, retraction and shared prefixes, and tests/kernels/test_sparse.py has what is chosen and read.
"""

import dataclasses
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert.convert import convert_checkpoint
from jaxspec import LLM
from jaxspec.config import EngineConfig, context_length, np_dtype
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.engine import check_attention_kernels, plan_engine
from jaxspec.models.cache import cache_stored_as, page_bytes
from jaxspec.models.config import ModelConfig, RopeConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.layers import DenseSpec, rope_tables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.mtp import NextN
from jaxspec.models.params import Declare, declarations
from jaxspec.models.registry import family_of, read_config
from jaxspec.models.sparse_mla import IndexerSpec, SparseMLASpec, for_contexts
from pallas_kernels.backend import Backends, use
from pallas_kernels.key_choice import mosaic
from pallas_kernels.mla_sparse.mosaic import mla_sparse
from tests.caches import empty_cache, single_request
from tests.convert.edits import edit_config, edit_tensors, tensors
from tests.convert.quantised_checkpoints import quantise
from tests.engine.scripted import numpy_params, one_device
from tests.engine.test_recurrent_states import write_folder
from tests.engine.test_sparse_backends import SIZES
from tests.models.test_mtp import bound
from tests.tiny_models import CONFIGS, tiny_checkpoint

VARIANTS = ("glm-dsa", pytest.param("v32", marks=pytest.mark.full))
COUNT = 16
DTYPES, LARGEST = ("float32", "bfloat16"), {"float32": 1e-4, "bfloat16": 0.05}
PAGE, T = 8, 24


def without(params: dict, name: str) -> dict:
    """A nested dict without the entries of this name."""
    return {k: without(v, name) if isinstance(v, dict) else v for k, v in params.items() if k != name}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_dsa_short_equals_dense(variant):
    """Up to `index_topk` tokens every key is chosen; after them the first layer that sees fewer says something else."""
    sparse = read_config(CONFIGS[variant])
    assert sparse.index_topk == COUNT
    assert for_contexts(sparse, None) is for_contexts(sparse, COUNT + 1) is sparse
    dense = for_contexts(sparse, COUNT)
    v3 = read_config(CONFIGS[variant] | {"architectures": ["DeepseekV3ForCausalLM"]})
    assert dataclasses.replace(dense, architecture=v3.architecture, index_topk=None) == v3

    ids = jnp.asarray(np.random.default_rng(0).integers(0, 256, T))
    params = numpy_params(CausalLM(sparse, jnp.float32), 0)
    meta = single_request(0, T, pages=3, page_size=PAGE, prefill=True)

    def streams(config: ModelConfig, params: dict) -> np.ndarray:
        model = bound(CausalLM(config, jnp.float32), params)
        cache = tuple(empty_cache(spec, 4, PAGE) for spec in model.cache_specs())
        layers = tuple(range(1, config.num_layers + 1))
        return np.stack(jax.jit(lambda ids: model(ids, cache, meta, capture=layers).captured)(ids))

    got, want = streams(sparse, params), streams(dense, without(params, "indexer"))
    np.testing.assert_allclose(got[:, :COUNT], want[:, :COUNT], atol=1e-4)
    assert (np.abs(got - want)[0, COUNT:].max(axis=1) > 1e-2).all()


@pytest.mark.parametrize(
    ("stored", "dtype"), [("auto", "float32"), *(pytest.param("fp8", d, marks=pytest.mark.full) for d in DTYPES)]
)
def test_index_keys_have_every_writer(stored, dtype):
    """A draft that attends for live tokens only, or for none, leaves the cache of one that attends for all."""
    config, dtype = read_config(CONFIGS["glm-dsa"]), np.dtype(jnp.dtype(dtype))
    draft = cache_stored_as(NextN(config, dtype), stored)
    draft = bound(draft, numpy_params(draft, 1))
    rng = np.random.default_rng(0)
    embedded, hidden = (jnp.asarray(rng.standard_normal((T, 64)), dtype) for _ in range(2))
    meta = single_request(0, T, pages=3, page_size=PAGE, prefill=True)
    live = LiveRows(jnp.asarray([T - 1, 9]), jnp.repeat(meta.prefill_tables, 2, axis=0), jnp.asarray([T, 10]))

    @jax.jit
    def run(embedded, hidden, cache):
        whole, written = draft(embedded, hidden, cache, meta)
        caught_up = draft.catch_up(embedded, hidden, live, cache, meta)
        return whole, written, caught_up, draft.write_keys(embedded, hidden, cache, meta)

    whole, written, (rows, after), keys = run(embedded, hidden, empty_cache(draft.cache_spec, 4, PAGE))
    assert rows.dtype == dtype
    np.testing.assert_allclose(
        *(np.asarray(x, np.float32) for x in (rows, whole[live.tokens])), atol=LARGEST[dtype.name]
    )
    # A latent with its key, or codes, scales and keys of latents; and an index key.
    assert [array.shape[-1] for array in written] == ([48, 32] if stored == "auto" else [32, 1, 16, 32])
    assert written[-1].dtype == dtype
    for arrays in zip(written, after, keys, strict=True):
        a, b, c = (np.asarray(array, np.float32) for array in arrays)
        np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(a, c, atol=1e-5)
        assert (np.abs(a[1:4]).reshape(T, -1).max(axis=1) > 0).all()


def full_layers(**changes) -> list[int]:
    config = read_config(CONFIGS["glm-dsa"] | {"indexer_types": None, "num_hidden_layers": 12} | changes)
    assert isinstance(config.nextn_layers[0].attention, SparseMLASpec)
    assert config.nextn_layers[0].attention.indexer is not None
    return [i for i, layer in enumerate(config.layers) if layer.attention.indexer]


def test_layers_that_share_a_choice():
    """As GLM-5.2's configuration says it in four ways; V3.2 knows none of them."""
    assert full_layers() == list(range(12))
    assert full_layers(index_topk_freq=4, index_skip_topk_offset=3) == [0, 1, 2, 6, 10]
    assert full_layers(index_topk_freq=3) == [0, 1, 4, 7, 10]
    assert full_layers(index_topk_pattern="FSSFSSFSSFSS", index_topk_freq=4) == [0, 3, 6, 9]
    # The last of thirteen is the NextN layer's.
    assert full_layers(indexer_types=["full", "shared"] * 6 + ["full"]) == [0, 2, 4, 6, 8, 10]
    v32 = {"architectures": ["DeepseekV32ForCausalLM"], "index_topk_freq": 4}
    assert full_layers(**v32) == list(range(12))
    for wrong, message in (
        ({"indexer_types": ["full"] * 11}, "has 11 layers in indexer_types and num_hidden_layers=12"),
        ({"indexer_types": ["shared"] * 12}, "indexer_types in config.json lets layer 0 share the keys that"),
        (
            {"index_topk_freq": 2, "index_skip_topk_offset": 0},
            "index_skip_topk_offset in config.json lets layer 0 share",
        ),
        ({"indexer_types": ["none"] * 12}, r"indexer_types='none', which is not supported \(supported: full, shared\)"),
        ({"index_topk_pattern": "FX" * 6}, 'index_topk_pattern in config.json must be a text of "F" and "S"'),
        ({"index_head_dim": 8}, "index_head_dim in config.json must be a whole number from 16"),
        ({"q_lora_rank": None}, "q_lora_rank=None, which is not supported .*an indexer reads the queries' latent"),
    ):
        with pytest.raises(ModelFormatError, match=message):
            full_layers(**wrong)


def test_longer_contexts_are_asked_for_on_a_gpu():
    """There they end at index_topk by default, where kernels attend to all tokens; elsewhere nothing is limited."""

    def length(max_model_len, *, on_gpu, **options):
        config = EngineConfig(max_model_len=max_model_len, **options)
        return context_length(config, model_max_position=163840, index_topk=2048, on_gpu=on_gpu)

    assert length(None, on_gpu=True) == 2048
    assert length(None, on_gpu=False) == 4096
    assert length(None, on_gpu=True, attention_backend="reference") == 163840
    for asked in (2047, 2048, 2049, 163840):
        assert length(asked, on_gpu=True) == length(asked, on_gpu=False) == asked
    for on_gpu in (False, True):
        with pytest.raises(ConfigError, match="over the model's own limit of 163840"):
            length(163841, on_gpu=on_gpu)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> None:
    client = SimpleNamespace(process_index=lambda: 0)
    said = {"platform": "gpu", "compute_capability": capability, "device_kind": "a GPU", "id": 0, "process_index": 0}
    device = type("Device", (), said | {"client": client})()  # with a hash, as meshes ask of their devices
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize(
    ("capability", "dtype", "changes", "refused"),
    [
        ("9.0", "bfloat16", {}, None),
        ("9.0", "bfloat16", {"index_n_heads": 64}, None),
        ("8.0", "bfloat16", {}, "it needs compute capability 9.0, and a GPU has another"),
        ("9.0", "float32", {}, "it computes in bfloat16, not in float32"),
        ("9.0", "bfloat16", {"kv_lora_rank": 32}, "it supports latents of 512 + 64, not 32 + 64"),
        ("9.0", "bfloat16", {"index_n_heads": 16}, "it supports 32 or 64 heads of 128, not 16 of 128"),
    ],
)
def test_gpus_choose_keys_in_kernels_or_not_at_all(capability, dtype, changes, refused, monkeypatch):
    """Plain XLA does it there where it is asked for, and nowhere by itself; no layer of shorter contexts needs to."""
    on_gpu(monkeypatch, capability)
    sparse = read_config(CONFIGS["glm-dsa"] | SIZES | {"index_topk": COUNT} | changes)
    long, short = (
        [kind(config, np_dtype(dtype)) for kind in (CausalLM, NextN)]
        for config in (sparse, for_contexts(sparse, COUNT))
    )
    for backend in ("auto", "mosaic", "triton"):
        config = EngineConfig(attention_backend=backend)
        check_attention_kernels(short, config, dtype, shorter=COUNT)
        for modules in (long, long[1:]):
            if refused is None:
                check_attention_kernels(modules, config, dtype, shorter=COUNT)
                continue
            message = (
                f"this model's attention over chosen keys (contexts of over {COUNT} tokens) has no kernels here: {refused}; "
                f"use max_model_len (--max-model-len) of at most {COUNT}, where it attends to all tokens, or attention_backend "
                "(--attention-backend) reference, which is slow, or run it on a CPU"
            )
            with pytest.raises(ConfigError, match=re.escape(message)):
                check_attention_kernels(modules, config, dtype, shorter=COUNT)
    check_attention_kernels(long, EngineConfig(attention_backend="reference"), dtype, shorter=COUNT)


def test_a_folder_on_a_gpu(tmp_path, monkeypatch):
    """Is refused before its weights are read, with the contexts that would do; others end where they are asked to."""
    on_gpu(monkeypatch, "9.0")
    sizes = SIZES | {"index_topk": COUNT}
    supported, other = tmp_path / "supported", tmp_path / "other"
    for folder, heads in ((supported, 32), (other, 16)):
        folder.mkdir()
        write_folder(folder, "glm-dsa", **sizes | {"index_n_heads": heads})
    for folder, options, context in (
        (supported, {}, COUNT),
        (supported, {"max_model_len": 300}, 300),
        (other, {}, COUNT),
        (other, {"max_model_len": COUNT}, COUNT),
        (other, {"max_model_len": 300, "attention_backend": "reference"}, 300),
    ):
        plan = plan_engine(folder, EngineConfig(**options))
        assert (plan.on_gpu, plan.dtype, plan.context) == (True, "bfloat16", context)
        assert len(plan.caches[0].arrays) == 1 + (context > COUNT)
    for folder, options, why in ((other, {}, "not 16 of 128"), (supported, {"dtype": "float32"}, "not in float32")):
        with pytest.raises(
            ConfigError, match=rf"{why}; use max_model_len \(--max-model-len\) of at most {COUNT}, where"
        ):
            plan_engine(folder, EngineConfig(max_model_len=COUNT + 1, **options))


@pytest.mark.torch
def test_short_contexts_do_without_indexers(tmp_path, monkeypatch):
    """From a Hugging Face folder and a converted one alike; an engine asks for its own length."""
    folder = tiny_checkpoint("glm-dsa", tmp_path / "hf")
    folders = folder, convert_checkpoint(folder, tmp_path / "converted")
    for load in (load_params, load_nextn):
        loaded = [[load(open_checkpoint(f), one_device(), context=n) for f in folders] for n in (COUNT, COUNT + 1)]
        for (_, a), (_, b) in loaded:
            jax.tree.map(np.testing.assert_array_equal, a, b)
        short, long = ((set(declarations(model)), params) for (model, params), _ in loaded)
        assert short[0] < long[0]
        assert {path[path.index("indexer") :] for path in long[0] - short[0]} == {
            ("indexer", "q"), ("indexer", "k"), ("indexer", "weights"), ("indexer", "norm", "weight"),
            ("indexer", "norm", "bias"),
        }  # fmt: skip
        jax.tree.map(np.testing.assert_array_equal, short[1], without(long[1], "indexer"))

    asked = []

    def stop(*_args, context, **_options):
        asked.append(context)
        raise InterruptedError

    monkeypatch.setattr("jaxspec.loading.engine.load_params", stop)
    for length in (COUNT, COUNT + 1):
        with pytest.raises(InterruptedError):
            LLM(str(folders[1]), max_model_len=length)
    assert asked == [COUNT, COUNT + 1]


@pytest.mark.torch
def test_indexers_of_fp8_checkpoints(tmp_path):
    """Published ones have codes and block scales for two of its matrices; whatever the scheme, they load as numbers."""
    folder = tiny_checkpoint("v32", tmp_path / "hf", index_n_heads=9)  # codes that are no whole blocks
    stored, plain = quantise(
        folder, tmp_path, "deepseek", lambda name: name.endswith(("indexer.wq_b.weight", "wk.weight"))
    )
    for load in (load_params, load_nextn):
        (_, got), (_, want) = (load(open_checkpoint(f), one_device(), "float32") for f in (stored, plain))
        jax.tree.map(np.testing.assert_array_equal, got, want)
    for context in (None, COUNT):
        load_params(open_checkpoint(stored), one_device(), "bfloat16", context=context)


@pytest.mark.torch
def test_index_share_strict_load(tmp_path):
    """Layers that share another's choice need no indexer; its tensors are harmless there by name, nothing else is."""
    folder = tiny_checkpoint("glm-dsa", tmp_path / "hf")
    indexed = {name.split(".")[2] for name in tensors(folder) if ".indexer." in name}
    assert indexed == {"0", "2", "3"}  # 3 is the NextN layer
    assert open_checkpoint(folder).parts == ("embed", "000", "001", "002", "head", "mtp")
    name = "model.layers.{}.self_attn.indexer.{}"
    edit_tensors(folder, add={name.format(1, "wk.weight"): np.zeros((32, 64), np.float32)})
    open_checkpoint(folder)
    extra = name.format(1, "wk.bias")
    edit_tensors(folder, add={extra: np.zeros(32, np.float32)})
    with pytest.raises(ModelFormatError, match=rf"holds tensor {extra}, which"):
        open_checkpoint(folder)
    edit_tensors(folder, remove=[extra, missing := name.format(2, "k_norm.bias")])
    with pytest.raises(ModelFormatError, match=re.escape(missing)):
        open_checkpoint(folder)
    edit_config(folder, architectures=["DeepseekV3ForCausalLM"])
    with pytest.raises(ModelFormatError, match=r"self_attn\.indexer\.\S+ \(and \d+ more\), which"):
        open_checkpoint(folder)


@pytest.mark.long
@pytest.mark.parametrize(("prompt", "windows", "loops"), [(0, (32, 4), 0), (0, (128, 4), 0), (1100, (8, 4), 1)])
def test_a_layer_in_kernels_lowers_for_cuda(monkeypatch, prompt, windows, loops):
    """With DeepSeek-V3.2's heads. Decode steps have neither loop nor sort, so that they can be one CUDA graph, also those
    of more tokens than are worked on at a time; prompts loop."""
    device = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="H200", core_count=132)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    for jitted in (mosaic.choose_keys, mosaic.scores, mla_sparse):
        jitted.clear_cache()
    rope, indexer = RopeConfig(64, 10000.0), IndexerSpec(64, 128, interleaved=False)
    spec = SparseMLASpec(128, 512, 1536, 128, 64, 128, 0.1, rope, count=2048, indexer=indexer)
    graphdef, params = nnx.split(spec.build(1024, Declare(np.dtype(jnp.bfloat16))))
    (D, n), P, pages = windows, prompt, 512
    T = P + D * n

    def of(*dims: int, dtype=jnp.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype)

    E = int(P > 0)
    meta = StepMetadata(
        of(T),
        of(T),
        of(T),
        of(T, dtype=jnp.bool_),
        of(E, pages),
        of(P),
        of(E),
        of(D, pages),
        of(D, n),
        of(E),
        of(E),
        of(D),
    )
    cache = tuple(of(99, 64, width, dtype=jnp.bfloat16) for width in (576, 128))

    def layer(params, x, cache, meta):
        return nnx.merge(graphdef, params)(x, cache, meta, rope_tables(rope, meta.positions))

    with use(Backends()) as ran:
        traced = jax.jit(layer).trace(params, of(T, 1024, dtype=jnp.bfloat16), cache, meta)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    kernels = ("key_choice", "kv_write", "mla_query", "mla_sparse")
    assert {name: ran[name] for name in kernels} == {name: {"mosaic"} for name in kernels}
    assert (text.count("stablehlo.while"), text.count("stablehlo.sort")) == (loops, 0)


def test_bytes_of_published_layers():
    """Index keys take 256 bytes of bfloat16 a token, beside 1152 of a latent or 656 in FP8; layers that share have none."""
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    config = read_config(CONFIGS["glm-dsa"] | sizes)
    for stored, want in (("auto", [1408, 1152, 1408]), ("fp8", [912, 656, 912])):
        specs = cache_stored_as(CausalLM(config, np.dtype(jnp.bfloat16)), stored).cache_specs()
        assert [page_bytes([spec], 1, {"tensor": 1}) for spec in specs] == want
        assert all(spec.paged for spec in specs)
    names = {piece.name for pieces in family_of(config).key_map(config).values() for piece in pieces}
    assert sum(".indexer." in name for name in names) == 2 * 5


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
