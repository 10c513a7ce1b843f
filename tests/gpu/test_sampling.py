"""The sampling kernels on the GPU, at a model's vocabulary."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.truncation import Truncation, cuts
from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.sampling import api, mosaic, reference
from pallas_kernels.sampling.keys import LEAST_KEY
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.sampling_cases import (
    assert_as_good_as_any,
    close_draws,
    cuts_of,
    draws,
    joined,
    logits_of,
    part_of,
    temperatures_of,
)

pytestmark = pytest.mark.gpu

SIZES = (1024, *VOCABULARIES.values())


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("R", [6, 130])
def test_stats(R, V, dtype):
    logits, temperature = logits_of(R, V, dtype), temperatures_of(R)
    assert mosaic.unsupported_reason(logits) is None
    got, want = jax.jit(api.logits_stats)(logits, temperature), jax.jit(reference.logits_stats)(logits, temperature)
    np.testing.assert_array_equal(got.finite, want.finite)
    sound = np.ones(R, bool)
    sound[[4, 5]] = False  # a row with NaN has no maximum, one with infinity no sum
    for name in ("argmax", "log_z", "log_z_tempered"):
        np.testing.assert_allclose(
            np.asarray(getattr(got, name))[sound], np.asarray(getattr(want, name))[sound], rtol=1e-5, err_msg=name
        )
    assert ((np.asarray(got.argmax) >= 0) & (np.asarray(got.argmax) < V)).all()
    cuts = cuts_of(logits)
    got, want = (jax.jit(each.logits_stats)(logits, temperature, cuts) for each in (api, reference))
    sound[0] = False  # it keeps everything, and is not read
    np.testing.assert_allclose(got.log_z_tempered[sound], want.log_z_tempered[sound], rtol=1e-5)
    whole, all_kept = (
        jax.jit(api.logits_stats)(logits, temperature, *cuts) for cuts in ((), (jnp.full(R, LEAST_KEY + 1),))
    )
    for name in ("argmax", "log_z", "log_z_tempered"):
        np.testing.assert_array_equal(
            *(np.asarray(getattr(each, name))[sound] for each in (all_kept, whole)), err_msg=name
        )


@pytest.mark.parametrize("V", [max(SIZES), 129280 // 4])
@pytest.mark.parametrize("first", [1, 8])
def test_draws_of_windows_after_prompts(first, V):
    """Rows of windows begin anywhere in what other kernels found for the rows of prompts and windows; and logits of a part of
    a vocabulary, whose rows are no multiple of 256 bytes, in all logits."""
    rows = 17
    logits = jax.random.normal(jax.random.key(2), (rows, V), jnp.bfloat16)
    keys = jax.random.bits(jax.random.key(3), (rows, 2), jnp.uint32)
    temperature, kept = temperatures_of(rows), cuts_of(logits)

    def draw(implementation, logits, keys, temperature, kept):
        every, wanted = jnp.arange(rows - first, dtype=jnp.int32), jnp.ones(rows - first, bool)
        likely = implementation.logits_stats(logits, temperature, kept).argmax
        logits, keys, temperature, likely, kept = (x[first:] for x in (logits, keys, temperature, likely, kept))
        drawn = implementation.gumbel_argmax(logits, every, temperature, keys, wanted, likely, None, kept)
        return drawn, implementation.logits_stats(logits, temperature, kept).argmax

    got, want = (jax.jit(draw, static_argnums=0)(each, logits, keys, temperature, kept) for each in (mosaic, reference))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("residual", [False, True])
def test_draws(V, dtype, residual):
    case = draws(V, dtype, residual=residual)
    wanted = np.asarray(case[4])
    for kept in (None, cuts_of(case[0])):
        got, want = jax.jit(api.gumbel_argmax)(*case, kept), jax.jit(reference.gumbel_argmax)(*case, kept)
        np.testing.assert_array_equal(np.asarray(got)[wanted], np.asarray(want)[wanted])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("residual", [False, True])
def test_columns_left_out_would_not_win(V, dtype, residual):
    """Rows where the scores of many are within a rounding of the best: what is drawn is as good. In others it is the same."""
    bounded, others = dataclasses.replace(tuning.current(), bounded_draws=True), draws(V, dtype, residual=residual)
    plain, case, wanted = tuning.current(), close_draws(V, dtype, residual=residual), np.asarray(others[4])
    drawn = {}
    for choices in (plain, bounded):
        jax.clear_caches()
        with tuning.use(choices):
            for kept in (None, cuts_of(case[0])):
                assert_as_good_as_any(jax.jit(api.gumbel_argmax)(*case, kept), case, kept)
            drawn[choices] = np.asarray(jax.jit(api.gumbel_argmax)(*others, cuts_of(others[0])))
    jax.clear_caches()
    np.testing.assert_array_equal(drawn[plain][wanted], drawn[bounded][wanted])


@pytest.mark.parametrize("parts", [2, 8])
@pytest.mark.parametrize("residual", [False, True])
def test_parts_of_rows_draw_what_rows_draw(residual, parts):
    case = draws(V := VOCABULARIES["moonlight"], jnp.bfloat16, residual=residual)
    wanted, size = np.asarray(case[4]), V // parts
    for kept in (None, cuts_of(case[0])):
        drawn = [jax.jit(api.gumbel_best)(*part_of(case, i, size), kept, jnp.int32(i)) for i in range(0, V, size)]
        got = joined(drawn, size, np.asarray(case[-1].dense) if residual else None)
        want = jax.jit(api.gumbel_argmax)(*case, kept)
        np.testing.assert_array_equal(got[wanted], np.asarray(want)[wanted])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("R", [1, 6, 130, 300])
def test_likeliest(R, V, dtype):
    """The ids of a stable sort, and no others in rows that want none."""
    values = 3 * np.random.default_rng(V).normal(size=(R, V))
    # More than a thread keeps, its largest last, and ties everywhere else.
    values[5::6] = np.where(np.arange(V) % 512 < 4, np.arange(V), np.where(values[5::6] < 0, -0.0, 0.0))
    logits = jnp.asarray(values, dtype)  # with ties in bfloat16
    wanted = np.arange(R) % 3 != 1
    assert mosaic.unsupported_reason(logits) is None
    got = jax.jit(api.likeliest, static_argnums=1)(logits, 20, jnp.asarray(wanted))
    values = np.asarray(logits, np.float32)
    want = np.argsort(-values, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(np.asarray(got.ids)[wanted], want[wanted])
    np.testing.assert_array_equal(np.asarray(got.logits)[wanted], np.take_along_axis(values, want, axis=1)[wanted])


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    ("R", "V"), [(6, 1024), *((R, VOCABULARIES["moonlight"]) for R in (1, 40, 130, 300)), (600, 4096)]
)
def test_truncation(R, V, dtype):
    """The kernel's passes keep what the reference keeps, but for ids whose exponentials round otherwise at a border.

    A row has many blocks that hand each other their sums, a few, or one. What lies near an answer fits the lists, or it does
    not: some rows are flat, some nothing but few values.
    """
    rng = np.random.default_rng(V)
    logits = rng.normal(size=(R, V)) * np.resize([3, 0.9, 3, 1.3], R)[:, None]
    logits[7::24] = np.round(logits[7::24])
    logits = jnp.asarray(logits, dtype)
    assert mosaic.unsupported_reason(logits) is None

    def some(*values):
        return np.resize(values, R)

    rows = Truncation(
        temperatures_of(R),
        jnp.asarray(some(0, 0, 0.01, 0, 0, 0.1), jnp.float32),
        jnp.asarray(some(0, 50, V // 2, 1, 0, 7), jnp.int32),
        jnp.asarray(some(0.95, 1, 0.5, 0.9, 0.3, 0.8), jnp.float32),
    )
    stats = reference.logits_stats(logits, rows.temperature)
    wanted = jnp.arange(R) % 6 != 4

    def kept(backend):
        def traced_anew(*args):
            return reference.kept(logits, cuts(*args))

        with use(Backends(attention=backend)):
            return np.isfinite(jax.jit(traced_anew)(logits, rows, stats, wanted))

    got, want = kept("auto"), kept("reference")
    assert got[4::6].all()
    p = np.asarray(jax.nn.softmax(logits.astype(jnp.float32) / rows.temperature[:, None], axis=1))
    assert np.where(got != want, p, 0).sum(axis=1).max() < 2e-3
    for row in (1, 3):  # top_k sums no exponentials, or keeps one id
        np.testing.assert_array_equal(got[row::6], want[row::6])
    np.testing.assert_array_equal(got, kept("auto"))
