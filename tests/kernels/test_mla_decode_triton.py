"""The Triton kernels of mla_decode without a GPU: interpreted, compiled for every tile, and lowered for cuda."""

import functools
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import backend, triton_call
from pallas_kernels.backend import Backends, UnsupportedError, choose, use
from pallas_kernels.mla_decode import triton
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.split_kv import num_items
from tests.kernels.triton_cases import CASES

ROOT = Path(__file__).parents[2]
SCALE = 192**-0.5


@pytest.fixture(scope="module")
def interpreted_errors() -> dict[str, float]:
    """Relative errors by case, from a process of its own: the interpreter is chosen when triton is imported."""
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[test]'")
    pytest.importorskip("torch", reason="Triton's interpreter needs PyTorch: pip install -e '.[test]' on Python 3.11")
    run = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton_interpreter"],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


@pytest.mark.parametrize("name", CASES)
def test_interpreted(interpreted_errors, name):
    assert interpreted_errors[name] < {"float32": 1e-5, "float16": 1e-2}[CASES[name].dtype]


@pytest.fixture
def jax_triton(monkeypatch):
    """jax-triton with stand-ins for the parts of jaxlib that come with its CUDA plugin; what they are given is in .calls."""
    pytest.importorskip("triton", reason="needs Triton: pip install -e '.[test]'")
    from jax._src.lib import gpu_triton

    calls = []

    def kernel_call(compiled, *grid_and_parameters):
        calls.append(SimpleNamespace(**compiled, grid=grid_and_parameters[:3], parameters=grid_and_parameters[3]))
        return SimpleNamespace(to_proto=lambda name, _: name.encode())

    def kernel(name, warps, clusters, shared_bytes, ptx, _, capability):
        assert clusters == 1
        return {"name": name, "warps": warps, "shared_bytes": shared_bytes, "ptx": ptx, "capability": capability}

    stand_ins = {
        "TritonKernel": kernel,
        "TritonKernelCall": kernel_call,
        "create_array_parameter": lambda zeroed, alignment: (zeroed, alignment),
        # jax-triton refuses to be imported without them.
        "get_compute_capability": None,
        "get_serialized_metadata": None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu_triton, name, stand_in, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # importing jax-triton sets it
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return SimpleNamespace(calls=calls)


def lowered(batch, n, heads, capability, sms=132, dtype=jnp.bfloat16):
    call = functools.partial(triton.mla_decode, scale=SCALE, sms=sms, capability=capability)
    shapes = (
        jax.ShapeDtypeStruct((batch, n, heads, 576), dtype),
        jax.ShapeDtypeStruct((1000, 64, 576), dtype),
        jax.ShapeDtypeStruct((batch, 64), jnp.int32),
        jax.ShapeDtypeStruct((batch, n), jnp.int32),
    )
    triton.mla_decode.clear_cache()  # what was traced before is not compiled again
    return jax.jit(call).trace(*shapes).lower(lowering_platforms=("cuda",))


@pytest.mark.parametrize(
    ("batch", "n", "heads", "blocks"), [(1, 1, 16, 1), (8, 8, 4, 1), (128, 4, 16, 1), (200, 1, 128, 2), (2, 5, 20, 2)]
)
def test_lowers_for_cuda(jax_triton, batch, n, heads, blocks):
    """To the typed custom call, which XLA records in CUDA graphs, and not to jax-triton's own."""
    hlo = lowered(batch, n, heads, 90).as_text("hlo")
    calls = [line for line in hlo.splitlines() if "custom-call(" in line]
    assert len(calls) == 2
    for line in calls:
        assert f'custom_call_target="{triton_call.TARGET}"' in line
        assert "api_version=API_VERSION_TYPED_FFI" in line
    # What is merged goes into the first kernel's output.
    assert "output_to_operand_aliasing={{}: (3, {})}" in calls[1]
    attend, merge = jax_triton.calls
    items = num_items(batch, blocks, 132 * triton.tile_for(n * heads, 90).resident)
    assert (attend.name, attend.grid) == ("mla_decode", (blocks, items, 1))
    assert (merge.name, merge.grid) == ("mla_decode_merge", (n * heads, min(batch, items - batch), 1))
    assert set(attend.parameters + merge.parameters) == {(0, triton_call.ALIGNMENT)}


# What a program may take, in KiB, by the least compute capability.
SHARED_KIB = {80: 163, 86: 99, 90: 227, 100: 227, 120: 99}


@pytest.mark.parametrize(("capability", "tile"), [(c, tile) for c, tiles in triton.TILES.items() for tile in tiles])
def test_every_tile_fits(jax_triton, capability, tile):
    lowered(2, 1, tile.rows, capability)
    attend, merge = jax_triton.calls
    for call in (attend, merge):
        assert call.capability == capability
        assert f".target sm_{capability}" in call.ptx
    assert attend.warps == tile.warps
    # A multiprocessor keeps a KiB a program for itself, and has one more than a single program may take.
    assert tile.resident * (attend.shared_bytes + 1024) <= (SHARED_KIB[capability] + 1) * 1024
    # Pages are copied asynchronously, 16 bytes a thread, also where they are masked.
    assert "cp.async.cg.shared.global" in attend.ptx
    assert "cp.async.ca" not in attend.ptx
    if tile.rows == 64 and capability == 90:
        assert "wgmma.mma_async" in attend.ptx


def test_float16(jax_triton):
    lowered(2, 1, 16, 80, dtype=jnp.float16)
    assert "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32" in jax_triton.calls[0].ptx


@pytest.fixture
def ampere(monkeypatch):
    """Backends and obstacles see an A100."""
    device = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A100", core_count=108)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    return device


ARRAYS = (
    jnp.zeros((1, 1, 4, 576), jnp.bfloat16),
    jnp.zeros((2, 64, 576), jnp.bfloat16),
    jnp.zeros((1, 1), jnp.int32),
    jnp.ones((1, 1), jnp.int32),
)


def test_a_backend_that_cannot_run_says_why():
    with use(Backends(attention="triton")), pytest.raises(UnsupportedError, match=r"needs an NVIDIA GPU.*'reference'"):
        mla_decode(*ARRAYS, scale=1.0, value_dim=512)
    q, latent, *_ = ARRAYS
    assert triton.obstacle(q[..., :72], latent, 64) == "it is for latents of 512 + 64, not 64 + 8"
    assert triton.obstacle(q, latent[:, :16], 512) == "it is for pages of 64 tokens, not 16"


def test_obstacles_on_a_gpu(ampere, monkeypatch):
    q, latent, *_ = ARRAYS
    monkeypatch.setattr(triton_call, "obstacle", lambda: None)
    assert triton.obstacle(q, latent, 512) is None
    assert triton.obstacle(q.astype(jnp.float16), latent.astype(jnp.float16), 512) is None
    assert triton.obstacle(q, latent.astype(jnp.float16), 512) == "it needs one type, not bfloat16 and float16"
    exact = [a.astype(jnp.float32) for a in (q, latent)]
    assert triton.obstacle(*exact, 512) == "it computes in bfloat16 or float16, not in float32"
    with use(Backends(devices=2)):
        assert triton.obstacle(q, latent, 512) == "it runs on one device only"
    for capability in ("7.5", "gfx90a"):
        ampere.compute_capability = capability
        assert triton.obstacle(q, latent, 512) == "it needs compute capability 8.0 or more, and A100 has another"


def test_what_to_install_is_said(monkeypatch):
    metadata = triton_call.importlib.metadata
    versions = {"jax-triton": "0.3.1"}

    def version(package):
        if package not in versions:
            raise metadata.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(metadata, "version", version)
    say = "pip install jax-triton==0.3.1 'triton>=3.6,<3.8'"
    assert triton_call.obstacle() == f"it needs triton, which is not installed: {say}"
    for versions["triton"] in ("3.6.0", "3.7.1"):
        assert triton_call.obstacle() is None
    versions["triton"] = "3.9.0"
    assert triton_call.obstacle() == f"it needs triton 3.6 or 3.7, and 3.9.0 is installed: {say}"
    versions["jax-triton"] = "0.4.1"
    assert triton_call.obstacle() == f"it needs jax-triton 0.3.1, and 0.4.1 is installed: {say}"


def test_the_smallest_tile_that_holds_the_rows():
    assert [triton.tile_for(live, 90).rows for live in (1, 16, 17, 33, 64, 65, 1024)] == [16, 16, 32, 64, 64, 64, 64]
    assert triton.tile_for(64, 89) == triton.TILES[86][-1]
    assert triton.tile_for(64, 103) == triton.TILES[100][-1]


def test_operations_without_a_triton_kernel(caplog):
    """Those of the same option take the best there is, and the log says so; others refuse, and say what would serve."""
    backend._log.cache_clear()
    rows, width = jnp.zeros((3,), jnp.int32), 576
    arrays = [jnp.zeros(s) for s in ((3, 2, 8), (3, 2, 64), (2, 8, 512), (2, 8, 512), (2, 64, width))]
    with use(Backends(attention="triton")), caplog.at_level(logging.INFO, "jaxspec.kernels"):
        mla_prefill(*arrays, jnp.zeros((1, 1), jnp.int32), rows, rows, jnp.array([3]), scale=1.0)
    (line,) = caplog.messages
    assert line.startswith("mla_prefill: reference (there is no triton kernel; not mosaic: ")
    with pytest.raises(UnsupportedError, match="there is no triton kernel; use 'auto', 'mosaic' or 'reference'"):
        choose("experts", "triton", {"mosaic": None})
    assert choose("mla_prefill", "triton", {"mosaic": None}, elsewhere=("triton",)) == "mosaic"


@pytest.mark.parametrize("least", ["8.0", "8.9", "10.3"])
def test_auto_prefers_triton_to_the_reference(ampere, monkeypatch, least):
    ampere.compute_capability = least
    monkeypatch.setattr(triton_call, "obstacle", lambda: None)
    monkeypatch.setattr(triton, "mla_decode", lambda *_, **__: np.float32(7))
    assert mla_decode(*ARRAYS, scale=1.0, value_dim=512) == 7
