"""The Mosaic GPU kernels of sampling, interpreted on the CPU against plain XLA, and lowered for cuda."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.sampling import api, mosaic, parts, reference
from pallas_kernels.sampling.cutoffs import cutoffs
from pallas_kernels.sampling.keys import LEAST_KEY
from pallas_kernels.sampling.likeliest import likeliest
from pallas_kernels.sampling.noise import (
    BLOCK,
    Bar,
    bar_of,
    block_bits,
    block_of,
    depth,
    exponential,
    noise_of,
    threefry,
)
from pallas_kernels.sampling.shapes import VOCABULARIES
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
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
from tests.matrices import full

# Two vectors, the second of which overlaps the first.
V = 1400


@interpreted
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_stats_interpreted(dtype):
    logits, temperature = logits_of(6, V, dtype), temperatures_of(6)
    got, want = (
        mosaic.logits_stats(logits, temperature, interpret=detect_races()),
        reference.logits_stats(logits, temperature),
    )
    np.testing.assert_array_equal(got.finite, [True, True, True, False, False, False])
    np.testing.assert_array_equal(want.finite, got.finite)
    for name in ("argmax", "log_z", "log_z_tempered"):
        # The fourth row has -inf, which only `finite` minds; the last two have NaN and infinity.
        np.testing.assert_allclose(getattr(got, name)[:4], getattr(want, name)[:4], rtol=1e-6, err_msg=name)
    assert ((np.asarray(got.argmax) >= 0) & (np.asarray(got.argmax) < V)).all()
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize("residual", [False, True])
def test_draws_interpreted(residual):
    case = draws(V, jnp.bfloat16, residual=residual)
    got, want = mosaic.gumbel_argmax(*case, interpret=detect_races()), reference.gumbel_argmax(*case)
    wanted = np.asarray(case[4])
    assert 0 < wanted.sum() < len(wanted)
    np.testing.assert_array_equal(np.asarray(got)[wanted], np.asarray(want)[wanted])
    assert_no_races(got)


@interpreted
def test_a_draw_of_each_row_needs_no_rows():
    logits, _, temperature, keys, wanted, likely, _ = draws(V, jnp.bfloat16, residual=False)
    of_each = (x[:3] for x in (temperature, keys, wanted))
    rest = (*of_each, likely)
    got = mosaic.gumbel_argmax(logits, None, *rest, interpret=detect_races())
    np.testing.assert_array_equal(got, reference.gumbel_argmax(logits, jnp.arange(3), *rest))
    np.testing.assert_array_equal(got, reference.gumbel_argmax(logits, None, *rest))
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize("residual", [False, True])
def test_only_what_is_kept_is_drawn(residual):
    case = draws(V, jnp.bfloat16, residual=residual)
    logits, wanted = case[0], np.asarray(case[4])
    cuts = cuts_of(logits)
    got, want = mosaic.gumbel_argmax(*case, cuts, interpret=detect_races()), reference.gumbel_argmax(*case, cuts)
    np.testing.assert_array_equal(np.asarray(got)[wanted], np.asarray(want)[wanted])
    assert_no_races(got)
    assert (np.asarray(got)[wanted] != np.asarray(reference.gumbel_argmax(*case))[wanted]).any()
    kept = np.asarray(reference.kept(logits, cuts))[np.asarray(case[1])]
    assert np.isfinite(kept[np.arange(len(kept)), np.asarray(got)])[wanted].all()


@interpreted
@pytest.mark.parametrize(
    ("residual", "kept", "dtype"),
    [(False, False, jnp.float32), (False, True, jnp.bfloat16), (True, False, jnp.bfloat16), (True, True, jnp.float32)],
)
def test_columns_left_out_would_not_win(monkeypatch, residual, kept, dtype):
    """In blocks of several vectors, where all columns are about as good as what was seen before."""
    monkeypatch.setattr(parts, "multiprocessors", lambda: 1)
    case = close_draws(size := 5000, dtype, residual=residual)
    assert parts.Parts(len(case[1]), size, 4, mosaic.DRAWN_AT_ONCE).vectors == 12  # two spans, and one that overlaps
    cuts = cuts_of(case[0]) if kept else None
    bounded = dataclasses.replace(tuning.current(), bounded_draws=True)
    mosaic.gumbel_argmax.clear_cache()
    with tuning.use(bounded):
        got = mosaic.gumbel_argmax(*case, cuts, interpret=detect_races())
    assert_no_races(got)
    assert_as_good_as_any(got, case, cuts)

    def no_bar(score, temperature, *less):
        slope, offset = bar_of(score, temperature, *less)
        return Bar(slope, jnp.where(temperature > 0, jnp.float32(jnp.inf), offset))

    # Many scores are equal but for rounding, which XLA must not change: it does not know either that nothing is left out.
    monkeypatch.setattr(mosaic, "bar_of", no_bar)
    mosaic.gumbel_argmax.clear_cache()
    with tuning.use(bounded):
        np.testing.assert_array_equal(got, mosaic.gumbel_argmax(*case, cuts, interpret=detect_races()))
    mosaic.gumbel_argmax.clear_cache()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kernel", "residual", "kept", "size"),
    [
        (False, False, False, V),
        (False, True, True, V),
        pytest.param(True, True, True, V, marks=interpreted),
        pytest.param(True, False, False, 4096, marks=interpreted),  # a part begins with a span
        pytest.param(True, True, False, 4096, marks=[interpreted, pytest.mark.full]),
        pytest.param(True, False, False, V, marks=[interpreted, pytest.mark.full]),
    ],
)
def test_parts_of_rows_draw_what_rows_draw(monkeypatch, kernel, residual, kept, size):
    """Each part with the noise of its own columns, its best against the best of the others."""
    monkeypatch.setattr(parts, "multiprocessors", lambda: 1)  # one block
    case = draws(2 * size, jnp.bfloat16, residual=residual)
    cuts, wanted, drawn_of_parts = cuts_of(case[0]) if kept else None, np.asarray(case[4]), []
    for i in range(2):
        part, first = part_of(case, i * size, size), jnp.int32(i * size)
        drawn = reference.gumbel_best(*part, cuts, first)
        if kernel:
            mosaic.gumbel_best.clear_cache()
            with tuning.use(dataclasses.replace(tuning.current(), bounded_draws=True)):
                drawn = mosaic.gumbel_best(*part, cuts, first, interpret=detect_races())
            assert_no_races(drawn)
        drawn_of_parts.append(drawn)
    got = joined(drawn_of_parts, size, np.asarray(case[-1].dense) if residual else None)
    np.testing.assert_array_equal(got[wanted], np.asarray(reference.gumbel_argmax(*case, cuts))[wanted])
    assert len({*(got[wanted] // size)}) == 2


@interpreted
def test_stats_of_what_is_kept():
    logits, temperature = logits_of(6, V, jnp.bfloat16)[:4], temperatures_of(4)
    cuts = cuts_of(logits)
    got = mosaic.logits_stats(logits, temperature, cuts, interpret=detect_races())
    want = reference.logits_stats(logits, temperature, cuts)
    np.testing.assert_allclose(got.log_z_tempered[1:], want.log_z_tempered[1:], rtol=1e-6)
    np.testing.assert_array_equal(got.argmax[1:], want.argmax[1:])
    assert_no_races(got)
    whole = mosaic.logits_stats(logits, temperature, jnp.full(4, LEAST_KEY + 1), interpret=detect_races())
    jax.tree.map(
        np.testing.assert_array_equal, whole, mosaic.logits_stats(logits, temperature, interpret=detect_races())
    )


@interpreted
@pytest.mark.parametrize(
    ("size", "count", "dtype", "device"),
    [
        (V, 20, jnp.bfloat16, 132),  # one block, the last vector of which overlaps
        (4100, 5, jnp.float32, 132),  # three blocks, and one for their candidates
        (10 * 1024 + 8, 20, jnp.bfloat16, 1),  # one block: more logits than its lists hold
    ],
)
def test_likeliest_interpreted(monkeypatch, size, count, dtype, device):
    """The same ids in the same order as a stable sort, ties and all; rows that do not want them cost no look.

    Args:
        device: multiprocessors.
    """
    monkeypatch.setattr(parts, "multiprocessors", lambda: device)
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(4, size)).astype(np.float32)
    logits[1] = rng.integers(-3, 3, size)  # many ties, within blocks and across
    logits[2] = np.linspace(0, 50, size)  # all in the last vectors
    if device == 1:
        # One thread has all that are large, the largest last, and more than it keeps; no other is greater than another.
        logits[2] = np.where(rng.random(size) < 0.5, -0.0, 0.0)
        logits[2, :: parts.WARPGROUP] = np.arange(len(logits[2, :: parts.WARPGROUP]))
    wanted = jnp.asarray([True, True, True, False])
    logits = jnp.asarray(logits, dtype)
    got = likeliest(logits, count, wanted, interpret=detect_races())
    want = reference.likeliest(logits, count, wanted)
    order = np.argsort(-np.asarray(logits, np.float32), axis=1, kind="stable")[:, :count]
    np.testing.assert_array_equal(want.ids, order)
    for name in ("ids", "logits"):
        np.testing.assert_array_equal(getattr(got, name)[:3], getattr(want, name)[:3])
    assert_no_races(got)


def words_of(keys: np.ndarray) -> tuple[jax.Array, jax.Array]:
    words = jnp.asarray(keys.view(np.int32))
    return words[..., 0, None], words[..., 1, None]


def test_random_words_are_threefry_s():
    """As jax has them: its bits of the element number n are both words of (0, n), xor-ed."""
    keys = np.random.default_rng(0).integers(0, 2**32, (3, 2), np.uint32)
    x, y = threefry(words_of(keys), 0, jnp.arange(5000, dtype=jnp.int32)[None])
    for key, bits in zip(keys, np.asarray(x ^ y), strict=True):
        want = jax.random.bits(jax.random.wrap_key_data(jnp.asarray(key), impl="threefry2x32"), (5000,), jnp.uint32)
        np.testing.assert_array_equal(bits.view(np.uint32), want)


def test_a_block_is_what_a_thread_loads_of_a_span():
    blocks = np.asarray(block_of(jnp.arange(3 * 2048, dtype=jnp.int32)))
    assert np.bincount(blocks).tolist() == [BLOCK] * 384
    assert np.flatnonzero(blocks == 129).tolist() == [2048 + 512 * i + 4 + k for i in range(4) for k in range(4)]


def test_noise_is_gumbel_s_and_independent():
    """Of ids in a block too: the distribution of each, of pairs, and of which is the largest."""
    N = 100_000
    keys = np.random.default_rng(0).integers(0, 2**32, (N, 2), np.uint32)
    # Three of a block, and one of another.
    noise = np.asarray(noise_of(words_of(keys), jnp.asarray([[5, 6, 5 + 512, 9]], jnp.int32)))
    uniform = np.exp(-np.exp(-noise.astype(np.float64)))
    for column in uniform.T:
        # Kolmogorov-Smirnov, beyond which 1e-6 of samples are.
        assert abs(np.sort(column) - (np.arange(N) + 0.5) / N).max() < 2.7 / N**0.5
    cells = (uniform * 4).astype(int)
    for i in range(4):
        for j in range(i):
            counts = np.bincount(4 * cells[:, i] + cells[:, j], minlength=16)
            assert ((counts - N / 16) ** 2 / (N / 16)).sum() < 60  # chi-square, 15 degrees of freedom: 2e-7
    wins = np.bincount((noise + np.log([1, 2, 3, 4])).argmax(axis=1))
    assert abs(wins / N - np.array([1, 2, 3, 4]) / 10).max() < 5 * 0.5 / N**0.5


def test_the_least_of_a_block_is_known_from_its_bits():
    keys = np.random.default_rng(1).integers(0, 2**32, (50, 2), np.uint32)
    ids = np.flatnonzero(np.asarray(block_of(jnp.arange(2048, dtype=jnp.int32))) == 77)
    noise = np.asarray(noise_of(words_of(keys), jnp.asarray(ids, jnp.int32)[None]))
    bits, place = (np.asarray(word)[:, 0] for word in block_bits(words_of(keys), jnp.full((1, 1), 77, jnp.int32)))
    np.testing.assert_array_equal(noise.argmax(axis=1), place & (BLOCK - 1))
    u = (bits.view(np.uint32) >> 9) / 2**23
    np.testing.assert_allclose(noise.max(axis=1), -np.log(-np.log(u) / BLOCK), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_bars_stop_no_winner_and_most_others():
    """A score that is just reached, of every size, and one that is just missed by a winner's noise."""
    rng, N = np.random.default_rng(0), 100_000
    bits = jnp.asarray(rng.integers(-(2**31), 2**31, N), jnp.int32)
    # The largest and least noise too: u = 1 - 2**-23, and u = 0.
    bits = bits.at[:3].set(jnp.asarray([-1, -1 << 9, 0]))
    noise = -jnp.log(exponential(bits) / BLOCK)
    temperature = jnp.asarray(10 ** rng.uniform(-8, 8, N), jnp.float32)
    tempered = jnp.asarray(10 ** rng.uniform(-3, 6, N) * rng.choice([-1, 1], N), jnp.float32)
    logits = (tempered * temperature).at[3:100].set(0.0)
    log_z = jnp.asarray(rng.choice([0, 1, 1e4], N) * rng.normal(size=N), jnp.float32)

    def stopped(target, less):
        return np.asarray(depth(bits) > jax.vmap(bar_of)(target, temperature, less).at(logits))

    score = logits / temperature + noise
    assert not stopped(score, None).any()
    assert not stopped(jnp.log(jnp.exp(logits / temperature - log_z)) + noise, log_z).any()
    assert not stopped(jnp.full(N, -jnp.inf), None).any()
    assert not stopped(jnp.full(N, jnp.nan), None).any()
    winners = np.asarray((noise > 3 + np.log(BLOCK)) & (abs(score) < 1e3))
    assert winners.sum() > 1000
    assert stopped(score + 0.2, None)[winners].all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("R", "size", "dtype"),
    [
        *full((1, VOCABULARIES["moonlight"], jnp.bfloat16)),
        (512, VOCABULARIES["moonlight"], jnp.bfloat16),
        (8, VOCABULARIES["deepseek-v3"], jnp.float32),
        *full((3, 1024, jnp.bfloat16)),
    ],
)
def test_lowers_for_the_gpu(R, size, dtype):
    def shape(dims, dtype):
        return jax.ShapeDtypeStruct(dims, dtype)

    logits, floats, ints = shape((R, size), dtype), shape((R,), jnp.float32), shape((R,), jnp.int32)
    bools, keys, q_logits = shape((R,), bool), shape((R, 2), jnp.uint32), shape((3 * R, size), jnp.bfloat16)
    residual = reference.Residual(floats, ints, bools, q_logits, floats, ints)

    def best(logits, wanted):
        return likeliest(logits, 20, wanted)

    def bounded(*args):
        with tuning.use(dataclasses.replace(tuning.current(), bounded_draws=True)):
            return mosaic.gumbel_best.__wrapped__(*args)

    for function, *args in (
        (mosaic.logits_stats, logits, floats),
        (mosaic.logits_stats, logits, floats, ints),
        (mosaic.gumbel_argmax, logits, ints, floats, keys, bools, ints, None),
        (mosaic.gumbel_argmax, logits, ints, floats, keys, bools, ints, residual),
        (mosaic.gumbel_argmax, logits, ints, floats, keys, bools, ints, residual, ints),
        (mosaic.gumbel_best, logits, ints, floats, keys, bools, ints, residual, ints, shape((), jnp.int32)),
        (bounded, logits, ints, floats, keys, bools, ints, residual, ints, shape((), jnp.int32)),
        (cutoffs, logits, reference.Bounds(floats, floats, ints, *([floats] * 4))),
        (best, logits, bools),
    ):
        text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
        # The best of several blocks are found by a second kernel.
        several = function is best and parts.resident_parts(R, size, jnp.dtype(dtype).itemsize, 4, 4).count > 1
        assert text.count("custom_call @mosaic_gpu") == 1 + several


def test_unsupported_calls_say_why():
    with use(Backends()) as chosen:
        api.logits_stats(jnp.zeros((1, 8), jnp.bfloat16), jnp.ones(1))
    assert chosen == {"logits_stats": {"reference"}}
    assert "at least 1024 and rows of multiples of 16 bytes" in mosaic.unsupported_reason(
        jnp.zeros((1, 1020), jnp.bfloat16)
    )
    assert "rows of multiples of 16 bytes" in mosaic.unsupported_reason(jnp.zeros((1, 4001), jnp.bfloat16))
