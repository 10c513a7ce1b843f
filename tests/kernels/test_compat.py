"""What jax does while it lowers kernels, where we have changed it."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core, fragmented_array

from pallas_kernels.compat import ask_ptxas_once
from pallas_kernels.norm_linear.add_norm import add_norm


def lowered(tokens: int) -> str:
    x, gain = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 256), (256,)))
    run = jax.jit(lambda *args: add_norm(*args, eps=1e-5))
    return run.trace(x, x, gain).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_lowered_alike_after_others():
    """XLA and jax's persistent cache know a kernel by its text."""
    first, other = lowered(4), lowered(8)
    assert "mosaic_gpu" in first
    assert lowered(4) == first != other


@pytest.mark.skipif(not hasattr(lowering, "lower_unpipelined_jaxpr_to_module"), reason="jax 0.10 lowers in another way")
def test_a_kernel_is_lowered_once_for_all_steps(monkeypatch):
    """With the text that lowering it again would give."""
    lower, anew = lowering.lower_jaxpr_to_module, []
    monkeypatch.setattr(
        lowering, "lower_jaxpr_to_module", lambda *args, **how: anew.append(args) or lower(*args, **how)
    )
    jax.clear_caches()
    first = lowered(4)
    assert len(anew) == 1
    assert lowered(4) == first
    assert len(anew) == 1
    assert lowered(8) != first
    assert len(anew) == 2
    jax.clear_caches()  # now jax traces the kernel again
    assert lowered(4) == first
    assert len(anew) == 3


@pytest.mark.skipif(not hasattr(lowering, "lower_unpipelined_jaxpr_to_module"), reason="jax 0.10 lowers in another way")
def test_a_kernel_has_the_text_that_jax_gives_it(monkeypatch):
    """Where it is lowered for the first time, and where what is kept of it is used."""
    jax.clear_caches()
    first, again = lowered(4), lowered(4)
    for module, name in ((lowering, "lower_unpipelined_jaxpr_to_module"), (core, "_run_serde_pass")):
        monkeypatch.setattr(module, name, getattr(module, name).__wrapped__)
    jax.clear_caches()
    assert first == again == lowered(4)


def test_ptxas_is_asked_once(monkeypatch):
    asked = []
    extension = SimpleNamespace(_get_ptxas_isa_version=lambda: asked.append("version") or 90)
    monkeypatch.setattr(fragmented_array, "mgpu_lib", SimpleNamespace(_mosaic_gpu_ext=extension), raising=False)
    ask_ptxas_once()
    assert [extension._get_ptxas_isa_version() for _ in range(3)] == [90] * 3
    assert asked == ["version"]
