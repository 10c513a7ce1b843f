"""Layers that choose their keys on a GPU, where plain XLA has to be asked for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec import LLM, SamplingParams
from jaxspec.errors import ConfigError
from pallas_kernels.key_choice.api import choose_keys
from tests.engine.test_recurrent_states import check_replayed, write_folder
from tests.kernels.paged_cases import paged_pool

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


@pytest.mark.parametrize("draft", ["pattern", "nextn"])
def test_windows_are_plain_decoding(draft):
    check_replayed(draft, VARIANT)


def test_plain_xla_has_to_be_asked_for(tmp_path):
    """Beyond index_topk, 16 here; up to it, contexts need no choice."""
    folder = write_folder(tmp_path, VARIANT)
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 16, "num_gpu_blocks_override": 8, "dtype": "float32"}
    with pytest.raises(ConfigError, match=r"129 is over 16: .* no kernels for GPUs\. Use at most 16"):
        LLM(folder, max_model_len=129, **options)
    for length, more in ((16, {}), (129, {"attention_backend": "reference"})):
        llm = LLM(folder, max_model_len=length, **more, **options)
        (completion,) = llm.generate([[7, 8, 9]], SamplingParams(max_tokens=length - 4, temperature=0, ignore_eos=True))
        assert len(completion.ids) == length - 4
