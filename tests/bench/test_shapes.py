"""The published sizes that benchmarks know: their parameters, their floors, and the kernels that their steps run."""

import dataclasses
import itertools
import math
import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from bench.harness.models import declare, mesh_of_one, random_config
from bench.harness.shapes import SHAPES
from bench.step.checkpoint import checkpoint_config, make
from bench.step.cycle_drafts import declare_draft, drafts_for
from bench.step.floor import kv_bytes, traffic
from jaxspec.config import EngineConfig, resolve
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.on_mesh import on_mesh, specs
from jaxspec.engine.runner import bind
from jaxspec.engine.state import state_shapes
from jaxspec.engine.step import make_step
from jaxspec.loading.checkpoint import load_nextn, load_params, open_checkpoint
from jaxspec.loading.mesh import make_mesh
from jaxspec.models.cache import cache_stored_as
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.params import count_parameters, nest, quantised, with_shardings
from jaxspec.models.registry import read_config
from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.mla_sparse import mosaic as mla_sparse
from pallas_kernels.peer_sum import mailbox
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, MXFP4, NVFP4
from tests.bench.lowered import misplaced_operands

BF16 = np.dtype(jnp.bfloat16)
# All layers, and parameters in billions without the MTP layer: 30.5 and 20.9 on the cards of Qwen3-30B-A3B and
# gpt-oss-20b, about 30, 106, 230, 35 and 48 in the names and descriptions of the others.
PUBLISHED = {
    "moonlight": (27, 15.96), "glm-4.7-flash": (47, 29.9), "qwen3-30b-a3b": (48, 30.53), "glm-4.5-air": (46, 106.9),
    "minimax-m2": (62, 228.7), "gpt-oss-20b": (24, 20.91), "qwen3.5-35b-a3b": (40, 34.66), "kimi-linear": (27, 49.12),
}  # fmt: skip
RECURRENT = ("qwen3.5-35b-a3b", "kimi-linear")
SPARSE = ("glm-5", "deepseek-v3.2")
NEW = [name for name in PUBLISHED if name != "moonlight"]
ATTENTION = [name for name in NEW if name not in RECURRENT]
# Whole in SHAPES, too big for one GPU: 671 B in the paper of DeepSeek-V3 (arXiv 2412.19437), in V3.2 with 61 indexers of
# 14 M, "744B" on the card of GLM-5, "1 T" on that of Kimi-K2.
WHOLE = {"deepseek-v3": 671.03, "deepseek-v3.2": 671.88, "glm-5": 743.91, "kimi-k2": 1026.4}
ROWS, DRAFTS = (1, 32, 128), 3


def target(name: str, layers: int | None = None) -> CausalLM:
    return CausalLM(read_config(random_config(name, layers)), BF16)


@pytest.mark.parametrize("name", PUBLISHED)
def test_widths_are_the_published_ones(name):
    """With all of its layers a model has its published number of parameters; its slice fits on one GPU."""
    layers, billions = PUBLISHED[name]
    assert count_parameters(target(name, layers)) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert 20e9 < 2 * count_parameters(target(name)) < 40e9


@pytest.mark.parametrize("name", WHOLE)
def test_whole_models_have_their_published_parameters(name):
    assert count_parameters(target(name)) / 1e9 == pytest.approx(WHOLE[name], rel=1e-4)


def test_floor_of_sliding_windows():
    """Every second layer of gpt-oss reads no more than its window."""
    model = target("gpt-oss-20b")
    layer = 2 * 8 * 64 * 2
    assert kv_bytes(model, 100) == 16 * 100 * layer
    assert kv_bytes(model, 1024) == 8 * (128 + 1024) * layer
    assert traffic(model, 32, 1024).kv == 32 * kv_bytes(model, 1024)


