"""Choosing keys and attending to them, against float64 NumPy; everything that no request owns is NaN."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.key_choice.api import choose_keys
from pallas_kernels.latents import dequantise, quantise
from pallas_kernels.mla_sparse import gathered, mosaic, reference
from pallas_kernels.mla_sparse.api import mla_sparse
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import paged_pool, relative_error

# Contexts on pages of 8 and of 64 tokens, some shorter than what is chosen; query tokens of each, not in order.
LENGTHS, PAGE, COUNT = (1, 9, 40, 200, 300), 8, 24
QUERIES, HEADS, WIDTH = 40, 3, 16


def cases(rng):
    """Tables' rows and bounds of query tokens, one of which sees nothing."""
    rows = rng.integers(0, len(LENGTHS), QUERIES).astype(np.int32)
    bounds = (1 + rng.integers(0, np.array(LENGTHS)[rows])).astype(np.int32)
    bounds[0] = 0
    bounds[1 : 1 + len(LENGTHS)], rows[1 : 1 + len(LENGTHS)] = LENGTHS, np.arange(len(LENGTHS))
    return rows, bounds


def flat(pool, tables, row, bound):
    """The first tokens of a request, [bound, width]."""
    return pool[tables[row]].reshape(-1, pool.shape[-1])[:bound]


def best(scores, count):
    """Positions of the largest scores, ascending: of equal ones the lowest."""
    return np.sort(np.argsort(-scores, kind="stable")[:count])


def chosen_of(places):
    places = np.asarray(places)
    return [row[row >= 0].tolist() for row in places]


@pytest.fixture(scope="module")
def choose():
    return jax.jit(choose_keys, static_argnames="count")


def test_the_largest_scores_are_chosen(choose):
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, LENGTHS, WIDTH, page_size=PAGE)
    rows, bounds = cases(rng)
    q = rng.standard_normal((QUERIES, HEADS, WIDTH), np.float32)
    weights = rng.standard_normal((QUERIES, HEADS), np.float32)
    places = np.asarray(choose(q, weights, pool, tables, rows, bounds, count=COUNT))
    assert places.shape == (QUERIES, COUNT)
    for t, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        keys = flat(pool, tables, row, bound).astype(np.float64)
        # With three heads there are many keys that none of them looks for, whose scores are all 0.
        scores = (np.maximum(q[t] @ keys.T, 0) * weights[t][:, None]).sum(axis=0)
        want = best(scores, COUNT)
        assert chosen_of(places[t : t + 1])[0] == want.tolist()
        assert (places[t, len(want) :] == -1).all()


