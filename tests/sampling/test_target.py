"""Logits of which rows with rules have an array of their own: samplers give what they give of one array with all rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import truncation
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.rejection import DraftLogits, verify
from jaxspec.sampling.sampler import SamplingRows, cuts_of, sample, temperatures
from jaxspec.sampling.target import TargetLogits

R, V = 24, 40


def drawn(seed: int, windows: int) -> tuple[TargetLogits, jax.Array, SamplingRows]:
    """Rows in two arrays, in which all that is not there is NaN; in one; and the parameters of each window."""
    rng = np.random.default_rng(seed)
    logits = jnp.asarray(rng.normal(size=(R, V)) * 3, jnp.bfloat16)
    ruled = jnp.asarray(rng.normal(size=(R, V)) * 3, jnp.float32).at[:, :5].set(-jnp.inf)
    changed = jnp.asarray(rng.random(R) < 0.5)
    whole = jnp.where(changed[:, None], ruled, logits.astype(jnp.float32))
    target = TargetLogits(
        jnp.where(changed[:, None], jnp.nan, logits), jnp.where(changed[:, None], ruled, jnp.nan), changed
    )

    def some(*values):
        return jnp.asarray(rng.choice(values, windows), jnp.float32)

    flags = (jnp.asarray(rng.random(windows) < 0.5) for _ in range(2))
    rows = SamplingRows(
        some(0, 0.7, 1.3), some(1, 0.8, 0.5), some(0, 0.1), some(0, 3, 20).astype(jnp.int32),
        jnp.asarray(rng.integers(0, 2**32, (windows, 2)), jnp.uint32), *flags,
    )  # fmt: skip
    return target, whole, rows


@pytest.mark.parametrize("seed", range(3))
def test_samples(seed):
    target, whole, rows = drawn(seed, R)
    run = jax.jit(functools.partial(sample, full=True))
    positions = jnp.arange(R, dtype=jnp.int32)
    np.testing.assert_array_equal(run(target, rows, positions), run(whole, rows, positions))


@pytest.mark.parametrize("seed", range(3))
def test_windows(seed):
    n, D = 4, R // 4
    target, whole, rows = drawn(seed, D)
    rng = np.random.default_rng(seed)
    greedy = jnp.argmax(whole, axis=1).reshape(D, n)[:, : n - 1]
    drafts = jnp.where(jnp.asarray(rng.random((D, n - 1)) < 0.6), greedy, 7).astype(jnp.int32)
    logits = jnp.asarray(rng.normal(size=(D, n - 1, V)), jnp.float32)
    q = DraftLogits(logits, jax.nn.logsumexp(logits / temperatures(rows)[:, None, None], axis=2))
    given = drafts, q, rows.greedy_drafts, jnp.asarray(rng.integers(0, n, D), jnp.int32), rows, jnp.arange(D)
    run = jax.jit(functools.partial(verify, full=True))
    for got, want in zip(run(target, *given), run(whole.reshape(D, n, V), *given), strict=True):
        np.testing.assert_array_equal(got, want)


def test_searches_never_run_at_once(monkeypatch):
    """What the second reads depends on what the first has found. Blocks of two kernels that wait could wait forever."""
    target, _, rows = drawn(0, R)
    search = truncation.cutoffs

    @jax.jit
    def search_of_all_rows(logits, bounds):
        return search(logits, bounds)

    monkeypatch.setattr(truncation, "cutoffs", search_of_all_rows)

    def found(target, rows):
        stats = target.stats(temperatures(rows), None, Columns(V))
        return cuts_of(target, rows, stats)

    equations = jax.make_jaxpr(found)(target, rows).jaxpr.eqns
    made_by = {id(out): equation for equation in equations for out in equation.outvars}
    first, second = (e for e in equations if e.params.get("name") == search_of_all_rows.__name__)
    seen, waiting = set(), list(second.invars)
    while waiting:
        equation = made_by.get(id(waiting.pop()))
        if equation is not None and id(equation) not in seen:
            seen.add(id(equation))
            waiting += equation.invars
    assert id(first) in seen
