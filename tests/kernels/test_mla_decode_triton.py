"""The Triton kernels of mla_decode without a GPU: interpreted, compiled for every tile, and lowered for cuda."""

import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import triton_call
from pallas_kernels.backend import Backends, UnsupportedError, choose, use
from pallas_kernels.mla_decode import triton
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, ROPE, SCALE
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.split_kv import num_items
from tests.kernels.triton_cases import CASES, check_fit, errors_of, parameters
from tests.matrices import full, members


@pytest.fixture(scope="module")
def interpreted_errors(request) -> dict[str, float]:
    return errors_of("mla_decode", request)


@pytest.mark.slow
@pytest.mark.parametrize("name", parameters(CASES))
def test_interpreted(interpreted_errors, name):
    assert interpreted_errors[name] < {"float32": 1e-5, "float16": 1e-2}[CASES[name].dtype]


def lowered(batch, n, heads, capability, sms=132, dtype=jnp.bfloat16):
    call = functools.partial(triton.mla_decode, scale=SCALE, sms=sms, capability=capability)
    shapes = (
        jax.ShapeDtypeStruct((batch, n, heads, CACHED), dtype),
        jax.ShapeDtypeStruct((1000, 64, CACHED), dtype),
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
    )
    triton.mla_decode.clear_cache()  # so that the call is compiled again
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("batch", "n", "heads", "blocks"),
    [(1, 1, 16, 1), *full((8, 8, 4, 1), (128, 4, 16, 1), (200, 1, 128, 2)), (2, 5, 20, 2)],
)
def test_lowers_for_cuda(jax_triton, batch, n, heads, blocks):
    """To the typed custom call, which XLA records in CUDA graphs, and not to jax-triton's own."""
    hlo = lowered(batch, n, heads, 90).as_text("hlo")
    calls = [line for line in hlo.splitlines() if "custom-call(" in line]
    assert len(calls) == 2
    for line in calls:
        assert f'custom_call_target="{triton_call.TARGET}"' in line
        assert "api_version=API_VERSION_TYPED_FFI" in line
    # The merge writes into the first kernel's output.
    assert "output_to_operand_aliasing={{}: (3, {})}" in calls[1]
    attend, merge = jax_triton.calls
    items = num_items(batch, blocks, 132 * triton_call.tile_for(triton.TILES, n * heads, 90).resident)
    assert (attend.name, attend.grid) == ("mla_decode", (blocks, items, 1))
    assert (merge.name, merge.grid) == ("split_kv_merge", (n * heads, min(batch, items - batch), 1))
    assert set(attend.parameters + merge.parameters) == {(0, triton_call.ALIGNMENT)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("capability", "tile"),
    members(
        [(c, tile) for c, tiles in triton.TILES.items() for tile in tiles],
        default=[(c, tiles[-1]) for c, tiles in triton.TILES.items()],
    ),
)
def test_every_tile_fits(jax_triton, capability, tile):
    lowered(2, 1, tile.rows, capability)
    attend, merge = jax_triton.calls
    check_fit(attend, merge, tile, capability)
    # Pages are copied asynchronously, 16 bytes a thread, also where they are masked.
    assert "cp.async.cg.shared.global" in attend.ptx
    assert "cp.async.ca" not in attend.ptx
    if tile.rows == 64 and capability == 90:
        assert "wgmma.mma_async" in attend.ptx


def test_float16(jax_triton):
    lowered(2, 1, 16, 80, dtype=jnp.float16)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in jax_triton.calls[0].ptx


ARRAYS = (
    jnp.zeros((1, 1, 4, CACHED), jnp.bfloat16),
    jnp.zeros((2, 64, CACHED), jnp.bfloat16),
    jnp.zeros((1, 1), jnp.int32),
    jnp.ones((1, 1), jnp.int32),
)


