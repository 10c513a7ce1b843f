"""Layers that choose their keys on a GPU: their kernels, whole models on these, and plain XLA, which has to be asked for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.errors import ConfigError
from pallas_kernels.backend import Backends, use
from pallas_kernels.key_choice import mosaic
from pallas_kernels.key_choice.api import choose_keys
from pallas_kernels.mla_sparse import gathered
from pallas_kernels.mla_sparse import mosaic as in_kernel
from pallas_kernels.mla_sparse.api import mla_sparse
from pallas_kernels.sampling.keys import float_of
from tests.engine.test_recurrent_states import check_replayed, write_folder
from tests.engine.test_sparse_backends import SIZES, check_near_ties, runner
from tests.kernels.paged_cases import paged_pool, relative_error
from tests.kernels.score_cases import check_places

pytestmark = pytest.mark.gpu
VARIANT = "glm-dsa"


def test_choices_at_published_sizes():
    """Tokens of several requests in bfloat16, whose products are exact in float32 but for their sum."""
    rng, lengths, count = np.random.default_rng(0), (2048, 2100, 9000), 2048
    pool, tables = paged_pool(rng, lengths, 128)
    keys = jnp.asarray(pool, jnp.bfloat16)
    q = jnp.asarray(rng.standard_normal((3, 64, 128)), jnp.bfloat16)
    weights = rng.standard_normal((3, 64)).astype(np.float32)
    rows, bounds = np.arange(3, dtype=np.int32), np.array(lengths, np.int32)
    places = jax.jit(choose_keys, static_argnames="count")(q, weights, keys, tables, rows, bounds, count=count)
    for t, length in enumerate(lengths):
        mine = np.asarray(keys, np.float64)[tables[t]].reshape(-1, 128)[:length]
        scores = (np.maximum(np.asarray(q[t], np.float64) @ mine.T, 0) * weights[t][:, None]).sum(axis=0)
        want = set(np.argsort(-scores, kind="stable")[:count].tolist())
        assert len(set(np.asarray(places[t]).tolist()) & want) >= count - 2  # rounding moves what is next to the border


@pytest.mark.parametrize("kind", ["normal", "few values", "one value", "wide"])
@pytest.mark.parametrize(("tokens", "columns"), [(1, 2048), (128, 32768), (3, 163840)])
def test_places_of_the_largest(tokens, columns, kind):
    """Exactly NumPy's, twice the same; what no row owns is NaN, and rows own anything from nothing to all columns."""
    check_places(tokens, columns, 2048, kind)


@pytest.mark.parametrize("heads", [64, 32])
def test_scores(heads):
    """The kernel's, of contexts of one page and of many; what no request owns is NaN."""
    rng, lengths = np.random.default_rng(0), (70, 500, 1, 9000)
    pool, tables = paged_pool(rng, lengths, 128)
    keys = jnp.asarray(pool, jnp.bfloat16)
    rows, bounds = np.array([0, 1, 1, 2, 3], np.int32), np.array([70, 500, 499, 1, 9000], np.int32)
    q = jnp.asarray(rng.standard_normal((len(rows), heads, 128)), jnp.bfloat16)
    weights = jnp.asarray(rng.standard_normal((len(rows), heads)), jnp.float32)
    got = np.asarray(float_of(mosaic.scores(q, weights, keys, tables[rows], bounds)))
    for t, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        mine = np.asarray(keys, np.float64)[tables[row]].reshape(-1, 128)[:bound]
        want = (np.maximum(np.asarray(q[t], np.float64) @ mine.T, 0) * np.asarray(weights)[t][:, None]).sum(axis=0)
        np.testing.assert_allclose(got[t, :bound], want, atol=5e-3)


