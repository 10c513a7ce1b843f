"""The sampler: masks against a sort, draws against the distribution, and independence of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.logprobs import logprobs_of
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.sampler import SamplingRows, cuts_of, sample, temperatures
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.api import logits_stats

V = 12


@jax.jit
def transformed(logits, rows):
    """What a row draws from: logits over the temperature, with -inf for what is dropped."""
    kept = reference.kept(logits, cuts_of(logits, rows, logits_stats(logits, temperatures(rows))))
    return kept / temperatures(rows)[:, None]


sample_lean = jax.jit(lambda *a: sample(*a, full=False))
sample_full = jax.jit(lambda *a: sample(*a, full=True))


def rows(R, temperature=1.0, top_p=1.0, top_k=0, seed=0, min_p=0.0):
    seeds = np.stack([np.arange(R) + 1000 * seed, np.full(R, 7)], axis=1).astype(np.uint32)

    def fill(value, dtype):
        return jnp.full(R, value, dtype)

    return SamplingRows(
        fill(temperature, jnp.float32),
        fill(top_p, jnp.float32),
        fill(min_p, jnp.float32),
        fill(top_k, jnp.int32),
        jnp.asarray(seeds),
        fill(False, bool),
        fill(False, bool),
    )


logits_rows = st.lists(st.integers(-40, 40), min_size=V, max_size=V).map(lambda x: np.array([x], np.float32) / 8)


@given(logits_rows, st.integers(-1, V + 2))
def test_top_k_keeps_the_k_largest_and_ties(logits, k):
    kept = np.isfinite(transformed(logits, rows(1, top_k=k)))[0]
    threshold = -np.inf if k < 1 or k > V else np.sort(logits[0])[-k]
    np.testing.assert_array_equal(kept, logits[0] >= threshold)


@given(logits_rows, st.floats(0.01, 1.0))
def test_top_p_keeps_the_smallest_set_that_holds_p(logits, p):
    kept = np.isfinite(transformed(logits, rows(1, top_p=p)))[0]
    probabilities = np.exp(logits[0].astype(np.float64))
    probabilities /= probabilities.sum()
    order = np.unique(probabilities)[::-1]
    # By definition: enough, and without its least likely level no longer enough.
    assert probabilities[kept].sum() >= p - 1e-6
    lowest = probabilities[kept].min()
    assert kept[probabilities >= lowest].all(), "ties and likelier tokens are kept"
    if p < 1 and (order > lowest).any():
        assert probabilities[probabilities > lowest].sum() < p + 1e-6


def test_draws_follow_the_distribution():
    R = 20000
    logits = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (R, 1))
    positions = jnp.arange(R, dtype=jnp.int32) % 50
    for temperature, power in ((1.0, 1.0), (0.5, 2.0)):
        ids = np.asarray(sample_lean(logits, rows(R, temperature), positions))
        p = np.array([0.4, 0.3, 0.2, 0.1]) ** power
        p /= p.sum()
        chi2 = ((np.bincount(ids, minlength=4) - R * p) ** 2 / (R * p)).sum()
        assert chi2 < 16.3  # 0.999 quantile with 3 degrees of freedom


def test_top_k_and_top_p_bound_the_support():
    R = 4000
    logits = np.tile(np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32)), (R, 1))
    positions = jnp.zeros(R, jnp.int32)
    assert set(np.asarray(sample_full(logits, rows(R, top_k=2), positions)).tolist()) == {0, 1}
    assert set(np.asarray(sample_full(logits, rows(R, top_p=0.75), positions)).tolist()) == {0, 1, 2}
    # top_k first: of {0.4, 0.3} renormalised, the first holds 0.57.
    assert set(np.asarray(sample_full(logits, rows(R, top_k=2, top_p=0.55), positions)).tolist()) == {0}


def test_greedy_rows_take_the_largest_logit_whatever_else_they_ask():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(64, V)).astype(np.float32)
    for sampler in (sample_lean, sample_full):
        ids = sampler(logits, rows(64, temperature=0.0, top_k=3, top_p=0.2), jnp.arange(64))
        np.testing.assert_array_equal(ids, logits.argmax(axis=1))


def test_lean_and_full_agree_where_nothing_is_masked():
    rng = np.random.default_rng(1)
    logits = rng.normal(size=(256, V)).astype(np.float32)
    args = (logits, rows(256, temperature=0.7), jnp.arange(256, dtype=jnp.int32))
    np.testing.assert_array_equal(sample_lean(*args), sample_full(*args))


def test_a_rows_draw_depends_on_its_seed_and_position_alone():
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(64, V)).astype(np.float32)
    batch, positions = rows(64, temperature=1.3), jnp.arange(64, dtype=jnp.int32) // 3
    ids = np.asarray(sample_lean(logits, batch, positions))
    order = rng.permutation(64)
    permuted = sample_lean(logits[order], jax.tree.map(lambda a: a[order], batch), positions[order])
    np.testing.assert_array_equal(permuted, ids[order])
    other = np.asarray(sample_lean(logits, rows(64, temperature=1.3, seed=1), positions))
    moved = np.asarray(sample_lean(logits, batch, positions + 1))
    assert (other != ids).any()
    assert (moved != ids).any()


def test_logprobs_are_of_the_raw_distribution():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(8, V)).astype(np.float32)
    ids = np.stack([np.arange(8), np.arange(8)[::-1]], axis=1)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(axis=1))
    want = np.take_along_axis(logits, ids, axis=1) - log_z[:, None]
    stats = logits_stats(logits, jnp.ones(8))
    np.testing.assert_allclose(logprobs_of(logits, ids, stats.log_z), want, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"max_tokens": -1}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_p": float("nan")}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"seed": 2**64}, "seed"),
        ({"stop": ("",)}, "stop"),
        ({"stop": ("x" * 300,)}, "stop"),
        ({"stop_token_ids": tuple(range(20))}, "stop_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"min_p": -0.1}, "min_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"min_p": float("nan")}, "min_p"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"presence_penalty": float("nan")}, "presence_penalty"),
        ({"frequency_penalty": -2.1}, "frequency_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty"),
        ({"logit_bias": {3: 101}}, "logit_bias"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias"),
        ({"logit_bias": dict.fromkeys(range(301), 1.0)}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"num_speculative_tokens": -1}, "num_speculative_tokens"),
    ],
)
def test_bad_parameters_name_themselves(options, param):
    with pytest.raises(InvalidRequestError, match=param) as error:
        SamplingParams(**options)
    assert error.value.param == param
