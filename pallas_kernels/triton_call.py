"""Calls Triton kernels so that XLA can record them in a CUDA graph.

The custom call that jax-triton 0.3.1 emits is of the legacy kind, which XLA never records. jaxlib also has a handler of
the typed kind for the same serialized kernel, so jax-triton compiles and the call is our own.
"""

import importlib.metadata
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

# What is used of it is not its public interface.
JAX_TRITON = "0.3.1"
TARGET = "triton_kernel_call_ffi"
# XLA's arrays are aligned to more; Triton makes use of this much.
ALIGNMENT = 16
# `bench` traces in several threads, of which Triton's compiler knows nothing.
_compiling = threading.Lock()


def obstacle() -> str | None:
    """Why Triton kernels cannot be compiled here; None if they can."""
    install = f"pip install jax-triton=={JAX_TRITON} 'triton>=3.6,<3.8'"
    try:
        installed = importlib.metadata.version("jax-triton")
        if installed != JAX_TRITON:
            return f"it is for jax-triton {JAX_TRITON}, and {installed} is installed: {install}"
        import jax_triton  # noqa: F401
        import triton  # noqa: F401
    except ImportError as error:  # a package that is not installed at all is one too
        return f"it needs jax-triton and triton ({error}): {install}"
    return None


def call(
    kernel: Any,
    inputs: Sequence[jax.Array],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: tuple[int, int],
    warps: int,
    stages: int,
    compute_capability: int,
    constants: Mapping[str, Any],
    aliases: Mapping[int, int] | None = None,
) -> Sequence[jax.Array]:
    """Runs kernel(*inputs, *outputs, **constants) in grid[0] * grid[1] programs; the first axis runs fastest.

    Args:
        kernel: a function under triton.jit.
        warps, stages: of a program, and of its pipelined loops.
        compute_capability: 90 for 9.0.
        aliases: outputs that take over the memory of an input, by the input's index.
    """
    from jax_triton import triton_lib

    arrays: list[Any] = [*inputs, *outputs]
    pointers = [triton_lib.get_triton_type(jax.core.ShapedArray(a.shape, a.dtype)) for a in arrays]
    with _compiling:
        compiled, _ = triton_lib.get_or_create_triton_kernel(
            triton_lib.get_cuda_backend,
            "cuda",
            kernel,
            pointers,
            [],
            num_warps=warps,
            num_stages=stages,
            num_ctas=1,
            compute_capability=compute_capability,
            enable_fp_fusion=True,
            metaparams=dict(constants),
            dump=False,
        )
    library = triton_lib.triton_kernel_call_lib
    parameters = [library.create_array_parameter(0, ALIGNMENT) for _ in pointers]
    serialized = library.TritonKernelCall(compiled, *grid, 1, parameters).to_proto(kernel.__name__, b"")
    run = jax.ffi.ffi_call(TARGET, tuple(outputs), input_output_aliases=dict(aliases or {}))
    return run(*inputs, opaque=zlib.compress(serialized))
