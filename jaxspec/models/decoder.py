"""Decoder-only language models: pre-norm blocks of attention and MLP around one residual stream.

Families differ only in the attention and the MLP that a layer's spec names, so they share this file. A model does not
know about requests, scheduling or drafts.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import comm
from jaxspec.models.attention import Attention
from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.config import LayerSpec, ModelConfig, RopeConfig
from jaxspec.models.keymap import KeyMap, Piece, nested, norm_weight
from jaxspec.models.layers import ResidualMLP, RMSNorm, RopeTables, Stream, added, rope_tables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.quant.reference import linear

Cache = tuple[LayerCache, ...]


class ModelOutput(NamedTuple):
    """hidden [T, H] after the final norm; the written caches; the residual streams asked for, in ascending order.

    `experts`: where asked for, those that each mixture layer sent the tokens to, int32 [T, top_k].
    """

    hidden: jax.Array
    cache: Cache
    captured: tuple[jax.Array, ...]
    experts: tuple[jax.Array, ...]


class Block(nnx.Module):
    """x + attention(norm x), then x + mlp(norm x)."""

    def __init__(self, hidden: int, eps: float, spec: LayerSpec, declare: Declare):
        self.spec = spec
        self.input_norm = RMSNorm(hidden, eps, declare)
        self.attention: Attention = spec.attention.build(hidden, declare)
        self.post_norm = RMSNorm(hidden, eps, declare)
        self.mlp: ResidualMLP = spec.mlp.build(hidden, declare)

    def __call__(
        self,
        stream: Stream,
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables | None,
        experts: list[jax.Array] | None = None,
        following: RMSNorm | None = None,
    ) -> tuple[Stream, LayerCache]:
        """The residual stream of T tokens after the block, and its cache.

        Args:
            experts: where given, the layer's chosen experts are added to it, if it has any.
            following: the norm that the result is read through next, if by one only.
        """
        x_TH = stream.x
        with jax.named_scope("attention"):
            if stream.normed is None:
                out_TH, cache = self.attention(x_TH, cache, meta, rope, norm=self.input_norm)
            else:
                out_TH, cache = self.attention(stream.normed, cache, meta, rope)
        if experts is not None:
            if isinstance(out_TH, comm.Part):
                out_TH = added(out_TH)  # read twice, and told once
            if (ids_TK := self.mlp.chosen_experts(x_TH, out_TH, self.post_norm)) is not None:
                experts.append(ids_TK)
        with jax.named_scope("mlp"):
            return self.mlp.add_to(x_TH, out_TH, self.post_norm, meta.live, following), cache

    def catch_up(
        self,
        x_TH: jax.Array,
        live: LiveRows,
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables | None,
        following: RMSNorm | None = None,
    ) -> tuple[Stream, LayerCache]:
        """The block for R live tokens out of T, -> [R, H]: all T tokens' caches are written, the rest is live only."""
        out_RH, cache = self.attention.catch_up(self.input_norm(x_TH), live, cache, meta, rope)
        live_R = meta.live[live.tokens]
        return self.mlp.add_to(x_TH[live.tokens], out_RH, self.post_norm, live_R, following), cache

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: RopeTables | None) -> LayerCache:
        """Writes the cache of all T tokens and computes nothing else of the block."""
        return self.attention.write_keys(self.input_norm(x_TH), cache, meta, rope)


def block_key_map(spec: LayerSpec, hidden: int, prefix: str) -> KeyMap:
    """A `Block` in checkpoints that store it under `prefix`."""
    return nested(
        {
            "input_norm": norm_weight(f"{prefix}input_layernorm", hidden),
            "attention": spec.attention.key_map(f"{prefix}self_attn.", hidden),
            "post_norm": norm_weight(f"{prefix}post_attention_layernorm", hidden),
            "mlp": spec.mlp.key_map(f"{prefix}mlp.", hidden),
        }
    )


class Embedding(nnx.Module):
    """A vector for each token of a vocabulary: an embedding, a head, or both."""

    def __init__(self, vocab: int, hidden: int, declare: Declare):
        self.weight = declare((vocab, hidden), ("vocab", None))

    def rows(self, ids_T: jax.Array) -> jax.Array:
        """[T, H] of ids int32 [T]."""
        weight_VH = self.weight[...]
        if not comm.is_split():
            return jnp.take(weight_VH, ids_T, axis=0)
        return comm.total(jnp.take(weight_VH, comm.find(ids_T, weight_VH.shape[0]), axis=0, mode="fill", fill_value=0))

    def logits(self, hidden_RH: jax.Array) -> jax.Array:
        """[R, vocab] of hidden states, in their type; on several devices each has the columns of its rows."""
        return linear(hidden_RH, self.weight[...])