def test_floor_of_recurrent_layers():
    """Of 12 layers of Qwen3.5 nine read and write states, and what they keep of a window, and three read keys and values.

    Its mixtures have a shared expert with a gate, and of the routed ones a token touches 8 of 256.
    """
    model = target("qwen3.5-35b-a3b")
    state = 32 * 128 * 128 * 4
    columns, gates = 2 * (2 * 16 + 32) * 128, 4 * 32 * 2
    one, window = (state + (3 + n) * columns + n * gates + 4 for n in (1, 4))
    assert traffic(model, 32, 1024).state == 32 * 2 * 9 * one
    assert traffic(model, 32, 1024, tokens=32 * 4).state == 32 * 2 * 9 * window
    assert kv_bytes(model, 1024) == 3 * 1024 * 2 * 2 * 256 * 2
    step = traffic(model, 1, 1024)
    assert step.experts == 8
    routed = 12 * 3 * 512 * 2048 * 2
    rest = 2 * (count_parameters(model) - 248320 * 2048) - 256 * routed
    # Routers, and what fades states, are float32: two bytes more each.
    in_float32 = 2 * (12 * 256 * 2048 + 9 * 2 * 32)
    assert step.weights == pytest.approx(rest + in_float32 + 8 * routed + 2 * 2048)
    assert step.total == step.weights + step.kv + step.state
    two = traffic(target("kimi-linear"), 1, 1024)
    assert two.state == 2 * 6 * (2 * 2**20 + 4 * 3 * 4096 * 2 + 4 * 32 * 129 + 4)
    assert traffic(target("moonlight"), 1, 1024).state == 0


def test_floor_of_layers_that_choose_their_keys():
    """All index keys, and latents of as many tokens as are chosen."""
    model = target("deepseek-v3.2", 2)
    assert kv_bytes(model, 100) == 2 * 100 * 2 * (576 + 128)
    assert kv_bytes(model, 32768) == 2 * 2 * (2048 * 576 + 32768 * 128)


@pytest.fixture
def hopper(monkeypatch):
    """The device is an H200, for the choice of kernels."""
    device = SimpleNamespace(
        platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200", core_count=132, id=0, process_index=0
    )
    monkeypatch.setattr(jax, "devices", lambda *_: [device])


def cases():
    first = ("glm-4.7-flash", 32, 256)
    rest = [case for case in itertools.product(ATTENTION, ROWS, (0, 256)) if case != first]
    return [first, *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]


def lowered_step(
    request, model, rows, prompt, mesh=None, variant="lean", draft=None, *, with_draft=True, context=2048, **options
):
    """The step of a model, and of a draft (default: its MTP layer), for H200s: what runs each operation, and the lowered
    text. `options`: of `EngineConfig`."""
    mesh = mesh or mesh_of_one()
    if draft is None and model.config.nextn_layers and with_draft:
        draft = NextN(model.config, BF16)
    k = DRAFTS if draft else 0
    settings = resolve(
        EngineConfig(
            max_model_len=context, max_num_seqs=rows, max_num_batched_tokens=prompt + 2 * rows * (k + 1),
            num_gpu_blocks_override=context // 32, num_speculative_tokens=k, **options,
        ),
        model_max_position=model.config.max_position, page_bytes=0, free_bytes=0, on_gpu=True,
    )  # fmt: skip
    bucket = Bucket(prompt, min(prompt, 1), rows, variant, k)
    layout = InputLayout(bucket, settings.page_size, settings.max_pages)
    bound = (bind(m, nest(with_shardings(m, mesh))) if m else (None, None) for m in (model, draft))
    graphdefs, params = zip(*bound, strict=True)
    inputs = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    state = state_shapes(model, settings, mesh, draft=draft)._replace(
        written=jax.ShapeDtypeStruct((1,), jnp.int32, sharding=inputs.sharding)
    )
    abstract = params, state, inputs
    whole = specs(abstract)
    step = on_mesh(make_step(graphdefs, layout, settings, readback=True), mesh, whole, (whole[1], PartitionSpec()))
    request.getfixturevalue("hopper")
    with use(Backends(needs_kernels=True)) as chosen:
        text = jax.jit(step).trace(*abstract).lower(lowering_platforms=("cuda",)).as_text()
    assert not misplaced_operands(text)
    return chosen, text


# Extras of some sizes: gpt-oss's width of 2880 goes without norms of ours, wide heads without a split projection, GLM-4.5-Air's
# dense MLP, whose half is no multiple of 64 columns, without a kernel on two devices.
EXTRAS = {"norm_linear", "add_norm", "moe_combine", "moe_router", "joined_linear", "split_linear", "dense_mlp"}


# Calls that say how arrays are split.
SHARDING = {"Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"}


def recurrent_cases():
    whole = [(name, 32, 0) for name in RECURRENT]
    rest = [case for case in itertools.product(RECURRENT, ROWS, (0, 256)) if case not in whole]
    return [*whole, *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]


