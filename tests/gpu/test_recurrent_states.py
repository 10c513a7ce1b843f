"""Recurrent layers on a GPU: their kernels in the engine, and plain XLA, which has to be asked for."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM
from jaxspec.errors import ConfigError
from pallas_kernels import tuning
from pallas_kernels.gated_delta import chunk_walk
from pallas_kernels.gated_delta.chunks import CHUNK, chunked, cut
from tests.engine.test_recurrent_states import GREEDY, REAL_WIDTHS, VARIANTS, check_replayed, write_folder
from tests.models.test_gated_delta import both_decays, plain, random_states, random_tokens

pytestmark = pytest.mark.gpu


@both_decays
def test_chunks_keep_the_precision_of_float32(decays):
    """No operand is rounded to TF32."""
    rng, lengths = np.random.default_rng(0), (CHUNK, 1, CHUNK + 3)
    tokens, states = random_tokens(rng, sum(lengths), decays=decays), random_states(rng, len(lengths))
    rows = np.repeat(np.arange(len(lengths)), lengths).astype(np.int32)
    read, after = jax.jit(chunked)(states, tokens, cut(jnp.asarray(rows), jnp.asarray(lengths, jnp.int32)))
    for row in range(len(lengths)):
        mine = type(tokens)(*(np.asarray(x)[rows == row] for x in tokens))
        want_read, want_state = plain(np.asarray(states[row]), mine)
        np.testing.assert_allclose(np.asarray(read)[rows == row], want_read, atol=1e-5)
        np.testing.assert_allclose(after[row], want_state, atol=1e-5)


@pytest.mark.parametrize("variant", VARIANTS)
def test_replayed_windows_are_plain_decoding(variant):
    check_replayed("pattern", variant)


OPTIONS = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "max_model_len": 128, "num_gpu_blocks_override": 8}


@pytest.mark.parametrize("variant", VARIANTS)
def test_plain_xla_has_to_be_asked_for(tmp_path, variant):
    folder = write_folder(tmp_path, variant)
    with pytest.raises(ConfigError, match=r"no decode kernel here: .* use attention_backend"):
        LLM(folder, **OPTIONS)
    llm = LLM(folder, attention_backend="reference", **OPTIONS)
    (completion,) = llm.generate([[7, 8, 9]], GREEDY)
    assert len(completion.ids) == GREEDY.max_tokens


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_decode_kernel_gives_the_text_of_plain_xla(tmp_path, variant):
    """In float32, with n-grams, so that windows are replayed. The rest of the layers is plain XLA in both."""
    folder, prompts = write_folder(tmp_path, variant, **REAL_WIDTHS[variant]), [[7, 8, 9] * 5, [11, 12]]
    drafts = {
        "num_speculative_tokens": 3,
        "speculative_method": "ngram",
        "adaptive_speculation": False,
        "dtype": "float32",
    }
    want, got = (
        [c.ids for c in LLM(folder, attention_backend=backend, **drafts, **OPTIONS).generate(prompts, GREEDY)]
        for backend in ("reference", "auto")
    )
    assert got == want


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_kernel_of_prompts_gives_the_text_of_plain_xla(tmp_path, variant, monkeypatch):
    """In float32, over prompts that take several steps, the last of one chunk or less."""
    choices = dataclasses.replace(tuning.current(), delta_chunk_kernel=True)
    monkeypatch.setattr(tuning, "of_device", lambda _: choices)
    chunked_by_kernel, tokens = chunk_walk.chunked, []

    def counted(states, inputs, chunks):
        tokens.append(len(inputs.q))
        return chunked_by_kernel(states, inputs, chunks)

    monkeypatch.setattr(chunk_walk, "chunked", counted)
    folder = write_folder(tmp_path, variant, **REAL_WIDTHS[variant])
    prompts = [np.random.default_rng(n).integers(1, 60, n).tolist() for n in (200, 130)]
    wide = OPTIONS | {"max_num_batched_tokens": 128, "max_model_len": 256, "dtype": "float32"}
    texts = []
    for backend in ("reference", "auto"):
        assert not tokens
        texts.append([c.ids for c in LLM(folder, attention_backend=backend, **wide).generate(prompts, GREEDY)])
    assert 128 in tokens
    assert texts[0] == texts[1]
