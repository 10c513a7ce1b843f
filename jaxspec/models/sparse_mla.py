"""Sparse multi-head latent attention (DeepSeek-V3.2, arXiv 2512.02556 section 2.1): an indexer chooses each query's keys.

An indexer is a small attention of its own: it scores all keys that a query may see, and attention reads the `count` with the
largest scores. Its keys are cached under the same pages as the latents. Layers without one read what the last layer before
them that has one chose.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.config import LayerSpec, ModelConfig
from jaxspec.models.keymap import Index, KeyMap, Piece, nested
from jaxspec.models.layers import Attended, RMSNorm, RopeTables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.mla import MLA, MLASpec, halves
from jaxspec.models.params import Declare
from pallas_kernels.key_choice import api as key_choice
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.latents import Latents, from_arrays
from pallas_kernels.mla_query.api import mla_query, write_and_query
from pallas_kernels.mla_sparse import api as sparse_attention
from pallas_kernels.quant.reference import linear
from pallas_kernels.rope import apply_rope
from pallas_kernels.split_kv import PAGE

INDEXER = "indexer"
INDEX_KEYS = "index keys"
# Of the norm of index keys, in every published model.
_NORM_EPS = 1e-6


@dataclass(frozen=True)
class IndexerSpec:
    """Sizes of an indexer.

    Attributes:
        interleaved: how checkpoints pair its rotary columns, which may differ from attention's (see `RopeConfig`).
    """

    num_heads: int
    head_dim: int
    interleaved: bool


@dataclass(frozen=True)
class SparseMLASpec(MLASpec):
    """Latent attention over chosen keys. `q_lora_rank` is not None: indexers read the queries' latent.

    Attributes:
        count: keys that a query reads, `index_topk` of config.json.
        indexer: None for a layer that reads another one's choice.
    """

    count: int = 0
    indexer: IndexerSpec | None = None

    @property
    def dense(self) -> MLASpec:
        """The layer for contexts of at most `count` tokens, where every key is chosen."""
        return MLASpec(**{field.name: getattr(self, field.name) for field in fields(MLASpec)})

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "SparseMLA":
        return SparseMLA(hidden, self, declare, input_dim=input_dim)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        keys = super().key_map(prefix, hidden, input_dim=input_dim)
        if self.indexer is None:
            return keys
        N, D, Q, inputs = self.indexer.num_heads, self.indexer.head_dim, self.q_lora_rank or 0, input_dim or hidden
        prefix = f"{prefix}indexer."
        R = self.rope_dim
        order: Index = (np.concatenate([halves(0, R), np.arange(R, D)]),) if self.indexer.interleaved else ...
        rows: Index = (slice(None), *order) if isinstance(order, tuple) else ...
        indexer: KeyMap = {
            ("q",): (Piece(f"{prefix}wq_b.weight", (N * D, Q), view=(N, D, Q), take=rows),),
            ("k",): (Piece(f"{prefix}wk.weight", (D, inputs), take=order),),
            ("weights",): (Piece(f"{prefix}weights_proj.weight", (N, inputs)),),
            **{("norm", name): (Piece(f"{prefix}k_norm.{name}", (D,), take=order),) for name in ("weight", "bias")},
        }
        return keys | nested({INDEXER: indexer})


def for_contexts(config: ModelConfig, longest: int | None) -> ModelConfig:
    """The model for contexts of at most `longest` tokens: without indexers, if they would choose all keys of these.

    Args:
        longest: None: as long as the model takes them.
    """
    if longest is None or config.index_topk is None or longest > config.index_topk:
        return config

    def dense(spec: LayerSpec) -> LayerSpec:
        attention = spec.attention
        return replace(spec, attention=attention.dense) if isinstance(attention, SparseMLASpec) else spec

    return replace(config, layers=tuple(map(dense, config.layers)), nextn_layers=tuple(map(dense, config.nextn_layers)))


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias, in float32."""

    def __init__(self, dim: int, declare: Declare):
        self.weight = declare((dim,), (None,), "ones", dtype=jnp.float32)
        self.bias = declare((dim,), (None,), "zeros", dtype=jnp.float32)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., dim] -> [..., dim]
        x32 = x.astype(jnp.float32)
        x32 -= x32.mean(axis=-1, keepdims=True)
        normed = x32 * lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + _NORM_EPS)
        return (normed * self.weight[...] + self.bias[...]).astype(x.dtype)


