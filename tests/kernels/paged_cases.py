"""Random paged caches for attention tests. All that no context owns is NaN, including the rest of a request's last page."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.latents import GROUP, Fp8Latents, dequantise, quantise
from pallas_kernels.mla_decode.shapes import CACHED, LATENT


def paged_pool(
    rng: np.random.Generator, lengths: Sequence[int], width: int, *, page_size: int = 64, spare: int = 3
) -> tuple[np.ndarray, np.ndarray]:
    """Contexts of the given lengths on random pages: pool float32 [pages, page_size, width] and tables [B, max_pages].

    Entries of a table past its context name pages of other requests or free pages.
    """
    columns = [-(-length // page_size) for length in lengths]
    pages = sum(columns) + spare
    pool = np.full((pages, page_size, width), np.nan, np.float32)
    tables = rng.integers(0, pages, (len(lengths), max(columns) + 1)).astype(np.int32)
    order = iter(rng.permutation(pages))
    for row, length in enumerate(lengths):
        for column in range(columns[row]):
            tables[row, column] = page = next(order)
            owned = min(page_size, length - column * page_size)
            pool[page, :owned] = rng.standard_normal((owned, width), np.float32)
    return pool, tables


def fp8_shapes(pages: int) -> Fp8Latents:
    """Pages of 64 tokens with the published widths."""
    arrays = ((LATENT, jnp.float8_e4m3fn), (LATENT // GROUP, jnp.float32), (CACHED - LATENT, jnp.bfloat16))
    return Fp8Latents(*(jax.ShapeDtypeStruct((pages, 64, width), dtype) for width, dtype in arrays))


def fp8_and_plain(pool: np.ndarray | jax.Array) -> tuple[Fp8Latents, jax.Array]:
    """A pool of `paged_pool` in FP8, with NaN in every array where the pool has it, and the bfloat16 array of its values."""
    latents = quantise(jnp.asarray(pool[..., :LATENT]), jnp.asarray(pool[..., LATENT:]))
    return latents, dequantise(latents, jnp.bfloat16)


def window_bounds(lengths: Sequence[int], n: int) -> np.ndarray:
    """Exclusive causal bounds int32 [B, n] of windows that end each context."""
    ends = np.array(lengths)[:, None] - (n - 1) + np.arange(n)
    return np.maximum(ends, 1).astype(np.int32)


def flat_chunks(
    starts: Sequence[int], chunks: Sequence[int], padding: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """token_rows, positions and ends of requests whose chunk tokens lie one after another, then padding tokens."""
    rows = np.concatenate([np.repeat(np.arange(len(chunks)), chunks), [len(chunks)] * padding])
    positions = np.concatenate([*(np.arange(s, s + n) for s, n in zip(starts, chunks, strict=True)), [0] * padding])
    ends = np.where(np.array(chunks) > 0, np.array(starts) + chunks, 0)
    return rows.astype(np.int32), positions.astype(np.int32), ends.astype(np.int32)


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """In the Frobenius norm; NaN where either has one."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def arranged(q, kv_a, norm_weight, *, merged):
    """kv_a, norm_weight and q for `write_and_query`: kv_a and q in two arrays or, `merged`, in one with columns between."""
    T = q.shape[0]
    q = q.reshape(T, -1)
    if not merged:
        return kv_a, norm_weight, q
    whole = jnp.concatenate([q, jnp.full((T, 64), jnp.nan, q.dtype), kv_a], axis=1)
    return whole, norm_weight, whole
