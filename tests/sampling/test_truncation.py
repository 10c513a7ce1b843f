"""min_p, top_k and top_p of random rows against bisection over floating-point sums, and through the kernel's passes."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling import truncation
from jaxspec.sampling.truncation import Truncation, cuts
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.cutoffs import cutoffs
from pallas_kernels.sampling.keys import weight_scale
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

R = 48


def rows_of(rng, V, count=R):
    """Each rule in half of the rows, at its ends in some of them."""

    def some(values, neutral, ends):
        values = np.where(rng.random(count) < 0.2, rng.choice(ends, count), values)
        return np.where(rng.random(count) < 0.5, values, neutral)

    return Truncation(
        jnp.asarray(rng.uniform(0.2, 2, count), jnp.float32),
        jnp.asarray(some(rng.uniform(0, 0.3, count), 0, [0, 1]), jnp.float32),
        jnp.asarray(some(rng.integers(1, V + 1, count), 0, [-1, 1, V, V + 1]), jnp.int32),
        jnp.asarray(some(rng.uniform(0, 1, count), 1, [1e-6, 0.5, 1 - 1e-6]), jnp.float32),
    )


def logits_of(rng, V, count=R):
    """Random rows: many ties, nothing but ties, both zeros, one id allowed, few allowed, far apart, NaN, infinity."""
    logits = 3 * rng.normal(size=(count, V)).astype(np.float32)
    logits[::3] = np.round(logits[::3] * 2) / 2
    logits[1::9] = 0.25
    logits[2::9] = np.where(rng.random(V) < 0.5, -0.0, 0.0)
    logits[3::9, np.arange(V) != V // 2] = -np.inf
    logits[4::9, rng.random(V) < 0.9] = -np.inf
    logits[4::9, 0] = 1
    logits[5::9] *= 1e4
    logits[6::18, 3], logits[15::18, 4] = np.nan, np.inf
    return jnp.asarray(logits)


def bisected(logits, rows):
    """The rules one after the other, by bisection over the bits, with floating-point sums of the probabilities."""

    def largest(keys, enough):
        t = jnp.zeros(keys.shape[0], jnp.uint32)
        for bit in range(31, -1, -1):
            candidate = t | jnp.uint32(1 << bit)
            t = jnp.where(enough(keys >= candidate[:, None]), candidate, t)
        return keys >= t[:, None]

    def keys_of(x):
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
        return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))

    V = logits.shape[1]
    x = logits / rows.temperature[:, None]
    x = jnp.where(x < (x.max(axis=1) + jnp.log(rows.min_p))[:, None], -jnp.inf, x)
    k = jnp.where((rows.top_k < 1) | (rows.top_k > V), V, rows.top_k)
    x = jnp.where(largest(keys_of(x), lambda mask: mask.sum(axis=1) >= k), x, -jnp.inf)
    p = jax.nn.softmax(x, axis=1)
    kept = largest(keys_of(p), lambda mask: jnp.where(mask, p, 0.0).sum(axis=1) >= rows.top_p)
    return jnp.where(kept | (rows.top_p >= 1)[:, None], x, -jnp.inf), p


def truncated(logits, rows, wanted=True):
    """Of rows that are wanted what is kept, over the temperature, with -inf for what is not."""
    stats = reference.logits_stats(logits, rows.temperature)
    kept = cuts(logits, rows, stats, jnp.broadcast_to(wanted, len(logits)))
    return reference.kept(logits, kept) / rows.temperature[:, None]


@pytest.mark.slow
@pytest.mark.parametrize("V", [33, 700])
def test_as_bisection_over_floating_point_sums(V):
    """Equal bit for bit, but where a sum lies at the border within rounding: there either side of it is right."""
    exact, total = 0, 0
    new, old = jax.jit(truncated), jax.jit(bisected)
    for seed in range(6):
        rng = np.random.default_rng(seed)
        logits, rows = logits_of(rng, V), rows_of(rng, V)
        got, (want, p) = np.asarray(new(logits, rows)), old(logits, rows)
        want, p = np.asarray(want), np.asarray(p, np.float64)
        with_nan = np.isnan(logits).any(axis=1)
        np.testing.assert_array_equal(got[with_nan], np.asarray(logits / rows.temperature[:, None])[with_nan])
        for r in np.flatnonzero(~with_nan):
            total += 1
            if np.array_equal(got[r], want[r], equal_nan=True):
                exact += 1
                continue
            kept = [np.isfinite(x[r]) for x in (got, want)]
            more, fewer = sorted(kept, key=np.sum, reverse=True)
            assert (fewer <= more).all()
            assert p[r][fewer].sum() == pytest.approx(float(rows.top_p[r]), abs=5e-6)
    assert exact > 0.97 * total


def test_rows_that_are_not_wanted_keep_everything():
    rng = np.random.default_rng(0)
    logits, rows = logits_of(rng, 50), rows_of(rng, 50)
    wanted = np.arange(R) % 2 == 0
    got = np.asarray(jax.jit(truncated)(logits, rows, wanted))
    want = np.asarray(logits / rows.temperature[:, None])
    np.testing.assert_array_equal(got[~wanted], want[~wanted])
    np.testing.assert_array_equal(got[wanted], np.asarray(jax.jit(truncated)(logits, rows))[wanted])


@interpreted
def test_the_kernel_gives_the_same_bits(monkeypatch):
    """All passes of the kernel, however they cut: a row finds the same least key as bisection does."""
    rng = np.random.default_rng(3)
    V, count = 2700, 18  # all logits fit the lists; six vectors, the last of which overlaps the one before it
    logits, rows = logits_of(rng, V, count), rows_of(rng, V, count)
    want = jax.jit(truncated)(logits, rows)
    monkeypatch.setattr(truncation, "cutoffs", functools.partial(cutoffs, interpret=detect_races()))
    got = truncated(logits, rows)
    np.testing.assert_array_equal(got, want)
    assert_no_races(got)


@interpreted
def test_a_sample_says_what_to_keep_in_lists():
    """Rows of 105 logits a thread: what lies near the answer fits the lists, or it does not, or the sample misleads."""
    rng = np.random.default_rng(5)
    V = 13400
    logits = rng.normal(size=(7, V)).astype(np.float32)
    logits[1] = np.round(logits[1] * 4)  # ties, more than fit
    logits[2, 77] = 30  # nearly all of the probability
    logits[3, 300:] = -np.inf
    logits[4, :200] += np.linspace(0, 20, 200)
    logits, ones = jnp.asarray(logits), jnp.ones(7)
    highest = logits.max(axis=1)
    log_z = jax.nn.logsumexp(logits, axis=1)
    scale = weight_scale(highest, log_z)
    total = jnp.exp(log_z - highest) * scale
    top_k = jnp.asarray([50, 0, 0, 0, 40, 3000, 0], jnp.int32)
    top_p = jnp.asarray([1.0, 0.6, 0.9, 0.95, 0.8, 0.9, 0.5])
    # The last row's total is wrong: its answer lies outside what the sample promises.
    bounds = reference.Bounds(ones, -jnp.inf * ones, top_k, top_p, highest, scale, total.at[6].mul(0.5))
    got = cutoffs(logits, bounds, interpret=plgpu.InterpretGPUParams())
    np.testing.assert_array_equal(
        reference.kept(logits, got), reference.kept(logits, jax.jit(reference.cutoffs)(logits, bounds))
    )
