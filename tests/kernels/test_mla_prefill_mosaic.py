"""The Mosaic GPU prefill kernel where there is no GPU: its tables against NumPy, interpreted on the CPU, and lowered.

Interpreted, the kernel keeps softmax weights in shared memory; on the GPU they stay in registers (tests/gpu).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import backend
from pallas_kernels.mla_prefill import api, mosaic, reference

L, R, D, V, PAGE = mosaic.LATENT, mosaic.ROPE, mosaic.NOPE, mosaic.VALUE, mosaic.PAGE
SCALE = (D + R) ** -0.5


def flat_chunks(starts, chunks, padding):
    """token_rows, positions and ends of requests whose chunk tokens lie one after another, then padding tokens."""
    rows = np.concatenate([np.repeat(np.arange(len(chunks)), chunks), [len(chunks)] * padding])
    positions = np.concatenate([*(np.arange(s, s + n) for s, n in zip(starts, chunks, strict=True)), [0] * padding])
    ends = np.where(np.array(chunks) > 0, np.array(starts) + chunks, 0)
    return rows.astype(np.int32), positions.astype(np.int32), ends.astype(np.int32)


def problem(rng, starts, chunks, padding, heads, max_pages):
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
    q = rng.normal(size=(len(rows), heads, D + R))
    q[rows == len(ends)] = np.nan
    w_uk, w_uv = rng.normal(size=(2, heads, D, L)) / L**0.5
    floats = [jnp.asarray(x, jnp.bfloat16) for x in (q[..., :D], q[..., D:], w_uk, w_uv, pool)]
    return floats, [jnp.asarray(x) for x in (tables, rows, positions, ends)]


def check_interpreted(starts, chunks, *, padding=3, chunk=512, keys=128, heads=2, max_pages=5):
    if jax.__version_info__ < (0, 11):
        pytest.skip("the interpreter of jax 0.10 lacks operations that the kernel uses")
    import jax.experimental.pallas.mosaic_gpu as plgpu
    from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call

    floats, ints = problem(np.random.default_rng(len(chunks)), starts, chunks, padding, heads, max_pages)
    run = functools.partial(
        mosaic.mla_prefill,
        scale=SCALE,
        chunk=chunk,
        tuning=mosaic.Tuning(keys=keys),
        interpret=plgpu.InterpretGPUParams(detect_races=True),
    )
    got = np.asarray(jax.jit(run)(*floats, *ints), np.float32)
    assert not interpret_pallas_call.get_races().races_found
    tokens = sum(chunks)
    np.testing.assert_array_equal(got[tokens:], 0)
    exact = [x.astype(jnp.float32) for x in floats]
    want = np.asarray(jax.jit(functools.partial(reference.mla_prefill, scale=SCALE))(*exact, *ints))
    assert np.isfinite(got).all()
    for rows in np.split(np.arange(tokens), np.cumsum(chunks)[:-1]):
        error = np.linalg.norm(got[rows] - want[rows]) / max(np.linalg.norm(want[rows]), 1e-9)
        assert error <= 1e-2, f"relative error {error:.2e} in a chunk of {len(rows)} tokens"


@pytest.mark.parametrize("chunk", [128, 4096])
def test_interpreted(chunk):
    check_interpreted((100, 0), (65, 1), chunk=chunk)


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


@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("tokens", [256, 2048])
def test_lowers_for_cuda(tokens, heads):
    S, E, max_pages = jax.ShapeDtypeStruct, 8, 256
    floats = [(tokens, heads, D), (tokens, heads, R), (heads, D, L), (heads, V, L), (1000, PAGE, L + R)]
    args = [S(shape, jnp.bfloat16) for shape in floats]
    args += [S(shape, jnp.int32) for shape in ((E, max_pages), (tokens,), (tokens,), (E,))]
    run = jax.jit(functools.partial(mosaic.mla_prefill, scale=SCALE))
    assert "mosaic_gpu" in run.trace(*args).lower(lowering_platforms=("cuda",)).as_text()


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
    np.testing.assert_array_equal(queries.tokens[queries.tile_of[live], queries.row_of[live]], live)
    np.testing.assert_array_equal(queries.request[queries.tile_of[live]], rows[live])
    assert queries.filled.sum() == len(live)
    assert ((queries.tokens >= 0) & (queries.tokens < P)).all()

    visited = np.zeros((len(queries.request), begins[-1]), int)
    for first in range(0, begins[-1], chunk_blocks):
        work = np.asarray(WORK(queries, begins, np.int32(first), chunk_blocks, keys))
        for t, (begin, blocks, whole, lead) in enumerate(work):
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


TILES = jax.jit(mosaic.tile_queries, static_argnums=2)
WORK = jax.jit(mosaic.tile_work, static_argnums=(3, 4))


def test_gathered_keys_are_those_of_the_requests():
    floats, (tables, _, _, ends) = problem(np.random.default_rng(0), (0, 64, 100), (1, 64, 30), 0, 1, 3)
    pool, keys = floats[-1], 128
    starts = mosaic.list_starts(ends, keys)
    latent, rope = mosaic.gather(pool, tables, starts, ends, jnp.int32(1), 4, keys)
    got = np.asarray(jnp.concatenate([latent, rope], axis=1), np.float32).reshape(4, keys, L + R)
    contexts = [np.asarray(pool[tables[e]], np.float32).reshape(-1, L + R)[: int(ends[e])] for e in range(3)]
    want = np.zeros_like(got)  # the last block is past the list
    want[0] = contexts[1]
    want[1], want[2, :2] = contexts[2][:keys], contexts[2][keys:]
    np.testing.assert_array_equal(got, want)


def test_obstacles():
    (q_nope, q_rope, w_uk, w_uv, pool), ints = problem(np.random.default_rng(0), (0,), (3,), 0, 1, 1)
    assert "CPU" in mosaic.obstacle(q_nope, q_rope, w_uk, w_uv, pool)
    assert "64" in mosaic.obstacle(q_nope, q_rope, w_uk, w_uv, pool[:, :32])
    assert "widths" in mosaic.obstacle(q_nope[..., :64], q_rope, w_uk[:, :64], w_uv, pool)
    with backend.use(backend.Backends(attention="mosaic")), pytest.raises(backend.UnsupportedError, match="CPU"):
        api.mla_prefill(q_nope, q_rope, w_uk, w_uv, pool, *ints, scale=SCALE)