def test_chosen_latents_through_the_kernels_of_decoding():
    """Beside plain XLA on the same arrays in float32; some tokens have chosen nothing, some less than a page."""
    rng, lengths = np.random.default_rng(0), (70, 500, 3000)
    pool, tables = paged_pool(rng, lengths, 576)
    latent = jnp.asarray(pool, jnp.bfloat16)
    rows = np.array([0, 1, 2, 2, 0], np.int32)
    chosen, numbers = np.full((5, 256), -1, np.int32), np.array([5, 256, 200, 64, 0], np.int32)
    for t, number in enumerate(numbers):
        chosen[t, :number] = np.sort(rng.permutation(lengths[rows[t]])[:number])
    q = jnp.asarray(rng.standard_normal((5, 16, 576)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((16, 128, 512)) / 512**0.5, jnp.bfloat16)
    call = functools.partial(mla_sparse, scale=0.07)
    with use(Backends()) as ran:
        got = jax.jit(call)(q, latent, tables, rows, chosen, numbers, w_uv)
    assert ran["mla_sparse"] <= {"mosaic", "triton"}
    with use(Backends(attention="reference")):
        exact = (a.astype(jnp.float32) for a in (q, latent))
        want = jax.jit(call)(*exact, tables, rows, chosen, numbers, w_uv.astype(jnp.float32))
    assert relative_error(got[numbers > 0], want[numbers > 0]) < 1e-2


@pytest.mark.parametrize(("tokens", "heads"), [(32, 128), (3, 16)])
def test_gathered_in_the_kernel(tokens, heads):
    """To the bit what the kernel says of pages that XLA has gathered; what nobody has chosen is NaN."""
    rng, number = np.random.default_rng(1), 2048
    rows, tables = np.arange(tokens, dtype=np.int32), rng.permutation(tokens * 64).reshape(tokens, 64).astype(np.int32)
    chosen = np.sort(rng.permuted(np.tile(np.arange(4096, dtype=np.int32), (tokens, 1)), axis=1)[:, :number], axis=1)
    pool = np.full((tokens * 64, 64, 576), np.nan, np.float32)
    places = tables[rows[:, None], chosen // 64], chosen % 64
    pool[places] = rng.standard_normal((tokens, number, 576), np.float32)
    numbers = np.full(tokens, number, np.int32)
    numbers[:2] = 1000, 1
    chosen[0, 1000:] = chosen[1, 1:] = -1
    q = jnp.asarray(rng.standard_normal((tokens, heads, 576)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((heads, 128, 512)) / 512**0.5, jnp.bfloat16)
    choice = tables, rows, chosen, numbers
    call = functools.partial(gathered.mla_sparse, q, jnp.asarray(pool, jnp.bfloat16), *choice, w_uv)
    want = np.asarray(call(scale=0.07), np.float32)
    assert np.isfinite(want).all()
    for _ in range(3):
        got = in_kernel.mla_sparse(*call.args, scale=0.07)
        np.testing.assert_array_equal(np.asarray(got, np.float32), want)


@pytest.mark.parametrize("draft", ["pattern", "nextn"])
def test_windows_are_plain_decoding(draft):
    check_replayed(draft, VARIANT)


def test_kernels_say_what_plain_xla_says():
    """A whole model in bfloat16, beside plain XLA in float32: three drafts a window, mixed steps, NaN in what nobody owns."""
    mine = runner("auto", "bfloat16")
    assert mine.kernels["key_choice"] == mine.kernels["mla_sparse"] == {"mosaic"}
    check_near_ties(mine, runner("reference", "float32"))


OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 8}


def fill(llm: LLM) -> None:
    """Writes until a context is full."""
    tokens = llm.engine.runner.settings.max_model_len - 4
    (completion,) = llm.generate([[7, 8, 9]], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True))
    assert len(completion.ids) == tokens


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_plain_xla_has_to_be_asked_for(tmp_path, dtype):
    """Where no kernel chooses keys, beyond index_topk, 16 here; up to it, contexts need no choice and end by default."""
    folder = write_folder(tmp_path, VARIANT)
    with pytest.raises(
        ConfigError, match=r"over 16 tokens\) has no kernels here: .* at most 16.* or attention_backend"
    ):
        LLM(folder, max_model_len=129, dtype=dtype, **OPTIONS)
    llm = LLM(folder, dtype=dtype, **OPTIONS)
    assert llm.engine.runner.settings.max_model_len == 16
    fill(llm)
    fill(LLM(folder, max_model_len=129, attention_backend="reference", dtype=dtype, **OPTIONS))


def test_longer_contexts_run_in_kernels(tmp_path):
    """Of a folder whose sizes they support: as many tokens as are asked for."""
    llm = LLM(write_folder(tmp_path, VARIANT, **SIZES), max_model_len=129, dtype="bfloat16", **OPTIONS)
    fill(llm)
    assert llm.engine.runner.kernels["key_choice"] == llm.engine.runner.kernels["mla_sparse"] == {"mosaic"}