class Indexer(nnx.Module):
    """Queries, weights and keys that `choose_keys` scores with. Every device of a mesh has all of it, and chooses alike."""

    def __init__(self, input_dim: int, spec: IndexerSpec, query_rank: int, declare: Declare):
        N, D = spec.num_heads, spec.head_dim
        self.q = declare((N, D, query_rank), (None, None, None))
        self.k = declare((D, input_dim), (None, None))
        # transformers keeps this one in float32, too.
        self.weights = declare((N, input_dim), (None, None), dtype=jnp.float32)
        self.norm = LayerNorm(D, declare)

    def keys(self, x_TH: jax.Array, rope: RopeTables) -> jax.Array:
        """Index keys [T, D] of a layer's normed input. The first columns are rotated, the others pass.

        The reference implementation turns queries and keys by a Hadamard matrix for its FP8 codes; their products do not
        change by that.
        """
        return apply_rope(self.norm(linear(x_TH, self.k[...])), *rope)

    def queries(self, x_TH: jax.Array, q_a_TQ: jax.Array, rope: RopeTables) -> tuple[jax.Array, jax.Array]:
        """Queries [T, N, D] of the normed latent of attention's queries, and the heads' weights float32 [T, N].

        Published code multiplies the weights by (N * D) ** -0.5, which changes no order of scores.
        """
        weights = self.weights[...]
        weights_TN = jnp.einsum("th,nh->tn", x_TH.astype(jnp.float32), weights, precision=lax.Precision.HIGHEST)
        return apply_rope(linear(q_a_TQ, self.q[...]), *rope), weights_TN


