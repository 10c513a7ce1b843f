"""The Triton kernels of gqa_decode without a GPU: interpreted, compiled for every tile, and lowered for cuda."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from pallas_kernels.backend import Backends, UnsupportedError, use
from pallas_kernels.gqa_decode import triton
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.split_kv import num_items
from tests.kernels.triton_cases import GQA_CASES, check_fit, errors_of, parameters
from tests.matrices import full, members

slow = pytest.mark.slow


@pytest.fixture(scope="module")
def interpreted_errors(request) -> dict[str, float]:
    return errors_of("gqa_decode", request)


@slow
@pytest.mark.parametrize("name", parameters(GQA_CASES))
def test_interpreted(interpreted_errors, name):
    assert interpreted_errors[name] < {"float32": 1e-5, "float16": 1e-2}[GQA_CASES[name].dtype]


def lowered(batch, n, K, G, D, capability, dtype=jnp.bfloat16):
    call = functools.partial(triton.gqa_decode, scale=D**-0.5, sms=132, capability=capability)
    cache = jax.ShapeDtypeStruct((1000, 64, K, D), dtype)
    shapes = (
        jax.ShapeDtypeStruct((batch, n, K, G, D), dtype),
        cache,
        cache,
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
    )
    triton.gqa_decode.clear_cache()  # so that the call is compiled again
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


@slow
@pytest.mark.parametrize(
    ("batch", "n", "K", "G", "D", "blocks"),
    [
        (1, 1, 8, 4, 128, 8),
        *full((32, 8, 4, 8, 64, 4), (2, 5, 2, 16, 128, 4)),
    ],
)
def test_lowers_for_cuda(jax_triton, batch, n, K, G, D, blocks):
    """To the typed custom call, which XLA records in CUDA graphs."""
    hlo = lowered(batch, n, K, G, D, 90).as_text("hlo")
    calls = [line for line in hlo.splitlines() if "custom-call(" in line]
    assert len(calls) == 2
    for line in calls:
        assert f'custom_call_target="{triton_call.TARGET}"' in line
        assert "api_version=API_VERSION_TYPED_FFI" in line
    # The merge writes into the first kernel's output.
    assert "output_to_operand_aliasing={{}: (3, {})}" in calls[1]
    attend, merge = jax_triton.calls
    items = num_items(batch, blocks, 132 * triton_call.tile_for(triton.TILES, n * G, 90).resident)
    assert (attend.name, attend.grid) == ("gqa_decode", (blocks, items, 1))
    assert (merge.name, merge.grid) == ("split_kv_merge", (n * K * G, min(batch, items - batch), 1))


@slow
@pytest.mark.parametrize("D", [pytest.param(64, marks=pytest.mark.full), 128])
@pytest.mark.parametrize(
    ("capability", "tile"),
    members(
        [(c, tile) for c, tiles in triton.TILES.items() for tile in tiles],
        default=[(c, tiles[-1]) for c, tiles in triton.TILES.items()],
    ),
)
def test_every_tile_fits(jax_triton, capability, tile, D):
    lowered(2, 1, 2, tile.rows, D, capability)
    attend, merge = jax_triton.calls
    check_fit(attend, merge, tile, capability)
    # Pages are copied asynchronously, 16 bytes a thread, also where they are masked.
    assert "cp.async.cg.shared.global" in attend.ptx
    assert "cp.async.ca" not in attend.ptx
    if tile.rows == 64 and capability == 90:
        assert "wgmma.mma_async" in attend.ptx


def test_the_requested_backend_runs(ampere, monkeypatch):
    q, cache = jnp.zeros((1, 1, 2, 4, 64), jnp.bfloat16), jnp.zeros((2, 64, 2, 64), jnp.bfloat16)
    where = jnp.zeros((1, 1), jnp.int32), jnp.ones((1, 1), jnp.int32)
    monkeypatch.setattr(triton_call, "unsupported_reason", lambda: None)
    monkeypatch.setattr(triton, "gqa_decode", lambda *_, **__: np.float32(7))
    for attention in ("auto", "triton"):
        with use(Backends(attention=attention)) as chosen:
            assert gqa_decode(q, cache, cache, *where, scale=1.0) == 7
        assert chosen == {"gqa_decode": {"triton"}}
    with use(Backends(attention="mosaic")), pytest.raises(UnsupportedError, match=r"9\.0.*'auto', 'triton' or"):
        gqa_decode(q, cache, cache, *where, scale=1.0)
    assert triton.unsupported_reason(q[..., :16], cache, cache) == "it supports heads of 64 or 128, not 16"
    assert (
        triton.unsupported_reason(q, cache, cache.astype(jnp.float16)) == "it needs one type, not bfloat16 and float16"
    )
    ampere.compute_capability = "7.5"
    assert triton.unsupported_reason(q, cache, cache) == "it needs compute capability 8.0 or more, and A100 has another"
