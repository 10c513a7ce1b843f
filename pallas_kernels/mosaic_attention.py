"""Parts of the Mosaic GPU attention kernels: matrix products, the online softmax, and merging split requests."""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place

# Query rows of a block of a split kernel.
ROWS = 64
# A key that a row does not see scores far below the maximum of a row that has not seen any key yet, so that its weight
# is exactly 0 even then. Finite, because the difference of two -inf is NaN.
MASKED, UNSEEN = -1e30, -1e20
# Partial outputs that a merging thread block has in flight: about as many as a request has, within these bounds.
MERGED_AT_ONCE = (4, 32)
WARPGROUP = 128
# Columns of ones by which a product adds up rows: the fewest that a product has.
ONES = 8
_OF_ONES = plgpu.Layout.TILED(
    plgpu.Tiling(((ONES, 64), (2, 64), (4,))), warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1
)

i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def params(**options: Any) -> plgpu.CompilerParams:
    return plgpu.CompilerParams(
        approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, **({"reduction_scratch_bytes": 0} | options)
    )


def accumulate(acc: jax.Array, a: Any, b: Any, interpret: Any) -> jax.Array:
    """acc + a @ b. The interpreter has no accumulators that start from a value."""
    if interpret:
        rows, columns = acc.shape
        return acc + pl.run_scoped(lambda ref: _product(ref, a, b), plgpu.ACC((rows, columns), f32))
    return pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))(plgpu.ACC.init(acc))


def accumulate_each(
    accs: tuple[jax.Array, ...], a: Any, parts: tuple[Any, ...], interpret: Any
) -> tuple[jax.Array, ...]:
    """Of each part b: acc + a @ b, all on their way at once."""
    if interpret:
        return tuple(accumulate(acc, a, b, interpret) for acc, b in zip(accs, parts, strict=True))

    def multiply(refs):
        for ref, b in zip(refs, parts, strict=True):
            plgpu.wgmma(ref, a, b)

    return pl.run_state(multiply)(tuple(plgpu.ACC.init(acc) for acc in accs))


def _product(ref: Any, a: Any, b: Any) -> jax.Array:
    plgpu.wgmma(ref, a, b)
    return ref[...]


def write_ones(ones_s: Any) -> None:
    """Fills shared memory [ONES, 64], whose transpose adds up a row in a product. Callers make it visible."""
    ones_s[...] = plgpu.layout_cast(jnp.ones(ones_s.shape, bf16), _OF_ONES)


