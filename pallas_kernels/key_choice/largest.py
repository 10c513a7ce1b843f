"""The largest scores of each row, without a sort or a scan, which no CUDA graph has.

The least of them is found by counting. Which of its equals are among them, and where they all are, follows from counts of
blocks of positions, and within a block from products with a triangle of ones.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.keys import ordered

BLOCK = 64
f32, i32 = jnp.float32, jnp.int32


def largest(
    scores: jax.Array, bounds: jax.Array, count: int, least_of: Callable[[jax.Array, jax.Array], jax.Array]
) -> jax.Array:
    """Positions of the `count` largest scores of each row, or of all; of equal ones the lowest positions.

    Args:
        scores: float32 [R, S]. What is not a number counts as the largest.
        bounds: int32 [R]: a row has its scores at positions < bounds[r], up to S.
        least_of: finds the key of each row's least chosen score, as `bit_by_bit` does.

    Returns:
        int32 [R, count], ascending, and -1 after the last.
    """
    scores = jnp.pad(scores, ((0, 0), (0, -scores.shape[1] % BLOCK)))
    # -0.0 is no less than 0.0, which is the score of a key that no head looks for.
    scores = jnp.where(scores == 0, 0.0, jnp.where(jnp.isnan(scores), jnp.inf, scores))
    owned_RS = jnp.arange(scores.shape[1]) < bounds[:, None]
    scores = jnp.where(owned_RS, scores, -jnp.inf)
    wanted_R = jnp.minimum(bounds, count)
    keys_RS, least_R = ordered(scores), least_of(scores, wanted_R)

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


def bit_by_bit(scores: jax.Array, wanted: jax.Array) -> jax.Array:
    """The key of the score that `wanted` [R] of a row's scores reach, int32 [R]: the greatest such one."""
    keys_RS = ordered(scores)

    def key_of(bits: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(bits ^ jnp.uint32(1 << 31), i32)

    def decide(i: jax.Array, bits_R: jax.Array) -> jax.Array:
        candidate_R = bits_R | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        reached_R = (keys_RS >= key_of(candidate_R)[:, None]).sum(axis=1, dtype=i32)
        return jnp.where(reached_R >= wanted, candidate_R, bits_R)

    return key_of(lax.fori_loop(0, 32, decide, jnp.zeros(wanted.shape, jnp.uint32)))


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
