"""The Mosaic GPU kernel of mla_decode, interpreted on the CPU with race detection, and lowered for cuda; its schedule."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, UnsupportedError, choose, use
from pallas_kernels.mla_decode import head_values, mosaic, reference, wide_values
from pallas_kernels.mla_decode.api import head_rows, mla_decode
from pallas_kernels.mla_decode.fp8 import items_of_a_block
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, SCALE, VALUE, WIDE_VALUE
from pallas_kernels.mla_decode.values import supports
from pallas_kernels.split_kv import PAGE, make_schedule, num_items, page_limits
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import fp8_and_plain, fp8_shapes, paged_pool, relative_error, window_bounds
from tests.kernels.schedule_cases import CASES, MANY_REQUESTS, check_attention, check_schedules, chosen
from tests.kernels.schedule_cases import mla_decode as mla_decode_of_both
from tests.matrices import full, members


@interpreted
@pytest.mark.parametrize(
    ("lengths", "n", "heads", "sms"),
    [
        ((70, 200, 64, 333, 1), 4, 4, 8),  # some requests split, some not, a window longer than its context
        ((130, 128), 1, 16, 1),  # more requests than thread blocks
        ((65, 300), 3, 32, 6),  # two blocks of query rows, the second half empty
    ],
)
def test_interpreted_without_races(lengths, n, heads, sms):
    rng = np.random.default_rng(0)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), n, heads, CACHED)), jnp.bfloat16)
    latent = jnp.asarray(pool, jnp.bfloat16)
    bounds = window_bounds(lengths, n)
    got = mosaic.mla_decode(q, latent, tables, bounds, scale=SCALE, sms=sms, interpret=detect_races())

    exact = [a.astype(jnp.float32) for a in (q, latent)]
    want = reference.mla_decode(*exact, jnp.asarray(tables), jnp.asarray(bounds), scale=SCALE, value_dim=LATENT)
    assert relative_error(got, want) < 1e-2
    assert_no_races(got)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "n", "heads", "sms"),
    [
        ((70, 200, 64, 1), 4, 4, 8),
        ((65, 130), 3, 32, 4),
        # An item for each of two warpgroups: some of requests that are split, one alone in its block, some without pages.
        ((70, 200, 64, 1, 129, 333, 65, 2, 128), 2, 4, 7),
        ((130, 64, 7, 300, 1, 65, 190, 128), 1, 16, 1),
    ],
)
def test_fp8_is_the_kernel_on_what_the_codes_stand_for(lengths, n, heads, sms):
    """With NaN in the codes, scales and keys that no context owns; without races.

    A GPU gives the same bits (`tests/gpu/test_fp8_cache.py`); the interpreter adds up the scores' columns in another order.
    """
    # Drawn so that no weight lies between two numbers of bfloat16, or another order would move its whole row.
    rng = np.random.default_rng(2)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), n, heads, CACHED)), jnp.bfloat16)
    latents, plain = fp8_and_plain(pool)
    run = functools.partial(mosaic.mla_decode, scale=SCALE, interpret=detect_races())
    got = run(q, latents, tables, window_bounds(lengths, n), sms=sms)
    at_once = items_of_a_block(len(lengths), mosaic.padded_rows(n * heads))
    want = run(q, plain, tables, window_bounds(lengths, n), sms=sms * at_once)  # the same splits
    got, want = (np.asarray(out, np.float32) for out in (got, want))
    np.testing.assert_allclose(got, want, rtol=2**-6, atol=2e-3)
    assert (got != want).mean() < 1e-3
    assert_no_races((got, want), kernels=2)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "n", "heads", "sms"),
    [((70, 200, 64, 333, 1), 1, 4, 8), ((65, 300), 3, 32, 6)],
)
def test_gathered_is_the_kernel_on_pages_of_the_same(lengths, n, heads, sms):
    """Tokens anywhere in the cache, to the bit; NaN in all others and past each context's end. Without races."""
    rng = np.random.default_rng(2)
    pool, tables = paged_pool(rng, lengths, CACHED)
    moved = rng.permutation(pool.shape[0] * 64)  # where each token of the pages lies
    scattered = np.full((pool.shape[0] * 64, CACHED), np.nan, np.float32)
    scattered[moved] = pool.reshape(-1, CACHED)
    places = moved[(tables[:, :, None] * 64 + np.arange(64)).reshape(len(lengths), -1)].astype(np.int32)
    q = jnp.asarray(rng.standard_normal((len(lengths), n, heads, CACHED)), jnp.bfloat16)
    run = functools.partial(mosaic.mla_decode, scale=SCALE, sms=sms, interpret=detect_races())
    bounds = window_bounds(lengths, n)
    want = run(q, jnp.asarray(pool, jnp.bfloat16), tables, bounds)
    got = run(q, jnp.asarray(scattered.reshape(pool.shape), jnp.bfloat16), places, bounds, gathered=True)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    assert_no_races((got, want), kernels=2)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "n", "sms"),
    [
        pytest.param((70,), 1, 8, marks=pytest.mark.full),  # one request, split
        ((60, 200), 2, 8),  # one whole, one split
        ((130, 128, 7, 300), 1, 4),  # all whole
        ((330, 9), 4, 7),  # on tensor cores; one whole, one split
        ((650, 9), 4, 14),  # one of more items than are loaded at once
    ],
)
def test_values_in_the_merging_kernel(lengths, n, sms):
    """As merging and then the up-projection, without races."""
    wide = len(lengths) * n > 4
    rng = np.random.default_rng(1)
    H, V = 2, 64
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), n, H, CACHED)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((H, V, LATENT)) / LATENT**0.5, jnp.bfloat16)
    args = (q, jnp.asarray(pool, jnp.bfloat16), tables, window_bounds(lengths, n))
    run = functools.partial(mosaic.mla_decode, scale=SCALE, sms=sms, interpret=detect_races())
    with tuning.use(Tuning(wide_values_tokens=8)):
        got, out = run(*args, w_uv), run(*args)
        assert wide_values.supports(len(lengths) * n, w_uv) == wide
    assert got.shape == (len(lengths), n, H, V)
    assert supports(len(lengths) * n, w_uv) != wide
    assert relative_error(got, reference.values(out.astype(jnp.float32), w_uv.astype(jnp.float32))) < 4e-3
    assert_no_races((got, out), kernels=2)