def test_a_backend_that_cannot_run_says_why():
    with use(Backends(attention="triton")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        mla_decode(*ARRAYS, scale=1.0, value_dim=LATENT)
    q, latent, *_ = ARRAYS
    assert triton.unsupported_reason(q[..., :72], latent, 64) == "it supports latents of 512 + 64, not 64 + 8"
    assert triton.unsupported_reason(q, latent[:, :16], LATENT) == "it supports pages of 64 tokens, not 16"


def test_unsupported_reasons_on_a_gpu(ampere, monkeypatch):
    q, latent, *_ = ARRAYS
    monkeypatch.setattr(triton_call, "unsupported_reason", lambda: None)
    assert triton.unsupported_reason(q, latent, LATENT) is None
    assert triton.unsupported_reason(q.astype(jnp.float16), latent.astype(jnp.float16), LATENT) is None
    assert (
        triton.unsupported_reason(q, latent.astype(jnp.float16), LATENT)
        == "it needs one type, not bfloat16 and float16"
    )
    exact = [a.astype(jnp.float32) for a in (q, latent)]
    assert triton.unsupported_reason(*exact, LATENT) == "it computes in bfloat16 or float16, not in float32"
    for capability in ("7.5", "gfx90a"):
        ampere.compute_capability = capability
        assert (
            triton.unsupported_reason(q, latent, LATENT)
            == "it needs compute capability 8.0 or more, and A100 has another"
        )


def test_the_reason_says_what_to_install(monkeypatch):
    metadata = triton_call.importlib.metadata
    versions = {"jax-triton": "0.3.1"}

    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    say = "pip install jax-triton==0.3.1 'triton>=3.6,<3.8'"
    assert triton_call.unsupported_reason() == f"it needs triton, which is not installed: {say}"
    for versions["triton"] in ("3.6.0", "3.7.1"):
        assert triton_call.unsupported_reason() is None
    versions["triton"] = "3.9.0"
    assert triton_call.unsupported_reason() == f"it needs triton 3.6 or 3.7, and 3.9.0 is installed: {say}"
    versions["jax-triton"] = "0.4.1"
    assert triton_call.unsupported_reason() == f"it needs jax-triton 0.3.1, and 0.4.1 is installed: {say}"


def test_the_smallest_tile_that_holds_the_rows():
    def rows(live):
        return triton_call.tile_for(triton.TILES, live, 90).rows

    assert [rows(live) for live in (1, 16, 17, 33, 64, 65, 1024)] == [16, 16, 32, 64, 64, 64, 64]
    assert triton_call.tile_for(triton.TILES, 64, 89) == triton.TILES[86][-1]
    assert triton_call.tile_for(triton.TILES, 64, 103) == triton.TILES[100][-1]


def test_operations_without_a_triton_kernel(caplog):
    """Where the option has a Triton kernel for another operation they run on the fastest; else they raise."""
    rows = jnp.zeros((3,), jnp.int32)
    arrays = [jnp.zeros(s) for s in ((3, 2, 8), (3, 2, ROPE), (2, 8, LATENT), (2, 8, LATENT), (2, 64, CACHED))]
    with use(Backends(attention="triton")) as chosen:
        mla_prefill(*arrays, jnp.zeros((1, 1), jnp.int32), rows, rows, jnp.array([3]), scale=1.0)
    assert chosen == {"mla_prefill": {"reference"}}
    caplog.clear()
    with caplog.at_level(logging.INFO, "jaxspec.kernels"):
        for _ in range(2):
            choose("logged once", "triton", {"mosaic": "it is small"}, same_as_auto=("triton",))
    assert caplog.messages == ["logged once: reference (there is no triton kernel; not mosaic: it is small)"]
    with pytest.raises(UnsupportedError, match="there is no triton kernel; use 'auto', 'mosaic' or 'reference'"):
        choose("experts", "triton", {"mosaic": None})
    assert choose("mla_prefill", "triton", {"mosaic": None}, same_as_auto=("triton",)) == "mosaic"


@pytest.mark.parametrize("least", ["8.0", "8.9", "10.3"])
def test_auto_prefers_triton_to_the_reference(ampere, monkeypatch, least):
    ampere.compute_capability = least
    monkeypatch.setattr(triton_call, "unsupported_reason", lambda: None)
    monkeypatch.setattr(triton, "mla_decode", lambda *_, **__: np.float32(7))
    assert mla_decode(*ARRAYS, scale=1.0, value_dim=LATENT) == 7
