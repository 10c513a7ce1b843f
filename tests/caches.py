"""Caches and step metadata of a single request, for tests that call a model without an engine."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.metadata import StepMetadata, window_bounds
from jaxspec.models.params import TENSOR_AXIS


def empty_cache(spec: CacheSpec, num_pages: int, page_size: int) -> LayerCache:
    """Zeros for one request (slot 1) beside the padding slot."""
    mesh = Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
    shapes = spec.shapes(num_pages=num_pages, page_size=page_size, num_slots=2, window=1, mesh=mesh)
    return tuple(jnp.zeros(s.shape, s.dtype) for s in shapes)


def single_request(start: int, count: int, *, pages: int, page_size: int, prefill: bool) -> StepMetadata:
    """`count` tokens from position `start` on pages 1, 2, ...: a prompt chunk, or one decode window of a token."""
    positions = np.arange(start, start + count, dtype=np.int32)
    table = 1 + np.arange(pages, dtype=np.int32)[None]
    none, no_row = np.zeros((0, pages), np.int32), jnp.zeros(0, jnp.int32)
    slot = jnp.ones(1, jnp.int32)
    return StepMetadata(
        positions=jnp.asarray(positions),
        pages=jnp.asarray(table[0, positions // page_size]),
        offsets=jnp.asarray(positions % page_size),
        live=jnp.ones(count, bool),
        prefill_tables=jnp.asarray(table if prefill else none),
        prefill_rows=jnp.zeros(count if prefill else 0, jnp.int32),
        prefill_ends=jnp.full(int(prefill), start + count, jnp.int32),
        decode_tables=jnp.asarray(none if prefill else table),
        decode_bounds=window_bounds(jnp.full(int(not prefill), start + count, jnp.int32), 1),
        prefill_slots=slot if prefill else no_row,
        prefill_starts=jnp.full(int(prefill), start, jnp.int32),
        decode_slots=no_row if prefill else slot,
    )