class SparseMLA(MLA):
    """`MLA` whose queries read the keys that an indexer chooses. Its cache: the latents and, with an indexer, its keys.

    Prompts and decode windows go one way, token by token in the absorbed form.
    """

    def __init__(self, hidden: int, spec: SparseMLASpec, declare: Declare, *, input_dim: int | None = None):
        super().__init__(hidden, spec, declare, input_dim=input_dim)
        self.count, self.has_indexer = spec.count, spec.indexer is not None
        if spec.indexer is None:
            return
        self.indexer = Indexer(input_dim or hidden, spec.indexer, self.q_lora_rank, declare)
        keys = CacheArray(INDEX_KEYS, "token", (spec.indexer.head_dim,), declare.dtype, (None,))
        latents = self.cache_spec
        self.cache_spec = CacheSpec((*latents.arrays, keys), fp8=(*latents.fp8, keys))

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables,
        norm: RMSNorm | None = None,
    ) -> tuple[Attended, LayerCache]:
        """See `Attention`."""
        x_TH = norm(x_TH) if norm else x_TH
        arrays, index_keys = self._parts(cache)
        qkv_a_TX = linear(x_TH, self.qkv_a[...])
        q_a_TQ = self.q_norm(qkv_a_TX[:, : self.q_lora_rank])
        q_TX = linear(q_a_TQ, self.q_b[...]).reshape(x_TH.shape[0], -1)
        kv_norm, places = self.kv_norm, (meta.pages, meta.offsets)
        latents, q_TNC = write_and_query(
            from_arrays(arrays), qkv_a_TX, kv_norm.factor, q_TX, self.w_uk[...], *rope, *places, eps=kv_norm.eps
        )
        index_keys = self._write_index_keys(x_TH, index_keys, meta, rope)
        keys = meta.queries()
        chosen_TK = self._choose(x_TH, q_a_TQ, index_keys, *keys, rope, meta.choices)
        return self._attend(q_TNC, latents, *keys, chosen_TK), (*jax.tree.leaves(latents), *index_keys)

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: RopeTables
    ) -> tuple[Attended, LayerCache]:
        """See `Attention`."""
        cache = self.write_keys(x_TH, cache, meta, rope)
        arrays, index_keys = self._parts(cache)
        x_RH, rows = x_TH[live.tokens], jnp.arange(live.tokens.shape[0], dtype=jnp.int32)
        of_live: RopeTables = (rope[0][live.tokens], rope[1][live.tokens])
        q_a_RQ = self.q_norm(linear(x_RH, self.qkv_a[: self.q_lora_rank]))
        keys = live.tables, rows, live.bounds
        chosen_RK = self._choose(x_RH, q_a_RQ, index_keys, *keys, of_live, None)
        q_RNC = mla_query(linear(q_a_RQ, self.q_b[...]), self.w_uk[...], *of_live)
        return self._attend(q_RNC, from_arrays(arrays), *keys, chosen_RK), cache

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: RopeTables) -> LayerCache:
        """See `Attention`."""
        arrays, index_keys = self._parts(cache)
        kv_a_TC = linear(x_TH, self.qkv_a[self.q_lora_rank :])
        eps, weight, places = self.kv_norm.eps, self.kv_norm.factor, (meta.pages, meta.offsets)
        latents = write_latent(from_arrays(arrays), kv_a_TC, weight, *rope, *places, eps=eps)
        return (*jax.tree.leaves(latents), *self._write_index_keys(x_TH, index_keys, meta, rope))

    def _write_index_keys(
        self, x_TH: jax.Array, index_keys: LayerCache, meta: StepMetadata, rope: RopeTables
    ) -> LayerCache:
        """The array of index keys, if there is one, with those of all tokens."""
        new_TD = [self.indexer.keys(x_TH, rope)] if index_keys else []
        places = meta.pages, meta.offsets
        return tuple(keys.at[places].set(new.astype(keys.dtype)) for keys, new in zip(index_keys, new_TD, strict=True))

    def _parts(self, cache: LayerCache) -> tuple[LayerCache, LayerCache]:
        """The arrays of the latents, and that of the index keys if there is one."""
        cut = len(cache) - self.has_indexer
        return cache[:cut], cache[cut:]

    def _choose(
        self,
        x_TH: jax.Array,
        q_a_TQ: jax.Array,
        index_keys: LayerCache,
        tables: jax.Array,
        rows_T: jax.Array,
        bounds_T: jax.Array,
        rope: RopeTables,
        choices: list[jax.Array] | None,
    ) -> jax.Array:
        """The keys that each token reads, int32 [T, K].

        Args:
            q_a_TQ: normed latents of attention's queries.
            tables, rows_T, bounds_T: see `choose_keys`.
            choices: those of the layers before, to which this one adds its own; None where no layer shares any.
        """
        if not index_keys:
            assert choices, "the first layer has an indexer"
            return choices[-1]
        q_TND, weights_TN = self.indexer.queries(x_TH, q_a_TQ, rope)
        keys = index_keys[0]
        chosen_TK = key_choice.choose_keys(q_TND, weights_TN, keys, tables, rows_T, bounds_T, count=self.count)
        if choices is not None:
            choices.append(chosen_TK)
        return chosen_TK

    def _attend(
        self,
        q_TNC: jax.Array,
        latents: Latents,
        tables: jax.Array,
        rows_T: jax.Array,
        bounds_T: jax.Array,
        chosen_TK: jax.Array,
    ) -> Attended:
        """What attention of absorbed queries adds to the residual stream."""
        choice = rows_T, chosen_TK, jnp.minimum(bounds_T, chosen_TK.shape[1])
        w_uv, scale = self.w_uv[...], self.mla.softmax_scale
        return self.project_out(sparse_attention.mla_sparse(q_TNC, latents, tables, *choice, w_uv, scale=scale))

    def kernels_missing(self, dtype: Any) -> str | None:
        """See `NeedsKernels`."""
        pages: Any = tuple(jax.ShapeDtypeStruct((1, PAGE, *a.shape), a.dtype) for a in self.cache_spec.arrays)
        arrays, index_keys = self._parts(pages)
        q_TNC = jax.ShapeDtypeStruct((1, self.mla.num_heads, self.mla.cache_dim), dtype)
        reason = sparse_attention.unsupported_reason(q_TNC, from_arrays(arrays), self.mla.kv_lora_rank)
        if index_keys and reason is None:
            q_TND = jax.ShapeDtypeStruct((1, *self.indexer.q.shape[:2]), dtype)
            reason = key_choice.unsupported_reason(q_TND, index_keys[0])
        return (
            reason
            and f"attention over chosen keys (contexts of over {self.count} tokens) has no kernels here: {reason}"
        )
