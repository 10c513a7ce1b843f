"""Stand-ins for a GPU, for the tests of kernels without one."""

from types import SimpleNamespace

import jax
import pytest

from pallas_kernels.moe import config, fp8_config, packed_config


@pytest.fixture
def jax_triton(monkeypatch):
    """jax-triton with stand-ins for the parts of jaxlib that come with its CUDA plugin; `.calls` has their arguments."""
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
        # jax-triton cannot be imported without them.
        "get_compute_capability": None,
        "get_serialized_metadata": None,
    }
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(gpu_triton, name, stand_in, raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", "")  # importing jax-triton sets it
    from jax_triton import triton_lib

    monkeypatch.setattr(triton_lib, "_COMPILED_KERNEL_CACHE", {})
    return SimpleNamespace(calls=calls)


@pytest.fixture
def ampere(monkeypatch):
    """The device is an A100."""
    device = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A100", core_count=108)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    return device


@pytest.fixture
def two_blocks(monkeypatch):
    """The device has two multiprocessors: an interpreted block works on several tiles, and few blocks have nothing to do."""
    for module in (config, fp8_config, packed_config):
        monkeypatch.setattr(module, "blocks_of_a_kernel", lambda: 2)