@pytest.mark.parametrize("values", [2, 1, 5])
def test_of_equal_scores_the_lowest_positions_win(choose, values):
    """Scores of a few values, zeros of both signs among them; pages, other rows and their number change nothing."""
    rng = np.random.default_rng(values)
    keys = rng.integers(-values, values + 1, (300, 1)).astype(np.float32)
    want = {}
    for order in range(2):
        pool, tables = paged_pool(rng, LENGTHS, 1, page_size=PAGE)
        pool[tables[4, : -(-300 // PAGE)]] = np.pad(keys, ((0, 4), (0, 0)), constant_values=np.nan).reshape(-1, PAGE, 1)
        rows, bounds = cases(rng)
        rows[7:], bounds[7:] = 4, rng.integers(1, 301, QUERIES - 7)
        many = slice(7, 7 + (20 if order else 33))
        # Weights of both signs: what no head looks for scores 0.0 or -0.0, in the middle.
        q, weights = np.array([[[1.0], [-1.0]]] * QUERIES, np.float32), np.array([[1.0, -1.0]] * QUERIES, np.float32)
        places = choose(q[many], weights[many], pool, tables, rows[many], bounds[many], count=COUNT)
        for bound, got in zip(bounds[many], chosen_of(places), strict=True):
            assert got == best(keys[:bound, 0], COUNT).tolist()
            assert want.setdefault(int(bound), got) == got


def test_a_score_that_is_no_number_is_read(choose):
    """It must end its own request, not hide behind scores that are numbers; an infinite one is the largest."""
    pool, tables = paged_pool(np.random.default_rng(0), (100,), 1, page_size=PAGE)
    pool[tables[0, 9], 3], pool[tables[0, 4], 1] = np.nan, np.inf
    ones = np.ones((1, 1, 1), np.float32)
    places = choose(ones, ones[0], pool, tables, np.zeros(1, np.int32), np.full(1, 100, np.int32), count=COUNT)
    assert {9 * PAGE + 3, 4 * PAGE + 1} <= set(chosen_of(places)[0])


def choices(rng, pool, tables, rows, bounds):
    """Of each token some positions before its bound, then what no cache has; and how many. All others become NaN."""
    chosen = rng.choice([-1, 2**30], (QUERIES, COUNT)).astype(np.int32)
    numbers = np.zeros(QUERIES, np.int32)
    page, read = pool.shape[1], np.zeros(pool.shape[:2], bool)
    for t, (row, bound) in enumerate(zip(rows, bounds, strict=True)):
        places = rng.permutation(bound)[: min(bound, rng.integers(1, COUNT + 1))]
        chosen[t, : len(places)], numbers[t] = places, len(places)
        read[tables[row, places // page], places % page] = True
    pool[~read] = np.nan
    return chosen, numbers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stored", "attend"),
    [("float32", mla_sparse), ("fp8", mla_sparse), ("float32", gathered.mla_sparse), ("fp8", gathered.mla_sparse)],
)
def test_only_chosen_latents_are_read(stored, attend):
    """In both ways; the second hands them to the kernels of `mla_decode`, here its reference."""
    rng = np.random.default_rng(1)
    L, R, H, V = 20, 4, 3, 6
    pool, tables = paged_pool(rng, LENGTHS, L + R, page_size=PAGE)
    rows, bounds = cases(rng)
    chosen, numbers = choices(rng, pool, tables, rows, bounds)
    latent = quantise(jnp.asarray(pool[..., :L]), jnp.asarray(pool[..., L:])) if stored == "fp8" else jnp.asarray(pool)
    pool = np.asarray(dequantise(latent, jnp.float32), np.float64)
    q, w_uv = rng.standard_normal((QUERIES, H, L + R), np.float32), rng.standard_normal((H, V, L), np.float32)
    got = jax.jit(attend, static_argnames="scale")(q, latent, tables, rows, chosen, numbers, w_uv, scale=0.3)
    for t in np.flatnonzero(numbers):
        keys = flat(pool, tables, rows[t], bounds[t])[chosen[t, : numbers[t]]]
        scores = 0.3 * q[t] @ keys.T
        w = np.exp(scores - scores.max(axis=1, keepdims=True))
        want = np.einsum("hl,hvl->hv", (w / w.sum(axis=1, keepdims=True)) @ keys[:, :L], w_uv)
        np.testing.assert_allclose(got[t], want, atol=1e-5)


@interpreted
def test_chosen_latents_in_the_kernel():
    """Which gathers them itself: as plain XLA in float32, without races."""
    rng = np.random.default_rng(2)
    pool, tables = paged_pool(rng, LENGTHS, 576)
    rows, bounds = cases(rng)
    chosen, numbers = choices(rng, pool, tables, rows, bounds)
    q = jnp.asarray(rng.standard_normal((QUERIES, 4, 576)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((4, 8, 512)) / 512**0.5, jnp.bfloat16)
    latent = jnp.asarray(pool, jnp.bfloat16)
    rest = tables, rows, chosen, numbers
    got = mosaic.mla_sparse(q, latent, *rest, w_uv, scale=0.05, sms=8, interpret=detect_races())
    exact = [a.astype(jnp.float32) for a in (q, latent, w_uv)]
    want = reference.mla_sparse(*exact[:2], *rest, exact[2], scale=0.05)
    assert relative_error(got[numbers > 0], want[numbers > 0]) < 1e-2
    assert_no_races(got)


def test_memory_of_a_long_prompt():
    """2048 tokens with a context of 163840, at DeepSeek-V3.2's sizes: no array has both in its size, or all chosen latents."""
    T, S, struct = 2048, 163840, jax.ShapeDtypeStruct
    tables, each = struct((4, S // 64), jnp.int32), struct((T,), jnp.int32)
    q, keys = struct((T, 64, 128), jnp.bfloat16), struct((S // 64, 64, 128), jnp.bfloat16)
    call = jax.jit(choose_keys, static_argnames="count")
    compiled = call.lower(q, struct((T, 64), jnp.float32), keys, tables, each, each, count=2048).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * S  # a quarter of the scores in float32

    # In float32: on a CPU a whole bfloat16 cache would be turned into it first.
    q, latent = struct((T, 16, 576), jnp.float32), struct((S // 64, 64, 576), jnp.float32)
    chosen, w_uv = struct((T, 2048), jnp.int32), struct((16, 128, 512), jnp.float32)
    call = jax.jit(mla_sparse, static_argnames="scale")
    compiled = call.lower(q, latent, tables, each, chosen, each, w_uv, scale=0.1).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < T * 2048 * 576 // 8  # 1/32 of all chosen latents
