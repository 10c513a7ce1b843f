"""Merges the partial outputs of split requests, in Triton. Imports triton: import it only where Triton kernels run."""

from collections.abc import Callable
from typing import Any

import jax
import triton
import triton.language as tl

# Finite, because the difference of two -inf is NaN.
MASKED = tl.constexpr(-1e30)
# Partial outputs that a merging program has in flight.
MERGED_AT_ONCE = 32


def merge(call: Callable[..., Any], out: jax.Array, partial: jax.Array, lse: jax.Array, splits: jax.Array) -> jax.Array:
    """Writes the merged outputs of split requests into out [B, rows, V].

    Args:
        call: `triton_call.call` with its compute capability bound.
        partial, lse: [I, rows, V] and [I, rows], normalised outputs of the items and their base-2 log-sum-exp.
        splits: see `split_kv.Schedule`.
    """
    rows, V = out.shape[1:]
    (out,) = call(
        split_kv_merge,
        (partial, lse, splits, out),
        (jax.ShapeDtypeStruct(out.shape, out.dtype),),
        grid=(rows, splits.shape[0]),
        warps=4,
        stages=1,
        constants={"LIVE": rows, "VALUE_DIM": V, "AT_ONCE": MERGED_AT_ONCE},
        aliases={3: 0},
    )
    return out


@triton.jit
def split_kv_merge(
    partial, lse, splits,
    whole,  # noqa: ARG001
    out, LIVE: tl.constexpr, VALUE_DIM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """A program merges the partial outputs of one row of one request that has several items (arXiv 2501.01005).

    Args:
        whole: the buffer of `out`, which already holds the rows of the other requests.
        AT_ONCE: partial outputs that are in flight together.
    """
    row = tl.program_id(0)
    split = tl.program_id(1)
    request = tl.load(splits + split * 3)
    first = tl.load(splits + split * 3 + 1)
    n = tl.load(splits + split * 3 + 2)
    if n == 0:
        return

    value_V = tl.arange(0, VALUE_DIM)
    # Tensors, because a variable that changes its type in a loop does not compile.
    top = tl.full((), MASKED, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    sum_V = tl.zeros((VALUE_DIM,), tl.float32)
    for start in range(0, n, AT_ONCE):
        part_I = start + tl.arange(0, AT_ONCE)
        mine_I = part_I < n
        at_I = (first + part_I) * LIVE + row
        lse_I = tl.load(lse + at_I, mask=mine_I, other=MASKED)
        part_IV = tl.load(
            partial + at_I.to(tl.int64)[:, None] * VALUE_DIM + value_V[None], mask=mine_I[:, None], other=0.0
        )
        new_top = tl.maximum(top, tl.max(lse_I, axis=0))
        shrink = tl.exp2(top - new_top)
        weight_I = tl.where(mine_I, tl.exp2(lse_I - new_top), 0.0)
        total = total * shrink + tl.sum(weight_I, axis=0)
        sum_V = sum_V * shrink + tl.sum(weight_I[:, None] * part_IV.to(tl.float32), axis=0)
        top = new_top
    out_V = out + (request * LIVE + row).to(tl.int64) * VALUE_DIM + value_V
    tl.store(out_V, (sum_V / total).to(out.dtype.element_ty))
