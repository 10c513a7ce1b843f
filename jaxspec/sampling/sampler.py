"""Choosing the next token from logits: pure functions on arrays with one row per position.

Randomness is a pure function of (seed, absolute position, stream), so a row's choice does not depend on which rows
share its batch, nor on how many steps led there.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.sampling.api import LogitsStats, gumbel_argmax, logits_stats


class Stream(enum.IntEnum):
    """Independent streams of randomness at one position.

    In rejection sampling the noise that drew a draft must not decide about its acceptance or its replacement too: that
    would bias the output. Plain sampling is a window without drafts, so it uses the bonus stream, and so does every draw
    of a seeded request, its drafts' included: see `rejection`.
    """

    BONUS = 0
    DRAFT = 1
    ACCEPT = 2
    RECOVER = 3


class SamplingRows(NamedTuple):
    """Per row: temperature, top_p, min_p float32 [R]; top_k int32 [R] (< 1: all); seeds uint32 [R, 2].

    greedy_drafts bool [R]: drafts are the draft's argmax, a point mass.
    seeded bool [R]: the request brought its seed, so its text must not depend on drafts.
    """

    temperature: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    top_k: jax.Array
    seeds: jax.Array
    greedy_drafts: jax.Array
    seeded: jax.Array


def _key(seed: jax.Array, position: jax.Array, stream: jax.Array) -> jax.Array:
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, position), stream)


def noise_keys(seeds: jax.Array, positions: jax.Array, streams: jax.Array) -> jax.Array:
    """Threefry keys uint32 [R, 2] of seeds uint32 [R, 2], positions and streams int32 [R]."""
    return jax.vmap(lambda *row: jax.random.key_data(_key(*row)))(seeds, positions, streams)


def uniform(seeds: jax.Array, positions: jax.Array, stream: Stream) -> jax.Array:
    """Uniform numbers in [0, 1), float32 [R]."""
    draw = jax.vmap(lambda *row: jax.random.uniform(_key(*row), (), jnp.float32))
    return draw(seeds, positions, jnp.full(positions.shape, int(stream), jnp.int32))


def _ordered(x: jax.Array) -> jax.Array:
    """float32 to uint32 with the same order."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _largest_threshold(keys: jax.Array, enough) -> jax.Array:
    """Largest t [R] for which `enough(keys >= t)` holds, by bisection over the 32 bits of keys uint32 [R, V].

    Thirty-two masked reductions instead of a sort, which would keep a decode step from being one CUDA graph.
    `enough` maps a mask [R, V] to bool [R] and is monotone: true for the full mask.
    """
    t = jnp.zeros(keys.shape[0], jnp.uint32)
    for bit in range(31, -1, -1):
        candidate = t | jnp.uint32(1 << bit)
        t = jnp.where(enough(keys >= candidate[:, None]), candidate, t)
    return t


def mask_top_k(logits: jax.Array, top_k: jax.Array) -> jax.Array:
    """logits [R, V] with -inf below each row's k-th largest; those equal to it stay; k < 1 keeps all."""
    V = logits.shape[1]
    k = jnp.where((top_k < 1) | (top_k > V), V, top_k)
    keys = _ordered(logits)
    threshold = _largest_threshold(keys, lambda mask: mask.sum(axis=1) >= k)
    return jnp.where(keys >= threshold[:, None], logits, -jnp.inf)


def mask_top_p(logits: jax.Array, top_p: jax.Array) -> jax.Array:
    """logits [R, V] with -inf outside the smallest set of likeliest tokens that reaches top_p; its equals stay too."""
    probabilities = jax.nn.softmax(logits, axis=1)
    keys = _ordered(probabilities)
    threshold = _largest_threshold(keys, lambda mask: jnp.where(mask, probabilities, 0.0).sum(axis=1) >= top_p)
    keep = (keys >= threshold[:, None]) | (top_p >= 1.0)[:, None]
    return jnp.where(keep, logits, -jnp.inf)


def mask_min_p(logits: jax.Array, min_p: jax.Array) -> jax.Array:
    """logits [R, V] with -inf where a probability is below min_p [R] times the largest; 0 keeps all."""
    border = logits.max(axis=1) + jnp.log(min_p)
    return jnp.where(logits < border[:, None], -jnp.inf, logits)


def transform(logits: jax.Array, rows: SamplingRows) -> jax.Array:
    """Logits float32 [R, V] of the distribution that a row samples from, after its temperature and its masks."""
    scaled = logits / temperatures(rows)[:, None]
    return mask_top_p(mask_top_k(mask_min_p(scaled, rows.min_p), rows.top_k), rows.top_p)


def temperatures(rows: SamplingRows) -> jax.Array:
    """What logits are divided by, float32 [R]: the temperature, or 1 in greedy rows."""
    return jnp.where(rows.temperature == 0, 1.0, rows.temperature)


def tempered(logits: jax.Array, rows: SamplingRows, *, full: bool) -> tuple[jax.Array, jax.Array]:
    """Logits [R, V] and temperatures float32 [R]: a row samples from softmax(logits / temperature).

    Args:
        full: apply min_p, top_k and top_p (static). Without it the logits are returned as they are: no copy.
    """
    if not full:
        return logits, temperatures(rows)
    return transform(logits.astype(jnp.float32), rows), jnp.ones_like(rows.temperature)


def sample(
    logits: jax.Array, rows: SamplingRows, positions: jax.Array, *, full: bool, stats: LogitsStats | None = None
) -> jax.Array:
    """Next ids int32 [R] from logits [R, V]; greedy where the temperature is 0.

    Args:
        positions: int32 [R] absolute position of the token to choose.
        full: also apply min_p, top_k and top_p (static).
        stats: of the logits, at `temperatures(rows)`, if they are known already.
    """
    R = logits.shape[0]
    stats = stats or logits_stats(logits, temperatures(rows))
    greedy = rows.temperature == 0
    keys = noise_keys(rows.seeds, positions, jnp.full(R, int(Stream.BONUS), jnp.int32))
    distributions, temperature = tempered(logits, rows, full=full)
    drawn = gumbel_argmax(distributions, jnp.arange(R, dtype=jnp.int32), temperature, keys, ~greedy)
    return jnp.where(greedy, stats.argmax, drawn)
