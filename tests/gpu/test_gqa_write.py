"""The Mosaic GPU kernel of gqa_write on the GPU, against the reference in float32. All that no token owns is NaN."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.gqa_decode.shapes import HEADS
from pallas_kernels.gqa_write import mosaic, reference
from pallas_kernels.gqa_write.shapes import ROTATED, TOKENS
from tests.kernels.paged_cases import relative_error
from tests.kernels.test_gqa_write_mosaic import EPS, PAGE, arguments, empty_caches

pytestmark = pytest.mark.gpu

CASES = [
    pytest.param("qwen3-30b-a3b", "head", id="qwen3-30b-a3b"),
    pytest.param("glm-4.5-air", None, id="glm-4.5-air"),
    pytest.param("minimax-m2", "whole", id="minimax-m2"),
    pytest.param("minimax-m2", "part", id="minimax-m2, means given"),
    pytest.param("qwen3.5-35b-a3b", "centred", id="qwen3.5-35b-a3b"),
    pytest.param("gpt-oss", None, id="gpt-oss"),
]


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize(("name", "norm"), CASES)
def test_rows(name, norm, T):
    """Queries and the rows written are right, and no other is touched, except page 0 with its padding tokens."""
    heads, pages_in_all = HEADS[name], 20 + T // PAGE
    *args, pages, offsets = arguments(
        T, heads, ROTATED.get(name, heads.columns), norm, bias=norm is None, pages=pages_in_all
    )
    padding = np.arange(T) % 5 == 4
    pages, offsets = (jnp.where(padding, 0, place) for place in (pages, offsets))
    # A new function each time, so that tests share no compiled code.
    run = jax.jit(lambda *a: mosaic.write_heads(*a, eps=EPS), donate_argnums=(0, 1))
    keys, values = (jnp.copy(cache) for cache in empty_caches(heads, pages_in_all))
    for _ in range(3):  # the third run is a recorded graph's
        keys, values, queries = run(keys, values, *args, pages, offsets)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (empty_caches(heads, pages_in_all), args))
    want = jax.jit(functools.partial(reference.write_heads, eps=EPS))(*exact[0], *exact[1], pages, offsets)
    live = np.asarray(pages)[~padding], np.asarray(offsets)[~padding]
    for got, theirs in zip((keys, values), want[:2], strict=True):
        got, theirs = np.asarray(got, np.float32), np.asarray(theirs)  # noqa: PLW2901
        np.testing.assert_array_equal(np.isnan(got), np.isnan(theirs))
        assert relative_error(got[live], theirs[live]) < 6e-3
    assert relative_error(queries, want[2]) < 6e-3
