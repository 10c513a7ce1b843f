"""Differences of Mosaic GPU between the supported versions of jax, and what is changed in it."""

import dataclasses
import functools
import io
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import core as mosaic_gpu_core
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic_gpu_utils
from jaxlib.mlir import ir

_IS_0_10 = jax.__version_info__ < (0, 11)
_DUMP_NAME = "mosaic_gpu.dump_basename"
# An attribute of kernels in the form that XLA gets.
_SERIALIZED = "stable_mosaic_gpu.version"


def name_kernels_without_numbers() -> None:
    """Makes what a kernel is lowered to depend on nothing but the kernel.

    jax 0.11 gives each lowered kernel a name for dumps, with a number that counts all kernels of the process. XLA, which
    compiles no kernel twice, and jax's persistent cache know a kernel by all of its text: neither ever met one again. Steps
    that compile at the same time may share kernels: the first result stays (jax commit 5bb5f77, before 0.11). Where kernels
    are dumped (MOSAIC_GPU_DUMP_*), they keep their numbers.
    """
    dialect: Any = mosaic_gpu.dialect
    numbered = getattr(dialect, "get_or_set_dump_options", None)
    if numbered is None or _are_dumped():
        return

    def named(module: Any) -> Any:
        attributes = module.operation.attributes
        if _DUMP_NAME not in attributes:
            attributes[_DUMP_NAME] = attributes["sym_name"]
        return numbered(module)

    dialect.get_or_set_dump_options = named


def _are_dumped() -> bool:
    return any(name.startswith("MOSAIC_GPU_DUMP") for name in os.environ)


def ask_ptxas_once() -> None:
    """Keeps the version of PTX that `ptxas` reads.

    Where a kernel converts numbers of 8 bits or fewer, jax 0.11 starts the program to ask for it: 50 times for a step's
    kernels, each a fork of a process that may hold gigabytes.
    """
    extension: Any = getattr(getattr(fragmented_array, "mgpu_lib", None), "_mosaic_gpu_ext", None)
    if (ask := getattr(extension, "_get_ptxas_isa_version", None)) is not None:
        extension._get_ptxas_isa_version = functools.cache(ask)


def lower_kernels_once() -> None:
    """Keeps what a kernel was lowered to for as long as jax keeps its trace.

    The steps of a server have many kernels in common, lean and full ones all but those that sample. jax lowers a kernel in
    Python, for 0.1 s and more in which no other thread of Python's runs, and in 0.11 once for every step that has it. What is
    kept is the form that XLA gets: to bring a kernel into it takes jax 0.015 s more.
    """
    patched: Any = lowering
    utils: Any = mosaic_gpu_utils
    core: Any = mosaic_gpu_core
    lower = getattr(patched, "lower_unpipelined_jaxpr_to_module", None)
    convert = getattr(core, "_run_serde_pass", None)
    if lower is None or convert is None or _are_dumped():
        return
    kept: weakref.WeakKeyDictionary[Any, dict[tuple, tuple[Any, bytes]]] = weakref.WeakKeyDictionary()

    @functools.wraps(lower)
    def lowered(gpu_mesh: Any, jax_mesh: Any, jaxpr: Any, *rest: Any, **how: Any) -> Any:
        # `how` says where the kernel was called from, for errors: the first place stays in it.
        frozen = (tuple(each) if isinstance(each, Sequence) else each for each in rest)
        key = (gpu_mesh, jax_mesh, *frozen, utils._infer_arch())
        of_kernel = kept.setdefault(jaxpr, {})
        if key not in of_kernel:
            result = lower(gpu_mesh, jax_mesh, jaxpr, *rest, **how)
            code = io.BytesIO()
            convert(result.module, serialize=True).operation.write_bytecode(code)
            # The module lives in the context of the step that is lowered.
            of_kernel[key] = dataclasses.replace(result, module=None), code.getvalue()
        result, bytecode = of_kernel[key]
        return dataclasses.replace(result, module=_parsed(bytecode))

    @functools.wraps(convert)
    def converted(module: Any, *, serialize: bool, ir_version: int | None = None) -> Any:
        if serialize and _SERIALIZED in module.operation.attributes:
            if ir_version is None:
                return module
            module = convert(module, serialize=False)  # another version's form is asked for
        return convert(module, serialize=serialize, ir_version=ir_version)

    patched.lower_unpipelined_jaxpr_to_module = lowered
    core._run_serde_pass = converted


def _parsed(bytecode: bytes) -> ir.Module:
    """A kernel in the form that XLA gets, whose operations have names that no dialect knows."""
    context = ir.Context.current
    allowed = context.allow_unregistered_dialects
    context.allow_unregistered_dialects = True
    try:
        return ir.Module.parse(bytecode, context=context)
    finally:
        context.allow_unregistered_dialects = allowed


def transpose_ref(ref: Any, permutation: tuple[int, ...]) -> Any:
    """A view of a reference with permuted axes."""
    return plgpu.transpose_ref(ref, permutation) if _IS_0_10 else ref.transpose(permutation)


def load(ref: Any, index: tuple, *, layout: Any) -> jax.Array:
    """ref[index] in registers of a given layout, even one without wide loads."""
    load: Any = plgpu.load
    place = (ref, index) if _IS_0_10 else (ref.at[index],)
    return load(*place, layout=layout, optimized=False)


def run_in_place(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    outs: Sequence[jax.Array],
    new: Sequence[jax.ShapeDtypeStruct] = (),
    *,
    scratch_types: Mapping[str, Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    compiler_params: plgpu.CompilerParams,
    interpret: Any = False,
    **threads: Any,
) -> tuple[jax.Array, ...]:
    """Runs a kernel, body(*input refs, *refs of outs, *refs of new, **scratch), that writes parts of `outs`.

    Args:
        new: types of further results, without initial values.
        threads: num_threads and thread_name of a kernel with several warpgroups.

    Returns:
        `outs`, then the further results.
    """
    if not _IS_0_10:
        refs = [jax.new_ref(out) for out in outs]
        results = plgpu.kernel(
            body,
            out_type=tuple(new),
            scratch_types=scratch_types,
            grid=grid,
            grid_names=grid_names,
            compiler_params=compiler_params,
            interpret=interpret,
            **threads,
        )(*inputs, *refs)
        return (*(jax.freeze(ref) for ref in refs), *results)

    mesh = plgpu.Mesh(grid=grid, grid_names=grid_names, **threads)

    def run(refs: tuple[Any, ...]) -> None:
        @pl.core_map(mesh, compiler_params=compiler_params, interpret=interpret, name=getattr(body, "__name__", None))
        def _() -> None:
            def scoped(**scratch: Any) -> None:
                body(*refs, **scratch)

            # All warpgroups share barriers and buffers.
            pl.run_scoped(scoped, collective_axes=threads.get("thread_name", ()), **scratch_types)

    # Further results need initial values here: XLA fills them in a launch of its own.
    empty = [jnp.zeros(each.shape, each.dtype) for each in new]
    return tuple(pl.run_state(run)((*inputs, *outs, *empty))[len(inputs) :])
