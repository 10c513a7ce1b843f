"""The Mosaic GPU prefill kernels without a GPU: their tables against NumPy, interpreted on the CPU, and lowered.

Interpreted, attention keeps softmax weights in shared memory; on the GPU they stay in registers (tests/gpu).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend, query_tiles
from pallas_kernels.mla_decode.shapes import LATENT, NOPE, ROPE, SCALE, VALUE, WIDE_NOPE, WIDE_VALUE
from pallas_kernels.mla_prefill import api, decompress, mosaic, reference
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.kernels.paged_cases import flat_chunks, fp8_and_plain
from tests.matrices import full

L, R, PAGE = LATENT, ROPE, mosaic.PAGE
NARROW, WIDE = (NOPE, VALUE), (WIDE_NOPE, WIDE_VALUE)


def problem(rng, starts, chunks, padding, heads, max_pages, widths=NARROW):
    """Arguments of mla_prefill in bfloat16; all that no context owns is NaN, the queries of padding tokens too."""
    rows, positions, ends = flat_chunks(starts, chunks, padding)
    owned = sum(-(-int(end) // PAGE) for end in ends)
    pool = np.full((owned + 2, PAGE, L + R), np.nan, np.float32)
    tables = rng.integers(0, len(pool), size=(len(ends), max_pages)).astype(np.int32)
    free = list(rng.permutation(len(pool)))
    for row, end in enumerate(ends):
        for column in range(-(-int(end) // PAGE)):
            tables[row, column] = page = free.pop()
            n = min(PAGE, int(end) - column * PAGE)
            pool[page, :n] = rng.normal(size=(n, L + R))
    D = widths[0]
    q = rng.normal(size=(len(rows), heads, D + R))
    q[rows == len(ends)] = np.nan
    w_uk, w_uv = (rng.normal(size=(heads, width, L)) / L**0.5 for width in widths)
    floats = [jnp.asarray(x, jnp.bfloat16) for x in (q[..., :D], q[..., D:], w_uk, w_uv, pool)]
    return floats, [jnp.asarray(x) for x in (tables, rows, positions, ends)]


def run_interpreted(f, *args):
    """f(*args, interpret=...) under jit, without races."""
    got = jax.jit(functools.partial(f, interpret=detect_races()))(*args)
    jax.block_until_ready(got)
    assert_no_races(got)
    return got


def check_interpreted(starts, chunks, *, padding=3, chunk=512, keys=128, heads=2, max_pages=5, widths=NARROW):
    floats, ints = problem(np.random.default_rng(len(chunks)), starts, chunks, padding, heads, max_pages, widths)
    run = functools.partial(mosaic.mla_prefill, scale=SCALE, chunk=chunk, pipeline=mosaic.Pipeline(keys=keys))
    got = np.asarray(run_interpreted(run, *floats, *ints), np.float32)
    tokens = sum(chunks)
    np.testing.assert_array_equal(got[tokens:], 0)
    exact = [x.astype(jnp.float32) for x in floats]
    want = np.asarray(jax.jit(functools.partial(reference.mla_prefill, scale=SCALE))(*exact, *ints))
    assert np.isfinite(got).all()
    for rows in np.split(np.arange(tokens), np.cumsum(chunks)[:-1]):
        error = np.linalg.norm(got[rows] - want[rows]) / max(np.linalg.norm(want[rows]), 1e-9)
        assert error <= 1e-2, f"relative error {error:.2e} in a chunk of {len(rows)} tokens"


@interpreted
@pytest.mark.parametrize(("chunk", "max_pages"), [(4096, 5), (256, 5), (128, 9)], ids=["one", "unrolled", "loop"])
def test_interpreted(chunk, max_pages):
    """One chunk for all requests, several chunks, and a loop over the chunks that exist."""
    assert (-(-max_pages // 2) * 2 * 128 // chunk > mosaic.MOST_UNROLLED) == (max_pages == 9)
    check_interpreted((100, 0), (65, 1), chunk=chunk, max_pages=max_pages)


@interpreted
def test_fp8_is_the_kernels_on_what_the_codes_stand_for():
    """To the bit, over several chunks."""
    floats, ints = problem(np.random.default_rng(0), (100, 0), (65, 1), 3, 1, 5)
    run = functools.partial(mosaic.mla_prefill, scale=SCALE, chunk=256)
    got, want = (
        np.asarray(run_interpreted(run, *floats[:-1], latents, *ints), np.float32)
        for latents in fp8_and_plain(floats[-1])
    )
    assert np.isfinite(got).all()
    np.testing.assert_array_equal(got, want)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize(
    ("starts", "chunks", "keys"),
    [
        ((0, 64, 100), (1, 63, 64), 128),
        ((100, 0, 64), (65, 0, 130), 128),
        ((100, 64), (65, 130), 64),
    ],
)
def test_interpreted_ragged(starts, chunks, keys):
    check_interpreted(starts, chunks, chunk=256, keys=keys)


@interpreted
def test_interpreted_wide_heads():
    """Values that leave through the memory of both parts of the queries; a request's rows go on from another chunk."""
    assert mosaic.Pipeline.of(WIDE_VALUE).keys == 64
    check_interpreted((100,), (65,), chunk=128, keys=64, max_pages=3, heads=1, widths=WIDE)