def over_columns(x_R: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.broadcast_in_dim(x_R, shape, [0])


def softmax_step(
    x: jax.Array, acc: jax.Array, top: jax.Array, total: jax.Array, log2_scale: float
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """A step of the online softmax for new scores x.

    Args:
        acc, top, total: the state so far; top is the largest score, scaled: an exponent of 2.

    Returns:
        acc, top and total, and the weights of x in bfloat16, which have yet to be added to acc.
    """
    new_top = jnp.maximum(top, x.max(axis=1) * log2_scale)
    shrink = jnp.exp2(top - new_top)
    # A product and a difference, which become one instruction.
    weights = jnp.exp2(x * log2_scale - over_columns(new_top, x.shape))
    total = total * shrink + weights.sum(axis=1)
    acc = acc * over_columns(shrink, acc.shape)
    weights = weights.astype(bf16)
    # Keeps the compiler from moving the softmax past the wait for the tensor cores.
    acc, total, weights = lax.optimization_barrier((acc, total, weights))
    return acc, new_top, total, weights


def add_weighted(acc: jax.Array, weights: jax.Array, values: Any, weights_s: Any | None) -> jax.Array:
    """acc + weights @ values, with weights in registers.

    Args:
        weights_s: None on a GPU. The interpreter has neither operands in registers nor accumulators with an initial value;
            for it, shared memory for the weights.
    """
    if weights_s is None:
        return accumulate(acc, weights, values, False)
    weights_s[...] = weights
    plgpu.commit_smem()
    return accumulate(acc, weights_s, values, True)


class Merging:
    """How a thread block merges a row of split partial outputs (arXiv 2501.01005).

    Args:
        partial: [rows, I, V] normalised outputs of the I items.
        lse: float32 [blocks * ROWS, padded I] their base-2 log-sum-exp: a block's rows, then unused ones up to ROWS.
        requests: how many requests share the items.
    """

    def __init__(self, partial: jax.Array, lse: jax.Array, requests: int):
        self.padded_items, V = lse.shape[1], partial.shape[2]
        self.block_rows = partial.shape[0] * ROWS // lse.shape[0]
        fewest, most = MERGED_AT_ONCE
        self.at_once = min(max(pl.next_power_of_2(partial.shape[1] // requests), fewest), most)
        self.items_layout = plgpu.Layout.WG_STRIDED((self.padded_items,), vec_size=self.padded_items // WARPGROUP)
        # Fewer values than threads: some threads hold the same ones.
        self.values_layout: Any = (
            plgpu.Layout.WG_STRIDED((V,), vec_size=V // WARPGROUP)
            if V % WARPGROUP == 0
            else plgpu.Layout.WGMMA.reduce(0)
        )
        self.V = V
        self.params = params(reduction_scratch_bytes=2048)
        self.weights_s = plgpu.SMEM((self.padded_items,), f32)

    def row(self, partial: Any, lse: Any, weights_s: Any, row: Any, first: Any, n: Any) -> jax.Array:
        """The row, float32 [V], merged of n items from `first` on; in a kernel with `params` and scratch `weights_s`."""
        lse_row = lax.div(row, i32(self.block_rows)) * ROWS + lax.rem(row, i32(self.block_rows))
        item_I = plgpu.broadcasted_iota(i32, (self.padded_items,), 0, layout=self.items_layout)
        mine_I = (item_I >= first) & (item_I < first + n)
        lse_I = load(lse, (lse_row, pl.ds(0, self.padded_items)), layout=self.items_layout)
        lse_I = jnp.where(mine_I, lse_I, MASKED)
        weights_I = jnp.where(mine_I, jnp.exp2(lse_I - lse_I.max()), 0.0)
        weights_s[...] = weights_I / weights_I.sum()

        def add(i, sum_V):
            for j in range(self.at_once):
                at = i * self.at_once + j
                weight = jnp.where(at < n, weights_s[first + lax.min(at, n - 1)], 0.0)
                part_V = load(partial, (row, first + lax.min(at, n - 1), slice(None)), layout=self.values_layout)
                sum_V += weight * part_V.astype(f32)
            return sum_V

        zero_V = plgpu.layout_cast(jnp.zeros((self.V,), f32), self.values_layout)
        return lax.fori_loop(i32(0), lax.div(n + (self.at_once - 1), i32(self.at_once)), add, zero_V)


def merge(
    name: str,
    out: jax.Array,
    partial: jax.Array,
    lse: jax.Array,
    splits: jax.Array,
    num_splits: int,
    live: int,
    interpret: Any,
) -> jax.Array:
    """Writes the merged outputs of split requests into their first `live` rows of out.

    Args:
        name: of the kernel, in profiles.
        out: [B, rows, V], rows in equal blocks of at most ROWS.
        partial, lse: see `Merging`.
        splits, num_splits: see `split_schedule.Plan`.
    """
    merging = Merging(partial, lse, out.shape[0])

    def body(partial, lse, splits, out, weights_s):
        split, row = lax.axis_index("split"), lax.axis_index("row")
        request, first, n = (splits[split, j] for j in range(3))

        @pl.when(n > 0)
        def _():
            out[request, row] = merging.row(partial, lse, weights_s, row, first, n).astype(bf16)

    body.__name__ = name
    (out,) = run_in_place(
        body,
        (partial, lse, splits),
        (out,),
        scratch_types={"weights_s": merging.weights_s},
        grid=(num_splits, live),
        grid_names=("split", "row"),
        compiler_params=merging.params,
        interpret=interpret,
    )
    return out
