"""Where Mosaic GPU differs between the two supported versions of jax."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu

_IS_0_10 = jax.__version_info__ < (0, 11)


def transpose_ref(ref: Any, permutation: tuple[int, ...]) -> Any:
    """A view of a reference with permuted axes."""
    return plgpu.transpose_ref(ref, permutation) if _IS_0_10 else ref.transpose(permutation)


def load(ref: Any, index: tuple, *, layout: Any) -> jax.Array:
    """ref[index] in registers of a given layout, whether or not it has wide loads for it."""
    load: Any = plgpu.load
    place = (ref, index) if _IS_0_10 else (ref.at[index],)
    return load(*place, layout=layout, optimized=False)


def run_in_place(
    body: Callable[..., None],
    inputs: Sequence[jax.Array],
    out: jax.Array,
    *,
    scratch_types: Mapping[str, Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    compiler_params: plgpu.CompilerParams,
    interpret: Any = False,
) -> jax.Array:
    """Runs a kernel of one warpgroup, body(*input refs, ref of out, **scratch), that writes parts of `out`: the result."""
    if not _IS_0_10:
        ref = jax.new_ref(out)
        plgpu.kernel(
            body,
            out_type=(),
            scratch_types=scratch_types,
            grid=grid,
            grid_names=grid_names,
            compiler_params=compiler_params,
            interpret=interpret,
        )(*inputs, ref)
        return jax.freeze(ref)

    mesh = plgpu.Mesh(grid=grid, grid_names=grid_names)

    def run(refs: tuple[Any, ...]) -> None:
        @pl.core_map(mesh, compiler_params=compiler_params, interpret=interpret, name=body.__name__)
        def _() -> None:
            def scoped(**scratch: Any) -> None:
                body(*refs, **scratch)

            pl.run_scoped(scoped, **scratch_types)

    return pl.run_state(run)((*inputs, out))[-1]