class CausalLM(nnx.Module):
    """Embedding, blocks, final norm and head."""

    def __init__(self, config: ModelConfig, dtype: Any):
        declare = Declare(dtype, config.centred_norms)
        self.config = config
        self.embed = Embedding(config.vocab_size, config.hidden_size, declare)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.layers = nnx.List([Block(hidden, eps, spec, declare) for spec in config.layers])
        self.norm = RMSNorm(hidden, eps, declare)
        if not config.tie_embeddings:
            self.head = Embedding(config.vocab_size, config.hidden_size, declare)

    def __call__(
        self,
        ids_T: jax.Array,
        cache: Cache,
        meta: StepMetadata,
        *,
        capture: tuple[int, ...] = (),
        experts: bool = False,
    ) -> ModelOutput:
        """One forward pass over a step's tokens.

        Args:
            ids_T: int32 [T].
            capture: ascending layer ids; for id i the residual stream entering layer i is returned ([T, H]), for
                id `num_layers` the one leaving the last layer, before the final norm.
            experts: also return which experts were chosen, which routes the tokens twice.
        """
        meta = meta._replace(choices=[])
        stream = Stream(self.embed_ids(ids_T))
        norms = [*(layer.input_norm for layer in self.layers), self.norm]
        ropes: dict[RopeConfig, RopeTables] = {}
        written: list[LayerCache] = []
        captured = []
        chosen: list[jax.Array] | None = [] if experts else None
        for i, layer in enumerate(self.layers):
            if i in capture:
                captured.append(stream.x)
            rope = layer.spec.attention.rope
            if rope is not None and rope not in ropes:
                ropes[rope] = rope_tables(rope, meta.positions)
            with jax.named_scope(f"layer{i}"):
                tables = ropes[rope] if rope else None
                stream, layer_cache = layer(stream, cache[i], meta, tables, chosen, norms[i + 1])
            written.append(layer_cache)
        if len(self.layers) in capture:
            captured.append(stream.x)
        return ModelOutput(stream.norm(self.norm), tuple(written), tuple(captured), tuple(chosen or ()))

    def embed_ids(self, ids_T: jax.Array) -> jax.Array:
        x_TH = self.embed.rows(ids_T)
        return x_TH if self.config.embed_scale == 1 else x_TH * self.config.embed_scale

    def logits(self, hidden_RH: jax.Array) -> jax.Array:
        """[R, vocab] of hidden states after the final norm, in their type; of several devices each has its columns."""
        head = self.embed if self.config.tie_embeddings else self.head
        if self.config.logit_scale != 1:
            hidden_RH = hidden_RH * self.config.logit_scale
        return head.logits(hidden_RH)

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        """Of its layers, in order."""
        return tuple(layer.attention.cache_spec for layer in self.layers)

    @property
    def mixtures(self) -> dict[int, int]:
        """How many experts each layer has that has any, by its number, in order."""
        return {i: layer.mlp.num_experts for i, layer in enumerate(self.layers) if layer.mlp.num_experts}


def logits_at(ids_C: jax.Array, logits_RC: jax.Array, vocab: int) -> jax.Array:
    """[R, vocab] with the logits of some ids int32 [C], -inf elsewhere, in the columns that `CausalLM.logits` has.

    Args:
        logits_RC: as `Embedding.logits` gives them: of several devices each has a part.
    """
    everything = jnp.full((logits_RC.shape[0], vocab // comm.size()), -jnp.inf, logits_RC.dtype)
    if not comm.is_split():
        return everything.at[:, ids_C].set(logits_RC)
    # Which device's columns an id has follows from no order: all logits of these few ids go to all devices.
    places_C = comm.find(ids_C, everything.shape[1])
    return everything.at[:, places_C].set(comm.gather(logits_RC, axis=1), mode="drop")


def decoder_key_map(config: ModelConfig) -> KeyMap:
    """Paths of `CausalLM` -> pieces, under the names that nearly all checkpoints use."""
    H, V = config.hidden_size, config.vocab_size
    out: KeyMap = {
        ("embed", "weight"): (Piece("model.embed_tokens.weight", (V, H)),),
        ("norm", "weight"): (Piece("model.norm.weight", (H,)),),
    }
    if not config.tie_embeddings:
        out["head", "weight"] = (Piece("lm_head.weight", (V, H)),)
    for i, spec in enumerate(config.layers):
        block = block_key_map(spec, H, f"model.layers.{i}.")
        out |= {("layers", i, *path): pieces for path, pieces in block.items()}
    return out
