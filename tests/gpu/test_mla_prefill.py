"""The Mosaic GPU prefill kernel on an H200 against the reference in float32, over pages that are NaN where not owned."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend
from pallas_kernels.mla_prefill import mosaic, reference
from pallas_kernels.mla_prefill.api import mla_prefill

pytestmark = pytest.mark.gpu

L, R, D, V, PAGE = mosaic.LATENT, mosaic.ROPE, mosaic.NOPE, mosaic.VALUE, mosaic.PAGE
SCALE = (D + R) ** -0.5
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
}
CASES = [(tokens, *case) for tokens, cases in RAGGED.items() for case in cases]


def problem(rng, tokens, starts, chunks, heads):
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
    q = rng.standard_normal((tokens, heads, D + R), np.float32)
    q[rows == E] = np.nan
    w_uk, w_uv = rng.standard_normal((2, heads, D, L), np.float32) / L**0.5
    floats = [jnp.asarray(x, jnp.bfloat16) for x in (q[..., :D], q[..., D:], w_uk, w_uv, pool)]
    return floats, [jnp.asarray(x) for x in (tables, rows, positions, ends)]


@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize(("tokens", "starts", "chunks"), CASES)
def test_against_the_reference(tokens, starts, chunks, heads):
    floats, ints = problem(np.random.default_rng(heads), tokens, starts, chunks, heads)
    with backend.use(backend.Backends(attention="mosaic")):
        got = np.asarray(jax.jit(functools.partial(mla_prefill, scale=SCALE))(*floats, *ints), np.float32)
    with jax.default_matmul_precision("highest"):
        oracle = jax.jit(functools.partial(reference.mla_prefill, scale=SCALE))
        want = np.asarray(oracle(*(x.astype(jnp.float32) for x in floats), *ints))
    live = sum(chunks)
    np.testing.assert_array_equal(got[live:], 0)
    assert np.isfinite(got).all()
    for rows in np.split(np.arange(live), np.cumsum(chunks)[:-1]):
        error = np.linalg.norm(got[rows] - want[rows]) / np.linalg.norm(want[rows])
        assert error <= 1e-2, f"relative error {error:.2e} in a chunk of {len(rows)} tokens"