@interpreted
@pytest.mark.slow
def test_blocks_of_other_sizes(monkeypatch):
    """Few warpgroups with many tokens have the values of many with few, up to the order in which items are merged."""
    lengths, H, V = (9, 200) * 8, 2, 64
    rng = np.random.default_rng(4)
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), 1, H, CACHED)), jnp.bfloat16)
    w_uv = jnp.asarray(rng.standard_normal((H, V, LATENT)) / LATENT**0.5, jnp.bfloat16)
    args = (q, jnp.asarray(pool, jnp.bfloat16), tables, window_bounds(lengths, 1), w_uv)
    run = functools.partial(mosaic.mla_decode.__wrapped__, scale=SCALE, sms=20, interpret=detect_races())
    found = []
    with tuning.use(Tuning(wide_values_tokens=16)):
        for multiprocessors, shape in ((4, (1, 4)), (2, (2, 4)), (1, (2, 1))):
            monkeypatch.setattr(wide_values, "MULTIPROCESSORS", multiprocessors)
            assert wide_values.granules_and_warpgroups(len(lengths), H * V // wide_values.M) == shape
            found.append(run(*args).astype(jnp.float32))
        monkeypatch.undo()
        assert wide_values.granules_and_warpgroups(136, 32) is None
    for each in found[1:]:
        assert relative_error(each, found[0]) < 4e-3
    assert_no_races(found, kernels=6)


@interpreted
@pytest.mark.parametrize(
    ("lengths", "wide"), [((70, 200), 0), ((70, 200, 64, 333, 1, 9, 20, 130), 0), ((9, 200) * 4, 8)]
)
def test_padding_of_heads_is_not_read(lengths, wide):
    """In each of the three ways that end in values: queries past the heads may be NaN."""
    rng = np.random.default_rng(3)
    H, V = 5, 64
    pool, tables = paged_pool(rng, lengths, CACHED)
    q = jnp.asarray(rng.standard_normal((len(lengths), 1, H, CACHED)), jnp.bfloat16)
    padded = jnp.pad(q, ((0, 0), (0, 0), (0, head_rows(1, H) - H), (0, 0)), constant_values=jnp.nan)
    assert padded.shape[2] == 8
    w_uv = jnp.asarray(rng.standard_normal((H, V, LATENT)) / LATENT**0.5, jnp.bfloat16)
    rest = jnp.asarray(pool, jnp.bfloat16), tables, window_bounds(lengths, 1), w_uv
    with tuning.use(Tuning(wide_values_tokens=wide)):
        got, want = (mosaic.mla_decode(x, *rest, scale=SCALE, sms=9, interpret=detect_races()) for x in (padded, q))
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    assert not jnp.isnan(got).any()
    plain = mla_decode(padded, *rest, scale=SCALE, value_dim=LATENT)
    np.testing.assert_array_equal(plain.astype(jnp.float32), mla_decode(q, *rest, scale=SCALE, value_dim=LATENT))
    assert_no_races((got, want), kernels=2)


@interpreted
@pytest.mark.parametrize(("T", "heads", "rows", "V"), [(8, 2, 3, 64), (24, 2, 2, 128), (136, 1, 1, 64)])
def test_values_of_each_head(T, heads, rows, V):
    """More tokens than a block has, more rows than heads, and a NaN that stays in its token and head."""
    rng = np.random.default_rng(T)
    out = jnp.asarray(rng.standard_normal((T, rows, LATENT)), jnp.bfloat16).at[3, 0, 5].set(jnp.nan)
    w_uv = jnp.asarray(rng.standard_normal((heads, V, LATENT)) / LATENT**0.5, jnp.bfloat16)
    got = head_values.head_values(out, w_uv, interpret=detect_races())
    assert_no_races(got)
    want = np.einsum("thl,hvl->thv", *(np.asarray(a, np.float64) for a in (out[:, :heads], w_uv)))
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    assert relative_error(jnp.nan_to_num(got), np.nan_to_num(want)) < 4e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "n", "V", "kernels"),
    [(1, 4, VALUE, 2), *full((8, 1, WIDE_VALUE, 2), (1, 4, WIDE_VALUE, 2), (33, 1, VALUE, 2)), (32, 4, WIDE_VALUE, 3)],
)
def test_lowers_for_cuda_with_values(batch, n, V, kernels):
    """In the kernel that merges, or in one of their own; XLA's where tokens are no whole granules."""
    call = functools.partial(mosaic.mla_decode, scale=SCALE, sms=132)
    shapes = ((batch, n, 16, CACHED), jnp.bfloat16), ((99, 64, CACHED), jnp.bfloat16), ((batch, 9), jnp.int32)
    shapes += ((batch, n), jnp.int32), ((16, V, LATENT), jnp.bfloat16)
    args = [jax.ShapeDtypeStruct(*shape) for shape in shapes]
    with tuning.use(Tuning(wide_values_tokens=128)):
        text = jax.jit(call).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == kernels
    assert ("dot_general" in text) == (batch == 33)


