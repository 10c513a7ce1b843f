"""Prompts of gated delta nets on Hopper: one Mosaic GPU kernel walks over the chunks of each row with its state in registers.

What chunks do not need of each other is plain XLA (`chunks.matrices`). In the walk a value's row of the state needs no other,
so a thread block is a warpgroup with ROWS values of a head and all of their keys. Products are transposed, [dv, C] and not
[C, dv]: the state and the update, which are made in registers, are then the operands that tensor cores take from there.

Each float32 operand is the sum of two of bfloat16, and a product is three: only that of the two small parts is left out.
Products begin at 0 and are added to the state in float32, because tensor cores cut off what an accumulator does not hold.

A chunk's four other operands are in shared memory, with one buffer each, so that two blocks fit on a multiprocessor. A
buffer is filled again, for the next chunk, as soon as its product is done, and has the rest of the chunk to arrive.
"""

import functools
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.gated_delta.chunks import CHUNK, Chunks, Matrices, matrices, of_tokens
from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.mosaic_attention import params
from pallas_kernels.own_buffer import own_buffer

ROWS = 64
# Columns of a swizzled tile in shared memory; and a state's keys that registers hold.
TILE, MOST_KEYS = 64, 128

LAYOUT = plgpu.Layout.WGMMA
OF_KEYS = LAYOUT.reduce(0)
i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def unsupported_reason(states: jax.Array, chunks: Chunks) -> str | None:
    """Why the kernel does not support this call, or None if it does."""
    V, D = states.shape[-2:]
    if V % ROWS or D % TILE or D > MOST_KEYS:
        return f"it needs values of a multiple of {ROWS} columns and keys of {TILE} or {MOST_KEYS}, not {V} and {D}"
    if chunks.tokens.shape[1] != CHUNK:
        return f"it needs {CHUNK} tokens or more, not {chunks.tokens.shape[1]}"
    return hopper_unsupported_reason()


def chunked(
    states: jax.Array, tokens: Tokens, chunks: Chunks, *, interpret: Any = False
) -> tuple[jax.Array, jax.Array]:
    """See `read_prompts` in api.py. `interpret` is passed to Pallas."""
    return walk(states, matrices(tokens, chunks), chunks, interpret=interpret)


@functools.partial(jax.jit, static_argnames="interpret")
def walk(states: jax.Array, each: Matrices, chunks: Chunks, *, interpret: Any = False) -> tuple[jax.Array, jax.Array]:
    """What tokens read, [P, K, R, dv], and the states [E, K, R, dv, dk] after them.

    Jitted, so that the layers of a model share one lowering. `interpret` is passed to Pallas.
    """
    E, K, R, dv, dk = states.shape
    N, H = chunks.rows.shape[0], K * R
    by_head = Matrices(*(x.reshape(N, H, *x.shape[3:]) for x in each))
    # Where each row's chunks begin, and where the last one's end.
    bounds = (chunks.rows < jnp.arange(E + 1)[:, None]).sum(axis=1, dtype=i32)
    kernel = _walk_kernel(E, N, H, dv, dk, interpret)
    read_NHVC, states = kernel(
        states.reshape(E, H, dv, dk),
        bounds,
        by_head.wanted.swapaxes(2, 3),
        *(_two_parts(x) for x in (by_head.stale, by_head.queries, by_head.reads, by_head.keys)),
        own_buffer(by_head.remains),
    )
    read_NKRCV = read_NHVC.swapaxes(2, 3).reshape(N, K, R, CHUNK, dv)
    return of_tokens(read_NKRCV, chunks), states.reshape(E, K, R, dv, dk)


def _two_parts(x: jax.Array) -> jax.Array:
    """Float32 [..., C, d] as bfloat16 [..., 2 C, d]: x rounded, and below it what is left."""
    large = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)  # XLA may drop a conversion and back
    return jnp.concatenate([large, x - large], axis=-2).astype(bf16)


