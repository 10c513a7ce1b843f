"""Choosing the next token from logits: pure functions on arrays with one row per position.

Randomness is a pure function of (seed, absolute position, stream), so a row's choice does not depend on which rows
share its batch, nor on how many steps led there.
"""

import enum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxspec.sampling.columns import Columns
from jaxspec.sampling.target import TargetLogits
from jaxspec.sampling.truncation import Truncation
from pallas_kernels.sampling.api import LogitsStats


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


def cuts_of(
    logits: jax.Array | TargetLogits,
    rows: SamplingRows,
    stats: LogitsStats,
    wanted: jax.Array | None = None,
    columns: Columns | None = None,
) -> jax.Array:
    """What min_p, top_k and top_p keep of logits [R, V]: int32 [R], see `truncation.cuts`.

    Greedy rows keep everything: they take the largest, which nothing drops.

    Args:
        stats: of the logits, at `temperatures(rows)`.
        wanted: bool [R]; a row where it is False keeps everything.
        columns: which columns logits have (default: all).
    """
    target = TargetLogits.of(logits)
    columns = columns or Columns(target.raw.shape[1])
    draws = rows.temperature > 0
    kept = Truncation(temperatures(rows), rows.min_p, rows.top_k, rows.top_p)
    return target.cuts(kept, stats, draws if wanted is None else draws & wanted, columns)


def temperatures(rows: SamplingRows) -> jax.Array:
    """What logits are divided by, float32 [R]: the temperature, or 1 in greedy rows."""
    return jnp.where(rows.temperature == 0, 1.0, rows.temperature)


def sample(
    logits: jax.Array | TargetLogits,
    rows: SamplingRows,
    positions: jax.Array,
    *,
    full: bool,
    stats: LogitsStats | None = None,
    columns: Columns | None = None,
) -> jax.Array:
    """Next ids int32 [R] from logits [R, V]; greedy where the temperature is 0.

    Args:
        positions: int32 [R] absolute position of the token to choose.
        full: also apply min_p, top_k and top_p (static).
        stats: of the logits, at `temperatures(rows)`, if they are known already.
        columns: which columns logits have (default: all).
    """
    target = TargetLogits.of(logits)
    R, V = target.raw.shape
    columns = columns or Columns(V)
    temperature = temperatures(rows)
    stats = stats or target.stats(temperature, None, columns)
    greedy = rows.temperature == 0
    keys = noise_keys(rows.seeds, positions, jnp.full(R, int(Stream.BONUS), jnp.int32))
    kept = cuts_of(target, rows, stats, columns=columns) if full else None
    drawn = target.draw(None, temperature, keys, ~greedy, stats.argmax, None, kept, columns)
    return jnp.where(greedy, stats.argmax, drawn)