def lowered(batch, n, heads, fp8):
    call = functools.partial(mosaic.mla_decode, scale=SCALE, sms=132)
    shapes = (
        jax.ShapeDtypeStruct((batch, n, heads, CACHED), jnp.bfloat16),
        fp8_shapes(1000) if fp8 else jax.ShapeDtypeStruct((1000, 64, CACHED), jnp.bfloat16),
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
    )
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "n", "heads", "fp8"),
    members(
        [
            (*sizes, fp8)
            for sizes in ((1, 1, 16), (8, 8, 4), (32, 1, 16), (128, 4, 16), (200, 1, 64), (2, 5, 128))
            for fp8 in (False, True)
        ],
        default=[(1, 1, 16, False), (2, 5, 128, False), (8, 8, 4, True), (32, 1, 16, True), (200, 1, 64, True)],
    ),
)
def test_lowers_for_cuda(batch, n, heads, fp8):
    text = lowered(batch, n, heads, fp8)
    assert text.count("@mosaic_gpu_v2(") == 2
    assert ("mla_decode_fp8" in text) == fp8
    assert "output_operand_alias" in text  # the merge writes into the first kernel's output


MAX_PAGES = 64
SCHEDULES = {
    (B, blocks, least): jax.jit(
        functools.partial(make_schedule, max_pages=MAX_PAGES, blocks=blocks, sms=12, least=least)
    )
    for B, blocks, least in ((1, 1, 1), (1, 1, 2), (5, 1, 1), (5, 1, 2), (5, 4, 1), (12, 1, 1), (20, 1, 2))
}


