"""Query tokens in parts: what is computed does not depend on their size, nor on whether they are a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla_sparse import gathered
from pallas_kernels.unrolling import MOST_PARTS, by_queries


@pytest.fixture
def straight_code(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr("pallas_kernels.unrolling.unrolls", lambda: True)


@pytest.mark.parametrize("most", [1, 5, 16, 40, 41])
@pytest.mark.parametrize("straight", [False, True])
def test_parts_are_the_whole(most, straight, straight_code):  # noqa: ARG001
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((40, 3), np.float32), rng.standard_normal(40, np.float32)

    def function(a, b):
        assert a.shape[0] == b.shape[0] <= most
        return a[:, None] * b[:, None, None]

    run = jax.jit(lambda a, b: by_queries(function, most, a, b, straight=straight))
    np.testing.assert_array_equal(run(a, b), a[:, None] * b[:, None, None])
    loops = most < 40 and not (straight and -(-40 // most) <= MOST_PARTS)
    assert ("stablehlo.while" in run.lower(a, b).as_text()) == loops


def sparse_attention(parts: int) -> jax.stages.Lowered:
    """In float32, at the sizes of DeepSeek's latents; with 512 keys a token, a part gathers 144 MiB."""
    T, S, struct = parts * gathered.TOKENS, 4096, jax.ShapeDtypeStruct
    q, latent = struct((T, 2, 576), jnp.float32), struct((S // 64, 64, 576), jnp.float32)
    tables, each, chosen = (struct(dims, jnp.int32) for dims in ((4, S // 64), (T,), (T, 512)))
    call = jax.jit(gathered.mla_sparse.__wrapped__, static_argnames="scale")
    return call.lower(q, latent, tables, each, chosen, each, struct((2, 128, 512), jnp.float32), scale=0.1)


def test_memory_does_not_grow_with_the_parts(straight_code):  # noqa: ARG001
    """Scheduled for least memory, as a GPU's code is and a CPU's only if asked for."""
    options = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    one, many = (
        sparse_attention(parts).compile(options).memory_analysis().temp_size_in_bytes for parts in (1, MOST_PARTS)
    )
    assert many < 1.1 * one
