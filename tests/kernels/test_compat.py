"""What a kernel is lowered to depends on nothing but the kernel: XLA and jax's persistent cache know it by its text."""

import jax
import jax.numpy as jnp

from pallas_kernels.norm_linear.add_norm import add_norm


def lowered(tokens: int) -> str:
    x, gain = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 256), (256,)))
    run = jax.jit(lambda *args: add_norm(*args, eps=1e-5))
    return run.trace(x, x, gain).lower(lowering_platforms=("cuda",)).as_text()


def test_a_kernel_is_lowered_alike_after_others():
    first, other = lowered(4), lowered(8)
    assert "mosaic_gpu" in first
    assert lowered(4) == first != other
