"""The kernel of requests' rules on the GPU, at models' vocabularies, and what samplers make of its rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.penalties import adjust
from jaxspec.sampling.rejection import verify
from jaxspec.sampling.sampler import SamplingRows, sample
from jaxspec.sampling.target import TargetLogits
from pallas_kernels import tuning
from pallas_kernels.logit_rules import mosaic, reference
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.test_logit_rules import random_rules

pytestmark = pytest.mark.gpu

SIZES = (1024, *VOCABULARIES.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("vocab", SIZES)
@pytest.mark.parametrize(("W", "n"), [(3, 1), (5, 4), (2, 6), (130, 1)])
def test_against_plain_xla(W, n, vocab, dtype):
    """Rows that are not wanted are NaN, and reach no other."""
    rng = np.random.default_rng(W)
    rules, positions = random_rules(rng, W, n, vocab)
    logits = jnp.asarray(4 * rng.normal(size=(W, n, vocab)), dtype)
    drafts = jnp.asarray(rng.integers(0, vocab, (W, n - 1)), jnp.int32)
    wanted = jnp.asarray(rng.random((W, n)) < 0.7).at[0, 0].set(True)
    dirty = jnp.where(wanted[..., None], logits, jnp.nan)
    run = jax.jit(functools.partial(mosaic.adjust, vocab=vocab))
    for _ in range(3):  # the third run is a recorded graph's
        got = run(dirty, drafts, rules, positions, wanted)
    want = jax.jit(reference.adjust, static_argnums=4)(logits, drafts, rules, positions, vocab, None)
    at = np.asarray(wanted)
    np.testing.assert_allclose(np.asarray(got)[at], np.asarray(want)[at], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("vocab", SIZES)
def test_what_is_chosen_does_not_depend_on_it(n, vocab):
    """Every truncation, greedy and random rows, with and without rules, and one row that is NaN."""
    W, rng = 12, np.random.default_rng(n)
    rules, positions = random_rules(rng, W, n, vocab)
    neutral = jnp.arange(W) % 3 == 2
    zeros = {
        name: jnp.where(neutral, 0, getattr(rules, name)) for name in ("frequency", "presence", "num_bias", "min_total")
    }
    rules = rules._replace(
        **zeros, repetition=jnp.where(neutral, 1, rules.repetition), constrained=rules.constrained & ~neutral
    )
    logits = jnp.asarray(3 * rng.normal(size=(W, n, vocab)), jnp.bfloat16).at[5, 0, 3].set(jnp.nan)
    drafts = jnp.asarray(rng.integers(0, vocab, (W, n - 1)), jnp.int32)
    rows = SamplingRows(
        jnp.asarray(np.resize([0.0, 0.7, 1.0, 1.3], W), jnp.float32), jnp.asarray(np.resize([1, 0.9, 0.5], W), jnp.float32),
        jnp.asarray(np.resize([0, 0.1], W), jnp.float32), jnp.asarray(np.resize([0, 50, 3, 2000, 0], W), jnp.int32),
        jnp.asarray(rng.integers(0, 2**32, (W, 2)), jnp.uint32), jnp.ones(W, bool), jnp.arange(W) % 2 == 0,
    )  # fmt: skip

    def chosen(rule_kernel):
        @jax.jit
        def run(logits, drafts, rules, positions, rows):
            sound = jnp.isfinite(logits).all(axis=2)
            target = adjust(logits, drafts, rules, positions, sound_Wn=sound)
            apart.append(target.ruled is not None)
            if n == 1:
                return sample(target, rows, positions, full=True), positions
            return verify(
                TargetLogits(*target), drafts, None, rows.greedy_drafts, jnp.full(W, n - 1), rows, positions, full=True
            )

        apart: list[bool] = []
        with tuning.use(dataclasses.replace(tuning.current(), rule_kernel=rule_kernel)):
            out = run(logits, drafts, rules, positions, rows)
        assert apart == [rule_kernel]
        return [np.delete(np.asarray(each), 5, axis=0) for each in out]

    for got, want in zip(chosen(True), chosen(False), strict=True):
        np.testing.assert_array_equal(got, want)
