"""A cache of FP8 latents under everything that the engine does with pages, and what cannot have one."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import PAGE_SIZE, EngineConfig
from jaxspec.engine.request import Request
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_fp8_cache, check_fp8_kernels
from jaxspec.models.cache import cache_stored_as, page_bytes
from jaxspec.models.config import RopeConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.layers import rope_tables
from jaxspec.models.mla import MLASpec
from jaxspec.models.params import Declare
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from pallas_kernels import backend
from pallas_kernels.backend import Backends
from pallas_kernels.latents import dequantise, from_arrays
from tests.caches import empty_cache, single_request
from tests.engine.scripted import numpy_params
from tests.engine.test_engine import assert_equal_runs
from tests.engine.test_schedules import options
from tests.engine.tiny import HF_CONFIG, VOCAB, fill_cache, make_engine, run
from tests.models.test_mtp import bound
from tests.tiny_models import CONFIGS

K = 3
MESH = {"tensor": 1}


def requests() -> list[Request]:
    """Greedy, and at temperature 1 with seeds: neither text depends on drafts."""
    rng = np.random.default_rng(0)
    shared = rng.integers(6, VOCAB, 70).tolist()  # more than a page
    params = [SamplingParams(max_tokens=50, temperature=t, seed=3, ignore_eos=True) for t in (0, 1)]
    prompts = [rng.integers(6, VOCAB, n).tolist() for n in (3, 64, 100, 129)] + [[*shared, i] for i in (7, 8)]
    return [Request(f"g{i}", prompt, params[i % 2]) for i, prompt in enumerate(prompts)]


@pytest.mark.long
def test_text_is_that_of_plain_decoding_with_the_same_cache():
    """With drafts in mixed steps, over pages full of NaN; from the prefix cache; preempted; read at once and late.

    Target and draft are in FP8 blocks too: tests/engine/test_quantised_pairs.py has other schemes, and grammars.
    """
    plain = run(make_engine(kv="fp8", weights="fp8"), requests())
    engine = make_engine(k=K, kv="fp8", weights="fp8")
    fill_cache(engine.runner, np.nan)
    assert_equal_runs(run(engine, requests()), plain)
    assert_equal_runs(run(engine, requests()), plain)
    assert engine.stats().prefix_cache_hits > 0
    for depth in (0, 2):
        with options(engine.runner, readout_depth=depth):
            tight = make_engine(usable_pages=5, k=K, kv="fp8", weights="fp8")
            assert_equal_runs(run(tight, requests()), plain)
            assert tight.stats().num_preemptions > 0
    runner = engine.runner
    assert {a.dtype for layer in (*runner.state.kv, runner.state.draft_kv) for a in layer} == {
        np.dtype(jnp.float8_e4m3fn), np.dtype(np.float32), np.dtype(jnp.bfloat16),
    }  # fmt: skip
    mlps = [
        runner.params[0]["layers"][0]["mlp"],
        runner.params[0]["layers"][1]["mlp"],
        runner.params[1]["layer"]["mlp"],
    ]
    assert {mlp["down"]["codes"].get_value().dtype for mlp in mlps} == {np.dtype(jnp.float8_e4m3fn)}


@pytest.mark.long
def test_prompts_attend_to_what_was_written():
    """Chunks of a prompt give what the whole prompt gives, and what the rounded latents give from a plain cache."""
    spec = MLASpec(2, 160, None, 8, 8, 8, 0.3, RopeConfig(8, 100.0))
    params = numpy_params(spec.build(32, Declare(jnp.float32)), 0)

    def attention(dtype):
        return bound(cache_stored_as(spec.build(32, Declare(jnp.float32)), dtype), params)

    x = jnp.asarray(np.random.default_rng(1).standard_normal((24, 32)), jnp.float32)

    def attend(module, cache, start, count):
        meta = single_request(start, count, pages=3, page_size=8, prefill=True)
        tables = rope_tables(spec.rope, meta.positions)
        return jax.jit(module.__call__)(x[start : start + count], cache, meta, tables)

    fp8, plain = attention("fp8"), attention("auto")
    whole, cache = attend(fp8, empty_cache(fp8.cache_spec, 4, 8), 0, 24)
    chunks, chunk_cache = [], empty_cache(fp8.cache_spec, 4, 8)
    for start, count in ((0, 5), (5, 19)):
        out, chunk_cache = attend(fp8, chunk_cache, start, count)
        chunks.append(out)
    np.testing.assert_allclose(np.concatenate(chunks), whole, atol=1e-5)
    for a, b in zip(cache, chunk_cache, strict=True):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))

    rounded = dequantise(from_arrays(cache), jnp.float32)
    meta = single_request(0, 24, pages=3, page_size=8, prefill=True)
    q, _ = plain.project(x)
    want = plain.attend_prefill(q[:, :32].reshape(24, 2, 16), *rope_tables(spec.rope, meta.positions), rounded, meta)
    np.testing.assert_allclose(whole, plain.project_out(want), atol=1e-5)
    unrounded, _ = attend(plain, empty_cache(plain.cache_spec, 4, 8), 0, 24)
    assert np.abs(np.asarray(whole - unrounded)).max() > 1e-3, "nothing was rounded"


def test_bytes_of_a_page():
    config = read_config(HF_CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64})
    specs = {
        dtype: cache_stored_as(CausalLM(config, np.dtype(jnp.bfloat16)), dtype).cache_specs()
        for dtype in ("auto", "fp8")
    }
    per_layer = {dtype: page_bytes(s, PAGE_SIZE, MESH) // PAGE_SIZE // 2 for dtype, s in specs.items()}
    assert per_layer == {"auto": 1152, "fp8": 656}
    float32 = CausalLM(config, np.dtype(np.float32))
    assert page_bytes(cache_stored_as(float32, "bf16").cache_specs(), PAGE_SIZE, MESH) == 2 * 1152 * PAGE_SIZE


def test_what_cannot_have_one(monkeypatch):
    """Models with other layers, and on a GPU what no kernel runs; a draft's keys and values stay as they are."""
    gqa, hybrid = (
        cache_stored_as(CausalLM(read_config(CONFIGS[name]), jnp.bfloat16), "fp8") for name in ("llama", "kimi-linear")
    )
    for model in (gqa, hybrid):
        with pytest.raises(ConfigError, match="grouped-query or linear attention: use --kv-cache-dtype bf16"):
            check_fp8_cache(model.cache_specs())
    mla = cache_stored_as(CausalLM(read_config(HF_CONFIG), jnp.bfloat16), "fp8")
    check_fp8_cache(mla.cache_specs())
    monkeypatch.setattr(backend.jax, "devices", lambda: [SimpleNamespace(platform="gpu", compute_capability="9.0")])
    with pytest.raises(ConfigError, match=r"\(kv_write, mla_decode, mla_prefill\): use --kv-cache-dtype bf16"):
        check_fp8_kernels([mla], "bfloat16", Backends())
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    published = cache_stored_as(CausalLM(read_config(HF_CONFIG | sizes), jnp.bfloat16), "fp8")
    check_fp8_kernels([gqa, published], "bfloat16", Backends())
    for dtype, backends in (
        ("float32", Backends()),
        ("bfloat16", Backends("triton")),
    ):
        with pytest.raises(ConfigError, match=r"no kernel .* use --kv-cache-dtype bf16"):
            check_fp8_kernels([published], dtype, backends)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype .* must be auto, bf16 or fp8"):
        EngineConfig(kv_cache_dtype="int8")  # type: ignore[arg-type]
