"""The Mosaic GPU prefill kernels on the GPU, against the reference in float32. All that no context owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.mla_decode.shapes import LATENT, NOPE, ROPE, SCALE, VALUE, WIDE_NOPE, WIDE_VALUE
from pallas_kernels.mla_prefill import decompress, mosaic, reference
from pallas_kernels.mla_prefill.api import mla_prefill

pytestmark = pytest.mark.gpu

L, R, PAGE = LATENT, ROPE, mosaic.PAGE
NARROW, WIDE = (NOPE, VALUE), (WIDE_NOPE, WIDE_VALUE)
E = 8

RAGGED = {
    256: [
        ((8192, 100, 0, 4095), (1, 63, 130, 40)),
        ((0,), (256,)),
        ((8192,), (255,)),
    ],
    2048: [
        ((0, 8192, 100, 2500, 64, 1), (1000, 1, 513, 300, 64, 65)),
        ((0,), (2048,)),
        ((6144,), (2048,)),
    ],
    # Fewer rows than a tile has, and no multiple of what TMA copies.
    99: [((8192, 5), (33, 61))],
}
CASES = [(tokens, *case) for tokens, cases in RAGGED.items() for case in cases]


def problem(rng, tokens, starts, chunks, heads, widths=NARROW):
    """Arguments of mla_prefill in bfloat16 for E rows; all that no context owns is NaN, padding queries too."""
    padding = tokens - sum(chunks)
    rows = np.concatenate([np.repeat(np.arange(len(chunks)), chunks), [E] * padding]).astype(np.int32)
    spans = [np.arange(s, s + n) for s, n in zip(starts, chunks, strict=True)]
    positions = np.concatenate([*spans, [0] * padding]).astype(np.int32)
    ends = np.zeros(E, np.int32)
    ends[: len(chunks)] = np.add(starts, chunks)
    needed = -(-ends // PAGE)
    pool = np.full((needed.sum() + 5, PAGE, L + R), np.nan, np.float32)
    tables = rng.integers(0, len(pool), size=(E, 160)).astype(np.int32)
    free = list(rng.permutation(len(pool)))
    for row, end in enumerate(ends):
        for column in range(needed[row]):
            tables[row, column] = page = free.pop()
            n = min(PAGE, end - column * PAGE)
            pool[page, :n] = rng.standard_normal((n, L + R), np.float32)
    D = widths[0]
    q = rng.standard_normal((tokens, heads, D + R), np.float32)
    q[rows == E] = np.nan
    w_uk, w_uv = (rng.standard_normal((heads, width, L), np.float32) / L**0.5 for width in widths)
    floats = [jnp.asarray(x, jnp.bfloat16) for x in (q[..., :D], q[..., D:], w_uk, w_uv, pool)]
    return floats, [jnp.asarray(x) for x in (tables, rows, positions, ends)]


def check(run, tokens, starts, chunks, heads, widths=NARROW):
    floats, ints = problem(np.random.default_rng(heads), tokens, starts, chunks, heads, widths)
    got = np.asarray(jax.jit(functools.partial(run, scale=SCALE))(*floats, *ints), np.float32)
    with jax.default_matmul_precision("highest"):
        oracle = jax.jit(functools.partial(reference.mla_prefill, scale=SCALE))
        want = np.asarray(oracle(*(x.astype(jnp.float32) for x in floats), *ints))
    live = sum(chunks)
    np.testing.assert_array_equal(got[live:], 0)
    assert np.isfinite(got).all()
    for rows in np.split(np.arange(live), np.cumsum(chunks)[:-1]):
        error = np.linalg.norm(got[rows] - want[rows]) / np.linalg.norm(want[rows])
        assert error <= 1e-2, f"relative error {error:.2e} in a chunk of {len(rows)} tokens"


@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize(("tokens", "starts", "chunks"), CASES)
def test_against_the_reference(tokens, starts, chunks, heads):
    """One chunk of keys at 4 heads; three chunks, mostly empty, at 16; a loop over chunks at 128."""
    with backend.use(backend.Backends(attention="mosaic")):
        check(mla_prefill, tokens, starts, chunks, heads)


@pytest.mark.parametrize("heads", [20, 64])
@pytest.mark.parametrize(("tokens", "starts", "chunks"), CASES)
def test_wide_heads(tokens, starts, chunks, heads):
    with backend.use(backend.Backends(attention="mosaic")):
        check(mla_prefill, tokens, starts, chunks, heads, WIDE)


@pytest.mark.parametrize("chunk", [1024, 10240])
def test_requests_over_several_chunks(chunk):
    """The keys fill 13 of the 80 chunks that this shape may have (a loop), and 2 of 8 (unrolled)."""
    check(functools.partial(mosaic.mla_prefill, chunk=chunk), *CASES[3], heads=16)


def check_decompression(heads, widths):
    floats, (tables, _, _, ends) = problem(np.random.default_rng(heads), *CASES[3], heads, widths)
    w_uk, w_uv, pool = floats[2:]
    starts = mosaic.list_starts(ends, 128)
    pages = decompress.list_pages(tables, starts, ends, jnp.int32(0), 240, 128)
    count = starts[-1] * 2
    got = decompress.decompress(pool, w_uk, w_uv, pages, count)
    k_nope, k_rope, v = (np.asarray(x, np.float32)[: int(count) * PAGE] for x in got)
    owned = np.arange(PAGE) < np.asarray(pages)[:, 1:]
    rows = np.where(owned[..., None], np.asarray(pool, np.float32)[np.asarray(pages)[:, 0]], 0).reshape(-1, L + R)
    rows = rows[: int(count) * PAGE]
    np.testing.assert_array_equal(k_rope, rows[:, L:])
    for ours, weights in ((k_nope, w_uk), (v, w_uv)):
        with jax.default_matmul_precision("highest"):
            want = np.asarray(jnp.einsum("cl,hdl->chd", rows[:, :L], weights.astype(jnp.float32)))
        np.testing.assert_allclose(ours, want, rtol=2**-8, atol=1e-3)


@pytest.mark.parametrize("heads", [4, 16, 128])
def test_decompression(heads):
    check_decompression(heads, NARROW)


@pytest.mark.parametrize("heads", [20, 64])
def test_decompression_of_wide_heads(heads):
    check_decompression(heads, WIDE)