@settings(max_examples=60)
@given(shape=st.sampled_from(list(SCHEDULES)), data=st.data())
def test_items_cover_every_page_once(shape, data):
    B, blocks, least = shape
    lengths = data.draw(st.lists(st.integers(1, MAX_PAGES * PAGE), min_size=B, max_size=B))
    bounds = window_bounds(lengths, 4)
    items, splits = (np.asarray(a) for a in SCHEDULES[shape](bounds))
    assert len(items) == num_items(B, blocks, 12)

    pages = {request: [] for request in range(B)}
    of_request: dict[int, list[int]] = {request: [] for request in range(B)}
    for index, (request, first, end, unmasked, alone) in enumerate(items):
        assert first <= end
        if first == end:
            continue
        pages[request] += range(first, end)
        of_request[request].append(index)
        # Only pages that every row of the window sees in full are not masked.
        assert 0 <= unmasked <= end - first
        assert (first + unmasked) * PAGE <= bounds[request].min() or unmasked == 0
        assert unmasked == end - first or (first + unmasked + 1) * PAGE > bounds[request].min()
        assert alone == (end - first == -(-lengths[request] // PAGE))
    assert pages == {request: list(range(-(-lengths[request] // PAGE))) for request in range(B)}
    several = {r: indices for r, indices in of_request.items() if len(indices) > 1}
    assert {r: list(range(first, first + n)) for r, first, n in splits if n} == several

    assert min(page_limits(MAX_PAGES, least)) == least
    # No other limit has a lower cost by the schedule's own formula.
    counts = {
        c: sum(math.ceil(math.ceil(n / PAGE) / c) for n in lengths) for c in page_limits(MAX_PAGES, least).tolist()
    }
    cost = {c: -(-n * blocks // 12) * (c + Tuning().split_overhead_pages) for c, n in counts.items() if n <= len(items)}
    best = min(cost, key=lambda c: (cost[c], c))
    assert sum(map(len, of_request.values())) == counts[best]


@interpreted
@pytest.mark.parametrize("case", [*CASES, pytest.param(MANY_REQUESTS, marks=pytest.mark.slow)])
def test_the_kernel_makes_the_same_schedule(case):
    assert_no_races(check_schedules(case, detect_races()), kernels=4)


@pytest.mark.slow
@pytest.mark.parametrize("fp8", [False, True])
def test_lowers_with_the_schedule_in_a_kernel(fp8):
    assert chosen(lowered, 8, 8, 4, fp8, schedule_kernel=True).count("@mosaic_gpu_v2(") == 3


@interpreted
@pytest.mark.parametrize(
    ("n", "values"), [(1, True), pytest.param(4, False, marks=pytest.mark.slow)], ids=["values", "merge"]
)
def test_the_schedule_in_a_kernel_changes_no_bit(n, values):
    attend = functools.partial(mla_decode_of_both, n=n, values=values)
    assert_no_races(check_attention(attend, detect_races()), kernels=5)


def test_a_backend_that_cannot_run_says_why():
    q, latent = jnp.zeros((1, 1, 4, CACHED), jnp.bfloat16), jnp.zeros((2, 64, CACHED), jnp.bfloat16)
    tables, bounds = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        mla_decode(q, latent, tables, bounds, scale=1.0, value_dim=LATENT)
    with use(Backends(attention="auto")):
        assert mla_decode(q, latent, tables, bounds, scale=1.0, value_dim=LATENT).shape == (1, 1, 4, LATENT)
    assert mosaic.unsupported_reason(q[..., :72], latent, 64) == "it supports latents of 512 + 64, not 64 + 8"
    assert mosaic.unsupported_reason(q, latent[:, :16], LATENT) == "it supports pages of 64 tokens, not 16"


def test_auto_is_the_first_that_supports_the_call():
    assert choose("op", "auto", {"mosaic": None, "triton": None}) == "mosaic"
    assert choose("op", "auto", {"mosaic": "too small", "triton": None}) == "triton"
    assert choose("op", "auto", {"mosaic": "too small"}) == "reference"
    with pytest.raises(UnsupportedError, match="there is no triton kernel"):
        choose("op", "triton", {"mosaic": None})


def test_plain_xla_has_to_be_asked_for_where_kernels_are_needed():
    """Of the operations that have an option; the small ones that have none may use it."""
    with use(Backends(needs_kernels=True)):
        assert choose("moe", "auto", {"mosaic": None}) == "mosaic"
        assert choose("moe", "reference", {"mosaic": "too small"}) == "reference"
        assert choose("moe_router", "auto", {"mosaic": "too small"}) == "reference"
        with pytest.raises(UnsupportedError, match=r"moe would run on .* too small.*the moe backend 'reference'"):
            choose("moe", "auto", {"mosaic": "too small"})
        with pytest.raises(UnsupportedError, match=r"mla_prefill would run on .* the attention backend 'reference'"):
            choose("mla_prefill", "triton", {"mosaic": "too small"}, same_as_auto=("triton",))