def of_each_kind(name: str) -> CausalLM:
    """A layer of linear attention and one of the other kind, at real widths, with a mixture each or in the second."""
    changes = {
        "qwen3.5-35b-a3b": {"full_attention_interval": 2},
        "kimi-linear": {
            "linear_attn_config": SHAPES["kimi-linear"]["linear_attn_config"]
            | {"kda_layers": [1], "full_attn_layers": [2]}
        },
    }
    return CausalLM(read_config(random_config(name, 2) | changes[name]), BF16)


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, pytest.param(2, marks=pytest.mark.full)])
@pytest.mark.parametrize(("name", "rows", "prompt"), recurrent_cases())
def test_recurrent_steps_run_our_kernels_on_hopper(name, rows, prompt, devices, request):
    """Windows of linear attention and of the layers between: nothing in a decode step breaks its CUDA graph, in Qwen3.5 with
    an MTP layer."""
    chosen, text = lowered_step(request, of_each_kind(name), rows, prompt, make_mesh(devices))
    decode = "gqa_decode" if name.startswith("qwen") else "mla_decode"
    for operation in ("gated_delta", decode, "moe", "moe_route", *(["gated_delta_prompts"] if prompt else [])):
        assert chosen[operation] == {"mosaic"}
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS
    if not prompt:
        assert_one_graph(text)
    assert set(re.findall(r"custom_call @(\w+)", text)) - SHARDING == {"mosaic_gpu_v2"}


def assert_one_graph(text: str) -> None:
    """Nothing in a lowered decode step breaks its CUDA graph."""
    assert "stablehlo.while" not in text
    assert "stablehlo.sort" not in text


def sparse_cases():
    """Names, rows, tokens of a prompt, and whether the MTP layer drafts."""
    first = ("glm-5", 128, 0, True)
    rest = [case for case in itertools.product(SPARSE, ROWS, (0, 256), (False, True)) if case != first]
    return [first, *(pytest.param(*case, marks=pytest.mark.full) for case in rest)]


@pytest.mark.long
@pytest.mark.parametrize(("name", "rows", "prompt", "drafts"), sparse_cases())
def test_steps_that_choose_keys_run_our_kernels_on_hopper(name, rows, prompt, drafts, request):
    """In contexts of more than `index_topk` tokens: a dense layer and a mixture at real widths, with an indexer each, and the
    MTP layer's own. Decode steps of more tokens than the kernels take at a time are one CUDA graph all the same."""
    mla_sparse.mla_sparse.clear_cache()  # what it runs on is said while it is traced
    model = CausalLM(read_config(random_config(name, 2) | {"first_k_dense_replace": 1}), BF16)
    chosen, text = lowered_step(request, model, rows, prompt, with_draft=drafts, context=16384)
    for operation in ("key_choice", "mla_sparse", "kv_write", "mla_query", "moe", "moe_route"):
        assert chosen[operation] == {"mosaic"}
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS
    if not prompt:
        assert_one_graph(text)
    assert set(re.findall(r"custom_call @(\w+)", text)) - SHARDING == {"mosaic_gpu_v2"}


@pytest.mark.long
@pytest.mark.parametrize("name", [RECURRENT[0], pytest.param(RECURRENT[1], marks=pytest.mark.full)])
def test_mixed_recurrent_steps_walk_over_chunks_in_a_kernel_where_it_is_chosen(name, request):
    with tuning.use(dataclasses.replace(tuning.of_device("NVIDIA H200"), delta_chunk_kernel=True)):
        chosen, text = lowered_step(request, of_each_kind(name), 32, 256)
    assert chosen["gated_delta"] == chosen["gated_delta_prompts"] == {"mosaic"}
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS
    assert "gated_delta_chunks" in text


@pytest.mark.full
@pytest.mark.parametrize("prompt", [0, 256])
@pytest.mark.parametrize("name", ["minimax-m2", "gpt-oss-20b", "qwen3-30b-a3b"])
def test_steps_with_an_eagle3_draft_run_our_kernels_on_hopper(name, prompt, request):
    """A Llama head beside a mixture of experts, as MiniMax-M2 has: attention of both, experts and the head's own MLP."""
    model = target(name, 4)
    draft = declare_draft("eagle3-llama", random_config(name, 4), model, BF16)
    chosen, _ = lowered_step(request, model, 32, prompt, draft=draft)
    assert {"moe", "moe_route", "gqa_decode"} <= set(chosen)
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_declares_its_drafts(name):
    """As wide as their targets; those that a target cannot have are not among them."""
    hf = random_config(name, 4)
    model = CausalLM(read_config(hf), BF16)
    able = drafts_for(hf)
    heads = name not in RECURRENT  # one has no dense layer, the other rotates nothing
    assert ("eagle3-llama" in able, "eagle3-mla" in able) == (heads, heads and "kv_lora_rank" in hf)
    assert ("mtp" in able) == bool(model.config.nextn_layers)
    for kind in able:
        draft = declare_draft(kind, hf, model, BF16)
        assert draft.cache_spec.paged
        if kind != "mtp":
            assert draft.fc.get_value().shape == (hf["hidden_size"], 3 * hf["hidden_size"])


