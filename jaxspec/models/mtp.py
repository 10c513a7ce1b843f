"""The NextN (MTP) layer of DeepSeek-V3 checkpoints (arXiv 2412.19437 section 2.2), stored as layer `num_hidden_layers`.

Names and order are the checkpoint's: the concatenation is [embedding; hidden], unlike in the paper's formula.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Block, CausalLM, block_key_map
from jaxspec.models.keymap import KeyMap, Piece, nested, norm_weight
from jaxspec.models.layers import RMSNorm, RopeTables, Stream, rope_tables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.norm_linear.api import linear_to_add
from pallas_kernels.norm_linear.reference import whole


class NextN(nnx.Module):
    """One decoder block over pairs (token i+1, hidden i): a `Draft` with the target's embedding and head."""

    # It reads only the target's last hidden state.
    capture: tuple[int, ...] = ()

    def __init__(self, config: ModelConfig, dtype: Any):
        declare = Declare(dtype, config.centred_norms)
        H, eps = config.hidden_size, config.rms_norm_eps
        self.config = config
        self.enorm = RMSNorm(H, eps, declare)
        self.hnorm = RMSNorm(H, eps, declare)
        self.eh_proj = declare((H, 2 * H), (None, None))
        self.layer = Block(H, eps, config.nextn_layers[0], declare)
        self.norm = RMSNorm(H, eps, declare)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.layer.attention.cache_spec

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:  # noqa: ARG002
        return hidden_TH

    def embed_ids(self, target: CausalLM, ids_T: jax.Array) -> jax.Array:
        return target.embed_ids(ids_T)

    def logits(self, target: CausalLM, hidden_RH: jax.Array) -> jax.Array:
        return target.logits(hidden_RH)

    def __call__(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        """Embeddings of the next tokens and hidden states after the final norm -> the draft's hidden states [T, H].

        The result is normed: it feeds the target's head, and is the next draft step's `hidden_TH`.
        """
        x_TH, rope = self._join(embedded_TH, hidden_TH, meta)
        stream, cache = self.layer(Stream(x_TH), cache, meta, rope, following=self.norm)
        return stream.norm(self.norm), cache

    def catch_up(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        """As a call, but hidden states [R, H] of the live tokens only; see `Block.catch_up`."""
        x_TH, rope = self._join(embedded_TH, hidden_TH, meta)
        stream, cache = self.layer.catch_up(x_TH, live, cache, meta, rope, following=self.norm)
        return stream.norm(self.norm), cache

    def write_keys(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> LayerCache:
        x_TH, rope = self._join(embedded_TH, hidden_TH, meta)
        return self.layer.write_keys(x_TH, cache, meta, rope)

    def _join(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, meta: StepMetadata
    ) -> tuple[jax.Array, RopeTables | None]:
        pair_T2H = jnp.concatenate([self.enorm(embedded_TH), self.hnorm(hidden_TH)], axis=-1)
        rope = self.layer.spec.attention.rope
        x_TH = whole(linear_to_add(pair_T2H, self.eh_proj[...]))
        return x_TH, rope_tables(rope, meta.positions) if rope else None


def nextn_prefix(config: ModelConfig) -> str:
    """Where checkpoints store the (first) NextN layer: after the last layer."""
    return f"model.layers.{config.num_layers}."


def nextn_key_map(config: ModelConfig) -> KeyMap:
    """Paths of `NextN` -> pieces."""
    H, prefix = config.hidden_size, nextn_prefix(config)
    return {("eh_proj",): (Piece(f"{prefix}eh_proj.weight", (H, 2 * H)),)} | nested(
        {
            "enorm": norm_weight(f"{prefix}enorm", H),
            "hnorm": norm_weight(f"{prefix}hnorm", H),
            "layer": block_key_map(config.nextn_layers[0], H, prefix),
            "norm": norm_weight(f"{prefix}shared_head.norm", H),
        }
    )
