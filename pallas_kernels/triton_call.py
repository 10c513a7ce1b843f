"""Calls Triton kernels so that XLA can record them in a CUDA graph.

The custom call that jax-triton 0.3.1 emits is of the legacy kind, which XLA never records. jaxlib also has a handler of
the typed kind for the same serialized kernel, so jax-triton compiles and the call is our own.
"""

import importlib.metadata
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

# This module uses internals of jax-triton, which uses internals of Triton.
VERSIONS = {"jax-triton": ("0.3.1",), "triton": ("3.6", "3.7")}
INSTALL = "pip install jax-triton==0.3.1 'triton>=3.6,<3.8'"
TARGET = "triton_kernel_call_ffi"
# XLA aligns arrays to more than this; Triton makes use of this much.
ALIGNMENT = 16
# `bench` traces in several threads, and Triton's compiler is not made for that.
_compiling = threading.Lock()


class Tile(NamedTuple):
    """The share of a Triton program.

    Attributes:
        rows: query rows.
        keys: keys of one round of its loop: a page, or half of one.
        warps, stages: see `call`.
        resident: programs that fit on one multiprocessor.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    resident: int


def tile_for(tiles: Mapping[int, Sequence[Tile]], live: int, capability: int) -> Tile:
    """The tile for `live` query rows of a request.

    Args:
        tiles: by the least compute capability, fewer rows first.
        capability: 90 for 9.0.
    """
    candidates = tiles[max(least for least in tiles if least <= capability)]
    return next((tile for tile in candidates if tile.rows >= live), candidates[-1])


def unsupported_reason() -> str | None:
    """Why Triton kernels cannot be compiled here; None if they can. Checks versions only: an import takes a second."""
    for package, versions in VERSIONS.items():
        try:
            installed = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            return f"it needs {package}, which is not installed: {INSTALL}"
        if not any(f"{installed}.".startswith(f"{version}.") for version in versions):
            return f"it needs {package} {' or '.join(versions)}, and {installed} is installed: {INSTALL}"
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
        kernel: a function decorated with triton.jit.
        warps: of a program. stages: of its pipelined loops.
        compute_capability: 90 for 9.0.
        aliases: indices of inputs whose memory an output reuses, and the output's index.
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