@functools.cache
def _walk_kernel(E: int, N: int, H: int, dv: int, dk: int, interpret: Any) -> Any:
    """kernel(states [E, H, dv, dk], bounds [E + 1], wanted [N, H, dv, C], stale, queries, reads and keys in two parts,
    remains [N, H, c]) -> read [N, H, dv, C], of which unused chunks are uninitialised, and the states."""

    def gated_delta_chunks(
        states, bounds, wanted, stale, queries, reads, keys, remains, read, after,
        *, stale_s, queries_s, reads_s, keys_s, full, state_s=None, update_s=None,
    ):  # fmt: skip
        row, head = lax.axis_index("row"), lax.axis_index("head")
        values = pl.ds(lax.axis_index("part") * ROWS, ROWS)
        first, end = bounds[row], bounds[row + 1]
        copied = ((stale, stale_s), (queries, queries_s), (reads, reads_s), (keys, keys_s))
        STALE, QUERIES, READS, KEYS = range(4)

        def copy(chunk, which):
            matrix, matrix_s = copied[which]
            plgpu.copy_gmem_to_smem(matrix.at[chunk, head], matrix_s, full.at[which])

        def wait(which, *, transposed):
            """The two parts of a matrix that has arrived."""
            plgpu.barrier_wait(full.at[which])
            parts = (copied[which][1].at[pl.ds(first_row, CHUNK)] for first_row in (0, CHUNK))
            return tuple(transpose_ref(part, (1, 0)) if transposed else part for part in parts)

        def split(x, parts_s):
            large = x.astype(bf16)
            parts = large, (x - large.astype(f32)).astype(bf16)
            if parts_s is None:
                return parts
            # The interpreter takes no operands from registers.
            for i, part in enumerate(parts):
                parts_s[i] = part
            plgpu.commit_smem()
            return parts_s.at[0], parts_s.at[1]

        def product(columns, *factors):
            def add(acc):
                for (a, small_a), (b, small_b) in factors:
                    plgpu.wgmma(acc, small_a, b)
                    plgpu.wgmma(acc, a, small_b)
                    plgpu.wgmma(acc, a, b)
                return acc[...]

            return pl.run_scoped(add, plgpu.ACC((ROWS, columns), f32))

        def step(chunk, state):
            def copy_next(*which):
                @pl.when(chunk + 1 < end)
                def _():
                    for each in which:
                        copy(chunk + 1, each)

            wanted_VC = load(wanted, (chunk, head, values, slice(None)), layout=LAYOUT)
            state_parts = split(state, state_s)
            update = wanted_VC - product(CHUNK, (state_parts, wait(STALE, transposed=True)))
            copy_next(STALE)
            update_parts = split(update, update_s)
            read[chunk, head, values, :] = product(
                CHUNK,
                (state_parts, wait(QUERIES, transposed=True)),
                (update_parts, wait(READS, transposed=True)),
            )
            copy_next(QUERIES, READS)
            if remains.shape[-1] == 1:
                state = state * remains[chunk, head, 0]
            else:
                remains_D = load(remains, (chunk, head, slice(None)), layout=OF_KEYS)
                state = state * lax.broadcast_in_dim(remains_D, (ROWS, dk), [1])
            state = state + product(dk, (update_parts, wait(KEYS, transposed=False)))
            copy_next(KEYS)
            return state

        @pl.when(first < end)
        def _():
            for which in range(len(copied)):
                copy(first, which)

        state = load(states, (row, head, values, slice(None)), layout=LAYOUT)
        after[row, head, values, :] = lax.fori_loop(first, end, step, state)

    tiled = (plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(128))
    matrix = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    scratch: dict[str, Any] = {
        "stale_s": matrix((2 * CHUNK, dk)),
        "queries_s": matrix((2 * CHUNK, dk)),
        "reads_s": matrix((2 * CHUNK, CHUNK)),
        "keys_s": matrix((2 * CHUNK, dk)),
        "full": plgpu.Barrier(num_barriers=4),
    }
    if interpret:
        scratch |= {"state_s": matrix((2, ROWS, dk)), "update_s": matrix((2, ROWS, CHUNK))}
    return plgpu.kernel(
        gated_delta_chunks,
        out_type=(jax.ShapeDtypeStruct((N, H, dv, CHUNK), f32), jax.ShapeDtypeStruct((E, H, dv, dk), f32)),
        scratch_types=scratch,
        grid=(E, H, dv // ROWS),
        grid_names=("row", "head", "part"),  # the parts of a head run together and share its matrices in the L2 cache
        # With Pallas' automatic barriers: a copy overwrites what all four warps must have read.
        compiler_params=params(),
        interpret=interpret,
    )
