"""Decoder-only language models: pre-norm blocks of attention and MLP around one residual stream.

DeepSeek-V2/V3 and Llama/Qwen3 differ only in which attention and which MLP a block holds, so they share this file;
`config.py` decides which. A model knows nothing of requests, scheduling or drafts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import MLAConfig, ModelConfig
from jaxspec.models.gqa import GQA
from jaxspec.models.layers import MLP, RMSNorm, linear, rope_tables
from jaxspec.models.metadata import StepMetadata
from jaxspec.models.mla import MLA
from jaxspec.models.moe import MoE
from jaxspec.models.params import Declare

# Per layer: one array (MLA) or a pair (GQA).
LayerCache = Any
Cache = tuple[LayerCache, ...]


class ModelOutput(NamedTuple):
    """hidden [T, H] after the final norm; the written caches; the residual streams asked for, in ascending order."""

    hidden: jax.Array
    cache: Cache
    captured: tuple[jax.Array, ...]


class Block(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, config: ModelConfig, declare: Declare, *, moe: bool):
        self.input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, declare)
        self.attention: MLA | GQA
        if isinstance(config.attention, MLAConfig):
            self.attention = MLA(config, config.attention, declare)
        else:
            self.attention = GQA(config, config.attention, declare)
        self.post_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, declare)
        self.is_moe = moe
        self.mlp: MoE | MLP
        if moe:
            assert config.moe is not None
            self.mlp = MoE(config.hidden_size, config.moe, declare)
        else:
            self.mlp = MLP(config.hidden_size, config.mlp_dim, declare)

    def __call__(
        self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: tuple[jax.Array, jax.Array]
    ) -> tuple[jax.Array, LayerCache]:
        with jax.named_scope("attention"):
            out_TH, cache = self.attention(x_TH, cache, meta, rope, norm=self.input_norm)
        with jax.named_scope("mlp"):
            return self._add_mlp(x_TH, out_TH, meta.live), cache

    def catch_up(
        self,
        x_TH: jax.Array,
        live_R: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: tuple[jax.Array, jax.Array],
        tables_R: jax.Array,
        bounds_R: jax.Array,
    ) -> tuple[jax.Array, LayerCache]:
        """The block for R live tokens out of T: all T tokens' keys and values are written, the rest is live only.

        Args:
            live_R: int32 [R] token indices.
            tables_R, bounds_R: page tables int32 [R, max_pages] and exclusive causal bounds int32 [R] of the live tokens.
        """
        out_RH, cache = self.attention.catch_up(self.input_norm(x_TH), live_R, cache, meta, rope, tables_R, bounds_R)
        return self._add_mlp(x_TH[live_R], out_RH, meta.live[live_R]), cache

    def _add_mlp(self, x_TH: jax.Array, attended_TH: jax.Array, live_T: jax.Array) -> jax.Array:
        """The residual stream behind the block."""
        if isinstance(self.mlp, MoE):
            x_TH, normed_TH, (logits_TE,) = self.post_norm.add_into(x_TH, attended_TH, self.mlp.router[...])
            return self.mlp(normed_TH, logits_TE, live_T, x_TH)
        x_TH = x_TH + attended_TH
        return x_TH + self.mlp(self.post_norm(x_TH))


class Embedding(nnx.Module):
    def __init__(self, vocab: int, hidden: int, declare: Declare):
        self.weight = declare((vocab, hidden), ("vocab", None))


class CausalLM(nnx.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, config: ModelConfig, dtype: Any):
        declare = Declare(dtype)
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, declare)
        self.layers = nnx.List([Block(config, declare, moe=config.is_moe_layer(i)) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, declare)
        if not config.tie_embeddings:
            self.head = Embedding(config.vocab_size, config.hidden_size, declare)

    def __call__(
        self, ids_T: jax.Array, cache: Cache, meta: StepMetadata, *, capture: tuple[int, ...] = ()
    ) -> ModelOutput:
        """One forward pass over a step's tokens.

        Args:
            ids_T: int32 [T].
            capture: ascending layer ids; for id i the residual stream entering layer i is returned ([T, H]), for
                id `num_layers` the one leaving the last layer, before the final norm.
        """
        x_TH = self.embed_ids(ids_T)
        rope = rope_tables(self.config.rope, meta.positions)
        written: list[LayerCache] = []
        captured = []
        for i, layer in enumerate(self.layers):
            if i in capture:
                captured.append(x_TH)
            with jax.named_scope(f"layer{i}"):
                x_TH, layer_cache = layer(x_TH, cache[i], meta, rope)
            written.append(layer_cache)
        if len(self.layers) in capture:
            captured.append(x_TH)
        return ModelOutput(self.norm(x_TH), tuple(written), tuple(captured))

    def embed_ids(self, ids_T: jax.Array) -> jax.Array:
        return jnp.take(self.embed.weight[...], ids_T, axis=0)

    def logits(self, hidden_RH: jax.Array) -> jax.Array:
        """[R, vocab] of hidden states after the final norm, in their type."""
        weight = self.embed.weight if self.config.tie_embeddings else self.head.weight
        return linear(hidden_RH, weight[...])

    def cache_shapes(self, num_pages: int, page_size: int) -> tuple[Any, ...]:
        """Shapes of the paged caches, layer by layer."""
        return tuple(layer.attention.cache_shapes(num_pages, page_size) for layer in self.layers)
