"""Kernels for FP8 latents on the GPU: the same bits as those for bfloat16 on what the codes stand for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.backend import Backends, use
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.latents import Fp8Latents, quantise
from pallas_kernels.mla_decode import mosaic
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_decode.fp8 import items_of_a_block
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, NOPE, SCALE, VALUE
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.mla_query.api import write_and_query
from tests.conftest import few_buckets
from tests.kernels.paged_cases import arranged, flat_chunks, fp8_and_plain, fp8_shapes, paged_pool, window_bounds

pytestmark = pytest.mark.gpu

RAGGED = (1, 63, 64, 65, 128, 130, 700, 1024, 4096, 5000)
PAGES, EPS = 100, 1e-5


def on_mosaic(function, **options):
    """A new function each time, so that tests share no compiled code."""

    @jax.jit
    def run(*args):
        with use(Backends(attention="mosaic")):
            return function(*args, **options)

    return run


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def in_the_same_splits(q, plain, tables, bounds, w_uv=None):
    """What the kernel for bfloat16 gives of items like those of the kernel for FP8."""
    B, n, heads, _ = q.shape
    sms = jax.devices()[0].core_count * items_of_a_block(B, mosaic.padded_rows(n * heads))
    return mosaic.mla_decode(q, plain, tables, bounds, w_uv, scale=SCALE, sms=sms)


@pytest.mark.parametrize("heads", [4, 16, 64, 128])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize(
    "lengths",
    [RAGGED, (64,) * 128, (131072,), tuple(range(8, 1300, 10))],
    ids=["ragged", "short", "long", "many"],
)
def test_decoding(lengths, n, heads):
    """Large scores, so that a wrong mask shows; NaN in every array of what no context owns."""
    rng = np.random.default_rng(n * heads)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(3 * rng.standard_normal((len(lengths), n, heads, CACHED), np.float32), jnp.bfloat16)
    latents, plain = fp8_and_plain(pool)
    run = on_mosaic(mla_decode, scale=SCALE, value_dim=LATENT)
    for _ in range(3):  # the third run is a recorded graph's
        got = run(q, latents, tables, window_bounds(lengths, n))
    want = in_the_same_splits(q, plain, tables, window_bounds(lengths, n))
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert_same_bits(got, want)


@pytest.mark.parametrize(("lengths", "n", "heads"), [((700,), 1, 16), ((65, 5000), 4, 16), ((1024,) * 32, 1, 16)])
def test_decoding_with_values(lengths, n, heads):
    rng = np.random.default_rng(n)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), n, heads, CACHED), np.float32), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((heads, VALUE, LATENT)) / LATENT**0.5, jnp.bfloat16)
    run = on_mosaic(mla_decode, scale=SCALE, value_dim=LATENT)
    latents, plain = fp8_and_plain(pool)
    got = run(q, latents, tables, window_bounds(lengths, n), w_uv)
    assert_same_bits(got, in_the_same_splits(q, plain, tables, window_bounds(lengths, n), w_uv))


@pytest.mark.parametrize(("starts", "chunks"), [((0, 64, 100), (1, 63, 500)), ((5000, 0), (700, 130))])
def test_prompts(starts, chunks):
    rng, H = np.random.default_rng(0), 16
    rows, positions, ends = flat_chunks(starts, chunks, 7)
    pool, tables = paged_pool(rng, [int(end) for end in ends], CACHED)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape, np.float32) / shape[-1] ** 0.5, jnp.bfloat16)

    weights = normal(len(rows), H, NOPE), normal(len(rows), H, 64), normal(H, NOPE, LATENT), normal(H, VALUE, LATENT)
    run = on_mosaic(mla_prefill, scale=SCALE)
    got, want = (run(*weights, p, tables, rows, positions, ends) for p in fp8_and_plain(pool))
    assert np.isfinite(np.asarray(got, np.float32)).all()
    assert_same_bits(got, want)


@pytest.mark.parametrize("T", [1, 8, 32, 128, 2048])
def test_fp8_latents_are_what_was_written(T):
    """Both writers give the codes of the row that they write in bfloat16, in place, and touch no other token."""
    rng, H = np.random.default_rng(T), 16
    angles = rng.uniform(0, 6, (T, 32))
    places = 64 + rng.permutation((PAGES - 1) * 64)[:T]
    kv_a = jnp.asarray(3 * rng.standard_normal((T, CACHED)), jnp.bfloat16).at[0, :200].multiply(1e-6)
    norm = jnp.asarray(rng.uniform(0.5, 1.5, LATENT), jnp.bfloat16)
    tables = [jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)]
    tables += [jnp.asarray(a, jnp.int32) for a in (places // 64, places % 64)]
    nothing = jax.tree.map(lambda s: jnp.full(s.shape, jnp.nan, s.dtype), fp8_shapes(PAGES))
    write = on_mosaic(write_latent, eps=EPS)
    plain = write(jnp.full((PAGES, 64, CACHED), jnp.nan, jnp.bfloat16), kv_a, norm, *tables)
    want = quantise(plain[..., :LATENT], plain[..., LATENT:])
    got = write(nothing, kv_a, norm, *tables)
    assert_same_bits(got, want)
    q = jnp.asarray(rng.standard_normal((T, H, NOPE + 64)), jnp.bfloat16)
    w_uk = jnp.asarray(rng.standard_normal((H, NOPE, LATENT)), jnp.bfloat16)
    joined, _ = on_mosaic(write_and_query, eps=EPS)(nothing, *arranged(q, kv_a, norm, merged=True), w_uk, *tables)
    assert_same_bits(joined, want)


def test_the_cache_is_not_copied():
    @functools.partial(jax.jit, donate_argnums=0)
    def step(latents: Fp8Latents, q, kv_a, norm, cos, sin, pages, offsets, tables, bounds):
        with use(Backends(attention="mosaic")):
            latents = write_latent(latents, kv_a, norm, cos, sin, pages, offsets, eps=EPS)
            return latents, mla_decode(q, latents, tables, bounds, scale=SCALE, value_dim=LATENT)

    S, T = jax.ShapeDtypeStruct, 8
    floats = [S((T, 1, 16, CACHED), jnp.bfloat16), S((T, CACHED), jnp.bfloat16), S((LATENT,), jnp.bfloat16)]
    floats += [S((T, 32), jnp.float32)] * 2
    ints = [S((T,), jnp.int32)] * 2 + [S((T, 64), jnp.int32), S((T, 1), jnp.int32)]
    compiled = step.lower(fp8_shapes(20_000), *floats, *ints).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 3e7  # the cache has 840 MB


def test_the_demo_model_on_these_kernels(tmp_path, monkeypatch):
    """In bfloat16 with three drafts: likely texts are as likely with either cache, and drafts are accepted as often."""
    from convert.reference import read_record
    from jaxspec.engine.request import Request
    from jaxspec.llm import LLM
    from jaxspec.sampling.params import SamplingParams
    from serve.demo import RECORD

    few_buckets(monkeypatch)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    texts = [[*record.prompt_ids, *record.new_ids] for record in read_record(RECORD)]
    logprobs, lengths = {}, {}
    for cache in ("auto", "fp8"):
        llm = LLM(
            "demo", dtype="bfloat16", kv_cache_dtype=cache, num_speculative_tokens=3, adaptive_speculation=False,
            max_model_len=512, max_num_seqs=4, max_num_batched_tokens=256, enable_prefix_caching=False,
        )  # fmt: skip
        engine = llm.engine
        for operation in ("kv_write", "mla_decode", "mla_prefill"):
            assert engine.runner.kernels[operation] == {"mosaic"}
        for i, text in enumerate(texts):
            engine.add(
                Request(f"{i}", text, SamplingParams(max_tokens=48, temperature=0, ignore_eos=True, prompt_logprobs=0))
            )
        found = []
        while engine.has_work:
            for output in engine.step():
                assert output.error is None
                found += [score.logprob for score in output.prompt_logprobs or ()]
        logprobs[cache], lengths[cache] = np.mean(found), engine.stats().acceptance.mean_length
    assert abs(logprobs["fp8"] - logprobs["auto"]) < 0.05
    assert lengths["fp8"] > 0.9 * lengths["auto"] > 2