def told(text: str, collective: str) -> int:
    """Elements of the largest array that a collective of a lowered step gives."""
    results = re.findall(rf"stablehlo\.{collective}\b.*?-> tensor<([\dx]+)x\w+>", text, re.DOTALL)
    return max(math.prod(map(int, dims.split("x"))) for dims in results)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "rows", "prompt"), [pytest.param("moonlight", 32, 0, marks=pytest.mark.full), *cases()]
)
def test_every_kernel_lowers_in_shard_map(name, rows, prompt, request, monkeypatch):
    """Decode steps and those with a prompt lower for CUDA at real widths, an MTP layer included. On two devices the same
    operations run on the same kernels, but those that would add before the devices have; and all of a sampler's, on each
    device's columns: nothing that is gathered is as large as one row of logits, and nothing that is summed is larger than
    the residual stream. Without mailboxes, so that the collectives say it."""
    monkeypatch.setattr(mailbox, "axes_reached", lambda _: ())
    # A dense layer and a mixture, or both kinds of attention.
    config, two = target(name, 2).config, make_mesh(2)
    alone, _ = lowered_step(request, CausalLM(config, BF16), rows, prompt)
    assert {"moe", "moe_route"} <= set(alone)
    assert any(operation.endswith("_decode") for operation in alone)
    assert {operation for operation, ran in alone.items() if "reference" in ran} <= EXTRAS
    with tuning.use(dataclasses.replace(tuning.of_device("NVIDIA H200"), rule_kernel=True)):
        chosen, text = lowered_step(request, CausalLM(config, BF16), rows, prompt, two, variant="full")
    # The kernel of rules needs whole blocks of columns: MiniMax-M2's 200064 do not divide so.
    uneven = {"logit_rules"} if config.vocab_size // 2 % 128 else set()
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS | uneven
    assert set(alone) - set(chosen) <= EXTRAS
    assert {"logits_stats", "gumbel_argmax", "cutoffs", "likeliest"} <= set(chosen)
    assert "mosaic_gpu" in text
    assert told(text, "all_gather") < config.vocab_size
    windows = rows * (1 + DRAFTS) if config.nextn_layers else rows
    assert told(text, "all_reduce") == (prompt + windows) * config.hidden_size


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "ranks", "rows"),
    [("moonlight", 1, 32), *(pytest.param("moonlight", *c, marks=pytest.mark.full) for c in ((1, 1), (2, 32)))],
)
def test_a_decode_step_of_two_gpus_tells_everything_through_mailboxes(name, ranks, rows, request, monkeypatch):
    """With them no collective of XLA's is in a step, plain or with drafts, which would cut its graph."""
    mesh = make_mesh(2 // ranks, ranks)
    monkeypatch.setattr(mailbox, "axes_reached", lambda mesh: [axis for axis in mesh.shape if mesh.shape[axis] > 1])
    with tuning.use(dataclasses.replace(tuning.of_device("NVIDIA H200"), peer_sum_bytes=1 << 21)):
        model = CausalLM(target(name, 2).config, BF16)
        chosen, text = lowered_step(request, model, rows, 0, mesh, data_parallel_size=ranks)
    assert chosen["peer_sum"] == {"mosaic"}
    assert not re.findall(r"all_reduce|all_gather|reduce_scatter|all_to_all", text)


@pytest.mark.full
@pytest.mark.parametrize("rows", [1, 32])
def test_counting_experts_adds_a_routing(rows, request):
    """On the kernels that a mixture's routing has anyhow, and nothing that would break a decode step's graph."""
    mesh, config = make_mesh(1), target("moonlight", 2).config
    plain, off = lowered_step(request, CausalLM(config, BF16), rows, 0, mesh)
    counting, on = lowered_step(request, CausalLM(config, BF16), rows, 0, mesh, expert_load_metrics=True)
    assert plain == counting
    added = Counter(re.findall(r"custom_call @(\w+)", on)) - Counter(re.findall(r"custom_call @(\w+)", off))
    assert set(added) == {"mosaic_gpu_v2"}
    assert 1 <= added.total() <= 3
    for loop in ("stablehlo.while", "stablehlo.sort", "stablehlo.scatter"):
        assert on.count(loop) == off.count(loop)


@pytest.mark.full
@pytest.mark.parametrize("prompt", [0, 256])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("scheme", [INT4_G32, NVFP4, MXFP4, FP8_BLOCK, FP8_CHANNEL], ids=str)
def test_no_bf16_copy_in_hlo(scheme, rows, prompt, request):
    """Routed experts that a kernel reads as codes are codes everywhere in a step, and never numbers."""
    hf = random_config("moonlight", 1) | {"first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    model = CausalLM(read_config(hf), BF16)
    quantised(model, {("layers", 0, "mlp", name): scheme for name in ("gate_up", "down")})
    cache_stored_as(model, "fp8")
    chosen, text = lowered_step(request, model, rows, prompt)
    assert chosen["moe"] == chosen["mla_decode"] == {"mosaic"}
    E, inner, hidden = 64, 1408, 2048
    arrays = set(re.findall(r"tensor<((?:\d+x)+)([a-z]\w*)>", text))
    sizes = {array: math.prod(map(int, array[0][:-1].split("x"))) for array in arrays}
    large = {array for array in arrays if sizes[array] >= E * inner * hidden // 2} - {(f"163840x{hidden}x", "bf16")}
    assert {kind for _, kind in large} == {"f8E4M3FN" if scheme.values == "e4m3" else "ui8"}


@pytest.mark.full
@pytest.mark.parametrize("prompt", [0, 256])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("name", "scheme", "mlp"), [("deepseek-v3", "fp8", {"mosaic"}), ("kimi-k2", "int4", None)])
def test_steps_of_whole_models_run_our_kernels_on_hopper(name, scheme, mlp, rows, prompt, request):
    """A dense layer and a mixture at real sizes over four H200s, MLPs as published, with FP8 latents and an MTP layer in bf16.

    mlp: what runs dense and shared MLPs, None where they are not quantised.
    """
    hf = random_config(name, 2)
    model, _ = declare(hf, BF16, quantization=scheme, kv_cache_dtype="fp8")
    chosen, text = lowered_step(request, model, rows, prompt, make_mesh(4))
    assert (
        told(text, "all_reduce")
        == (prompt + rows * (1 + DRAFTS if hf["num_nextn_predict_layers"] else 1)) * hf["hidden_size"]
    )
    assert {"moe", "moe_route", "mla_decode"} <= set(chosen)
    assert chosen.get("mlp") == mlp
    assert {operation for operation, ran in chosen.items() if "reference" in ran} <= EXTRAS


@pytest.mark.long
@pytest.mark.parametrize("name", NEW)
def test_random_checkpoints_of_every_shape_load(name, tmp_path, monkeypatch):
    """What `bench step_vllm make` writes is a folder of the family, its MTP layer included."""
    small = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
        "moe_intermediate_size": 32, "kv_lora_rank": 32, "q_lora_rank": 16, "num_key_value_heads": 2, "n_routed_experts": 8,
        "num_experts": 8, "num_local_experts": 8, "full_attention_interval": 2, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 32, "linear_attn_config": {
            "head_dim": 16, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": [1], "full_attn_layers": [2],
        },
    }  # fmt: skip
    hf = SHAPES[name]
    monkeypatch.setitem(SHAPES, name, hf | {key: value for key, value in small.items() if key in hf})
    config = checkpoint_config(name)
    assert make(tmp_path, config) > 0
    mesh = mesh_of_one()
    model, params = load_params(open_checkpoint(tmp_path), mesh, "bfloat16")
    assert sum(math.prod(x.shape) for x in jax.tree.leaves(params)) == count_parameters(model)
    if config.get("num_nextn_predict_layers") or config.get("mtp_num_hidden_layers"):
        load_nextn(open_checkpoint(tmp_path), mesh, "bfloat16")


@pytest.mark.long
def test_only_our_kernel_writes_the_logits_of_drafts(request):
    """To the state's array, where it is, once a draft; and nothing makes an array of several drafts' logits for it."""
    rows, model = 32, target("glm-4.7-flash", 2)
    chosen, text = lowered_step(request, model, rows, 0)
    assert chosen["row_write"] == {"mosaic"}
    makers = re.findall(rf"= ([\w.]+)\b.*tensor<(\d+)x{DRAFTS}x{model.config.vocab_size}x\w+>$", text, re.MULTILINE)
    state = str(rows + 1)
    assert Counter(makers) == {("call", state): DRAFTS, ("stablehlo.custom_call", state): DRAFTS}
