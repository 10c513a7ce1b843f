"""The largest scores of each row, without a sort, a scan or a loop, none of which a CUDA graph has.

The least of them is found digit by digit, by counting. Which of its equals are among them, and where they all are, follows
from counts of blocks of positions, and within a block from products with a triangle of ones.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.keys import LEAST_KEY, ordered

# Bits of a digit: a row is read once for each, and compared with all but one of its values.
DIGIT = 4
BLOCK = 64
f32, i32 = jnp.float32, jnp.int32


def largest(scores: jax.Array, bounds: jax.Array, count: int, *, loop: bool = False) -> jax.Array:
    """Positions of the `count` largest scores of each row, or of all; of equal ones the lowest positions.

    Args:
        scores: float32 [R, S]. What is not a number counts as the largest.
        bounds: int32 [R]: a row has its scores at positions < bounds[r], up to S.
        loop: with one after all, which compiles faster.

    Returns:
        int32 [R, count], ascending, and -1 after the last.
    """
    scores = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % BLOCK)))
    # -0.0 is no less than 0.0, which is the score of a key that no head looks for.
    scores = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    owned_RS = jnp.arange(scores.shape[1]) < bounds[:, None]
    keys_RS = jnp.where(owned_RS, ordered(scores), LEAST_KEY)
    wanted_R = jnp.minimum(bounds, count)
    least_R = _greatest_reached(keys_RS, wanted_R, loop)

    # Of blocks: how many keys are above the least, how many equal it, and of these how many are left to be chosen.
    by_block = (scores.shape[0], -1, BLOCK)
    keys_RBX, owned_RBX, least_R11 = keys_RS.reshape(by_block), owned_RS.reshape(by_block), least_R[:, None, None]
    above_RB = (keys_RBX > least_R11).sum(axis=2, dtype=i32)
    equal_RB = ((keys_RBX == least_R11) & owned_RBX).sum(axis=2, dtype=i32)
    left_R = wanted_R - above_RB.sum(axis=1)
    left_RB = jnp.clip(left_R[:, None] - (_sums_to(equal_RB) - equal_RB), 0, equal_RB)

    # The block of each chosen key, and the place that it has there.
    ranks_K = jnp.arange(count, dtype=i32)
    block_RK, place_RK = _find(above_RB + left_RB, ranks_K)
    positions_RKX = block_RK[..., None] * BLOCK + jnp.arange(BLOCK, dtype=i32)
    keys_RKX = _of(keys_RBX, block_RK)
    equal_RKX = (keys_RKX == least_R11) & (positions_RKX < bounds[:, None, None])
    first_RKX = _sums_within(equal_RKX) <= _of(left_RB, block_RK)[..., None]
    chosen_RKX = (keys_RKX > least_R11) | (equal_RKX & first_RKX)
    offset_RK = (_sums_within(chosen_RKX) <= place_RK[..., None]).sum(axis=2, dtype=i32)
    return jnp.where(ranks_K < wanted_R[:, None], block_RK * BLOCK + offset_RK, -1)


def _greatest_reached(keys_RS: jax.Array, wanted_R: jax.Array, loop: bool) -> jax.Array:
    """The greatest int32 that `wanted_R` keys of the row reach."""

    def key_of(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), i32)

    digits_D = jnp.arange(1, 1 << DIGIT, dtype=jnp.uint32)

    def decide(i: jax.Array, bits_R: jax.Array) -> jax.Array:
        shift = (32 - DIGIT * (i + 1)).astype(jnp.uint32)
        candidates_RD = key_of(bits_R[:, None] | (digits_D << shift))
        reached_RD = (keys_RS[:, None] >= candidates_RD[..., None]).sum(axis=2, dtype=i32)
        # Larger digits are reached by fewer.
        return bits_R | ((reached_RD >= wanted_R[:, None]).sum(axis=1, dtype=jnp.uint32) << shift)

    return key_of(lax.fori_loop(0, 32 // DIGIT, decide, jnp.zeros(wanted_R.shape, jnp.uint32), unroll=not loop))


def _find(counts_RB: jax.Array, ranks_K: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of the things that blocks have so many of, counted through: the block of each rank, and its place in there.

    int32 [R, K] each; of ranks that a row does not have, anything. Groups of blocks are looked through first.
    """
    sums_RB = _sums_to(counts_RB)
    padding = ((0, 0), (0, -counts_RB.shape[1] % BLOCK))
    ends_RGX = jnp.pad(sums_RB, padding, mode="edge").reshape(counts_RB.shape[0], -1, BLOCK)

    def passed(ends: jax.Array, most: int) -> jax.Array:
        return jnp.minimum((ends <= ranks_K[:, None]).sum(axis=2, dtype=i32), most)

    group_RK = passed(ends_RGX[:, None, :, -1], ends_RGX.shape[1] - 1)
    block_RK = group_RK * BLOCK + passed(_of(ends_RGX, group_RK), BLOCK - 1)
    block_RK = jnp.minimum(block_RK, counts_RB.shape[1] - 1)
    return block_RK, ranks_K - _of(sums_RB - counts_RB, block_RK)


def _of(values: jax.Array, block_RK: jax.Array) -> jax.Array:
    """values [R, B, ...] of each row's blocks: [R, K, ...]."""
    return jnp.take_along_axis(values, block_RK.reshape(*block_RK.shape, *[1] * (values.ndim - 2)), axis=1)


def _sums_to(counts_RB: jax.Array) -> jax.Array:
    """int32 [R, B]: for each block the sum of all up to it. Below 2**24, so that float32 has them exactly."""
    R, B = counts_RB.shape
    groups_RGX = jnp.pad(counts_RB, ((0, 0), (0, -B % BLOCK))).reshape(R, -1, BLOCK).astype(f32)
    within_RGX = jnp.dot(groups_RGX, jnp.triu(jnp.ones((BLOCK, BLOCK), f32)), precision=lax.Precision.HIGHEST)
    before_GG = jnp.triu(jnp.ones((groups_RGX.shape[1],) * 2, f32), 1)
    before_RG = jnp.dot(within_RGX[..., -1], before_GG, precision=lax.Precision.HIGHEST)
    return (within_RGX + before_RG[..., None]).astype(i32).reshape(R, -1)[:, :B]


def _sums_within(flags_RKX: jax.Array) -> jax.Array:
    """int32 [R, K, X]: how many of a block's flags are set up to each of its places, itself included."""
    to_XX = jnp.triu(jnp.ones((BLOCK, BLOCK), jnp.bfloat16))
    return jnp.dot(flags_RKX.astype(jnp.bfloat16), to_XX, preferred_element_type=f32).astype(i32)
