"""Rows of `bench kernel` for sparse attention: scoring, choosing and attending of one layer in one decode step.

Beside them dense attention over the same contexts, and from which context on it is the slower one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, paged_cache, shuffled_tables, softmax, spread, take
from bench.kernel.case import Case, once
from bench.kernel.mla import MlaValues
from jaxspec.config import PAGE_SIZE
from pallas_kernels.key_choice.api import choose_keys
from pallas_kernels.key_choice.shapes import CONTEXTS, COUNT, HEAD_DIM, HEADS
from pallas_kernels.mla_decode import shapes
from pallas_kernels.mla_decode.shapes import CACHED, LATENT, SCALE, VALUE
from pallas_kernels.mla_sparse.api import mla_sparse


@dataclass(frozen=True)
class SparseMla(Case):
    """B requests of S cached tokens, a query token each, H heads on latents and N of the indexer.

    Its limit is reading all index keys and the chosen latents. The up-projections of many layers follow each other.
    """

    B: int
    S: int
    H: int = shapes.HEADS["deepseek-v3"]
    N: int = HEADS["deepseek-v3.2"]
    count: int = COUNT
    calls: int = 10
    labels: ClassVar[tuple[str, ...]] = ("B", "S", "H", "N")

    @property
    def flops(self) -> float:
        keys, chosen = self.S * self.N * HEAD_DIM, min(self.S, self.count) * self.H * (CACHED + LATENT)
        return 2.0 * self.B * (keys + chosen)

    @property
    def bytes(self) -> float:
        return 2.0 * self.B * (self.S * HEAD_DIM + min(self.S, self.count) * CACHED)

    def inputs(self) -> Any:
        tables, free = shuffled_tables(self.B, self.S)
        keys, cache = (
            paged_cache(i, (len(free), PAGE_SIZE, w), jnp.asarray(free)) for i, w in ((0, HEAD_DIM), (1, CACHED))
        )
        calls = [
            (
                normal(10 + i, (self.B, self.N, HEAD_DIM)),
                normal(200 + i, (self.B, self.N)).astype(jnp.float32),
                normal(400 + i, (self.B, self.H, CACHED)),
                normal(600 + i, (self.H, VALUE, LATENT), LATENT**-0.5),
            )
            for i in range(self.calls)
        ]
        return calls, keys, cache, jnp.asarray(tables), jnp.full((self.B,), self.S, jnp.int32)

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.B, self.H, VALUE), jnp.bfloat16)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        calls, keys, cache, tables, bounds = inputs
        rows = jnp.arange(self.B, dtype=jnp.int32)

        def layer(index_q: jax.Array, weights: jax.Array, q: jax.Array, w_uv: jax.Array) -> jax.Array:
            chosen = choose_keys(index_q, weights, keys, tables, rows, bounds, count=self.count)
            numbers = jnp.minimum(bounds, chosen.shape[1])
            return mla_sparse(q, cache, tables, rows, chosen, numbers, w_uv, scale=SCALE)

        call = once(layer)
        return [call(*each) for each in calls]

    def error(self, inputs: Any, results: Any) -> float:
        """Of some heads of the last request in the last call."""
        calls, *caches, tables, _ = inputs
        keys, latents = (exact(take(cache, tables[-1])).reshape(-1, cache.shape[-1])[: self.S] for cache in caches)
        heads = spread(self.H, 16)
        index_q, weights, q, w_uv = (exact(array) for array in calls[-1])
        scores = weights[-1] @ np.maximum(index_q[-1] @ keys.T, 0)
        chosen = np.argsort(-scores, kind="stable")[: self.count]
        attended = softmax(SCALE * q[-1][heads] @ latents[chosen].T) @ latents[chosen][:, :LATENT]
        true = np.einsum("hl,hvl->hv", attended, w_uv[heads], optimize=True)
        return largest_error(exact(results[-1])[-1][heads], true)


# Where dense attention is looked for that is as slow: requests of one query token, and their contexts.
CROSSING_ROWS, CROSSING = 32, (3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768)


def crossover(rows: Sequence[Mapping[str, Any]]) -> dict[str, int | None]:
    """The least of the measured contexts from which on sparse attention is faster than dense, None if it is in none.

    Args:
        rows: measured ones; those of sparse attention have N. Nothing is returned where no context was measured with both.
    """
    wanted = {"B": CROSSING_ROWS, "H": SparseMla.H}
    mine = [row for row in rows if "ours_us" in row and wanted.items() <= row.items()]
    sparse, dense = ({row["S"]: row["ours_us"] for row in mine if ("N" in row) == has} for has in (True, False))
    both = sorted(sparse.keys() & dense.keys())
    if not both:
        return {}
    slower = [tokens for tokens in both if sparse[tokens] >= dense[tokens]]
    faster = [tokens for tokens in both if not slower or tokens > slower[-1]]
    return {"sparse_faster_from": faster[0] if faster else None}


def _crossing(contexts: Sequence[int]) -> list[Case]:
    dense = [MlaValues(CROSSING_ROWS, tokens, SparseMla.H, 1, SparseMla.calls) for tokens in contexts]
    return [*(SparseMla(CROSSING_ROWS, tokens) for tokens in contexts), *dense]


SPARSE_MLA: dict[str, list[Case]] = {
    "all": [
        *(SparseMla(B, S) for B, S in CONTEXTS if B != CROSSING_ROWS),
        *_crossing(CROSSING),
        SparseMla(32, 32768, shapes.WIDE_HEADS["glm-5"], HEADS["glm-5"]),
    ],
    "quick": _crossing((16384, 32768)),
    "tiny": [SparseMla(2, 130, 2, 32, 64, 2), SparseMla(1, 70, 2, 64, 128, 2), MlaValues(2, 130, 2, 1, 2)],
}