# The most pages of a request decide: one chunk, several unrolled (at 16 heads), or a loop.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("tokens", "heads", "max_pages", "widths"),
    [
        *full((256, 16, 64, NARROW)),
        (2048, 16, 256, NARROW),
        (2048, 128, 256, NARROW),
        (256, 20, 32, WIDE),
        *full((2048, 64, 256, WIDE)),
    ],
)
def test_lowers_for_cuda(tokens, heads, max_pages, widths):
    S, E, (D, V) = jax.ShapeDtypeStruct, 8, widths
    floats = [(tokens, heads, D), (tokens, heads, R), (heads, D, L), (heads, V, L), (1000, PAGE, L + R)]
    args = [S(shape, jnp.bfloat16) for shape in floats]
    args += [S(shape, jnp.int32) for shape in ((E, max_pages), (tokens,), (tokens,), (E,))]
    run = jax.jit(functools.partial(mosaic.mla_prefill, scale=SCALE))
    text = run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text
    assert ("stablehlo.while" in text) == (heads == 128 or (widths == WIDE and tokens == 2048))


@settings(max_examples=60)
@given(st.data())
def test_tables(data):
    """Tiles and blocks of any requests: every token has one row, and every key that a row may see is visited once."""
    keys = data.draw(st.sampled_from([64, 128]))
    # Eight requests and 900 tokens always, so that everything is compiled once.
    E, P = 8, 900
    chunks = data.draw(st.lists(st.sampled_from([0, 1, 63, 64, 65, 127, 128, 129, 130]), min_size=E, max_size=E))
    while sum(chunks) > P:
        chunks[int(np.argmax(chunks))] = 0
    starts = data.draw(st.lists(st.sampled_from([0, 1, 64, 100, 127, 128, 300]), min_size=E, max_size=E))
    rows, positions, ends = flat_chunks(starts, chunks, P - sum(chunks))
    chunk_blocks = data.draw(st.sampled_from([1, 3, 100]))
    queries = jax.tree.map(np.asarray, TILES(rows, positions, E))
    begins = np.asarray(mosaic.list_starts(jnp.asarray(ends), keys))
    assert begins.tolist() == [0, *np.cumsum([-(-end // keys) for end in ends])]

    live = np.flatnonzero(rows < E)
    np.testing.assert_array_equal(queries.row[queries.tile_of[live]] + queries.row_of[live], live)
    np.testing.assert_array_equal(queries.request[queries.tile_of[live]], rows[live])
    np.testing.assert_array_equal(queries.position[queries.tile_of[live]] + queries.row_of[live], positions[live])
    assert (queries.row_of[live] < queries.filled[queries.tile_of[live]]).all()
    assert (queries.row % query_tiles.GRANULE == 0).all()
    assert ((queries.row >= 0) & (queries.row + query_tiles.TILE <= query_tiles.padded_rows(P))).all()

    visited = np.zeros((len(queries.request), begins[-1]), int)
    for first in range(0, begins[-1], chunk_blocks):
        work = np.asarray(WORK(queries, begins, np.int32(first), chunk_blocks, keys))
        for t, (begin, blocks, whole, lead, _) in enumerate(work):
            assert 0 <= begin <= begin + blocks <= chunk_blocks
            assert 0 <= whole <= blocks
            if not blocks:
                continue
            own = begins[queries.request[t]]
            nth = first + begin - own  # of the request's blocks
            assert queries.position[t] - lead == nth * keys
            assert not whole or (nth + whole) * keys <= queries.position[t] + 1
            visited[t, first + begin : first + begin + blocks] += 1
    for t, (e, count) in enumerate(zip(queries.request, queries.filled, strict=True)):
        want = np.zeros(begins[-1], int)
        if count:
            last = queries.position[t] + count - 1
            assert last < ends[e]
            want[begins[e] : begins[e] + last // keys + 1] = 1
        np.testing.assert_array_equal(visited[t], want)


TILES = jax.jit(query_tiles.tile_queries, static_argnums=2)
WORK = jax.jit(mosaic.tile_work, static_argnums=(3, 4))


def listed(keys, first, count, widths=NARROW):
    """Pages and up-projections, the table of `count` pages from block `first` on, and their owned rows as float32."""
    floats, (tables, _, _, ends) = problem(np.random.default_rng(0), (0, 64, 100), (1, 64, 30), 0, 2, 3, widths)
    starts = mosaic.list_starts(ends, keys)
    pages = decompress.list_pages(tables, starts, ends, jnp.int32(first), count, keys)
    rows = np.zeros((count, PAGE, L + R), np.float32)
    for row, (number, owned) in zip(rows, np.asarray(pages), strict=True):
        row[:owned] = np.asarray(floats[-1][number], np.float32)[:owned]
    return floats[-1:] + floats[2:4], pages, rows.reshape(-1, L + R), (tables, ends)


@pytest.mark.parametrize(("keys", "first"), [(128, 0), (128, 1), (64, 2)])
def test_listed_pages_are_those_of_the_requests(keys, first):
    (pool, *_), pages, rows, (tables, ends) = listed(keys, first, 6)
    contexts = [np.asarray(pool[tables[e]], np.float32).reshape(-1, L + R)[: int(ends[e])] for e in range(3)]
    padded = [np.pad(x, ((0, -len(x) % keys), (0, 0))) for x in contexts]
    want = np.concatenate([*padded, np.zeros((6 * PAGE, L + R), np.float32)])[first * keys :][: 6 * PAGE]
    np.testing.assert_array_equal(rows, want)
    assert ((pages[:, 0] >= 0) & (pages[:, 0] < len(pool))).all()


@interpreted
@pytest.mark.parametrize(("count", "blocks", "widths"), [(6, 2, NARROW), (3, 5, NARROW), (0, 1, NARROW), (3, 2, WIDE)])
def test_interpreted_decompression(count, blocks, widths):
    """Blocks with several tiles, a ring that wraps around, pages that do not exist, and blocks without work."""
    floats, pages, rows, _ = listed(128, 0, 8, widths)
    run = functools.partial(decompress.decompress, blocks=blocks)
    k_nope, k_rope, v = (np.asarray(x, np.float32) for x in run_interpreted(run, *floats, pages, jnp.int32(count)))
    used = -(-count // 2) * 2 * PAGE
    for got, weights in ((k_nope, floats[1]), (v, floats[2])):
        want = np.einsum("cl,hdl->chd", rows[:used, :L], np.asarray(weights, np.float32))
        np.testing.assert_allclose(got[:used], want, rtol=2**-8, atol=1e-3)
    np.testing.assert_array_equal(k_rope[:used], rows[:used, L:])


def test_unsupported_reasons():
    (q_nope, q_rope, w_uk, w_uv, pool), ints = problem(np.random.default_rng(0), (0,), (3,), 0, 1, 1)
    assert "CPU" in mosaic.unsupported_reason(q_nope, q_rope, w_uk, w_uv, pool)
    assert "64" in mosaic.unsupported_reason(q_nope, q_rope, w_uk, w_uv, pool[:, :32])
    assert "widths" in mosaic.unsupported_reason(q_nope[..., :64], q_rope, w_uk[:, :64], w_uv, pool)
    with backend.use(backend.Backends(attention="mosaic")), pytest.raises(backend.UnsupportedError, match="CPU"):
        api.mla_prefill(q_nope, q_rope, w_uk, w_uv, pool, *ints, scale=SCALE)
