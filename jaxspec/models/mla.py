"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): decompressed for prompts, absorbed for decoding."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import MLAConfig, ModelConfig
from jaxspec.models.layers import RMSNorm, apply_rope, linear, worth_merging
from jaxspec.models.metadata import StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.kv_write.api import write_latent
from pallas_kernels.mla_decode.api import mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill
from pallas_kernels.mla_query.api import mla_query, write_and_query

# A layer's cache: one array [num_pages, page_size, kv_lora_rank + rope_dim].
LatentCache = jax.Array


class MLA(nnx.Module):
    """Attention over one latent vector a token, shared by all heads.

    The down-projections of queries and latents share one matmul where the model has both. `kv_b_proj` is kept split
    into W_UK (latent to keys) and W_UV (latent to values), the form that both paths use.

    Args:
        input_dim: width of the input where it is not the hidden size (EAGLE3 drafts read two hiddens at once).
    """

    def __init__(self, config: ModelConfig, mla: MLAConfig, declare: Declare, *, input_dim: int | None = None):
        H, N, inputs = config.hidden_size, config.num_heads, input_dim or config.hidden_size
        L, R, Dq = mla.kv_lora_rank, mla.rope_dim, mla.nope_dim + mla.rope_dim
        self.mla = mla
        self.q_lora_rank = mla.q_lora_rank or 0
        if self.q_lora_rank:
            self.qkv_a = declare((self.q_lora_rank + L + R, inputs), (None, None))
            self.q_norm = RMSNorm(self.q_lora_rank, mla.latent_norm_eps, declare)
            self.q_b = declare((N, Dq, self.q_lora_rank), ("heads", None, None))
        else:
            self.q = declare((N, Dq, inputs), ("heads", None, None))
            self.kv_a = declare((L + R, inputs), (None, None))
        self.kv_norm = RMSNorm(L, mla.latent_norm_eps, declare)
        self.w_uk = declare((N, mla.nope_dim, L), ("heads", None, None))
        self.w_uv = declare((N, mla.v_dim, L), ("heads", None, None))
        self.o = declare((H, N, mla.v_dim), (None, "heads", None))

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LatentCache,
        meta: StepMetadata,
        rope: tuple[jax.Array, jax.Array],
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, LatentCache]:
        """Writes the T new latents, then attends: [T, input_dim], `norm` of it if given, -> [T, H] and the new cache."""
        q_TX, kv_a_TX = self.project(x_TH, norm)
        cos, sin = rope
        kv_norm, w_uk, places = self.kv_norm, self.w_uk[...], (meta.pages, meta.offsets)
        P = meta.num_prefill_tokens
        if P == 0:
            cache, q_TNC = write_and_query(
                cache, kv_a_TX, kv_norm.weight[...], q_TX, w_uk, cos, sin, *places, eps=kv_norm.eps
            )
            out_TNV = self.attend_decode(q_TNC, cache, meta.decode_tables, meta.decode_bounds)
        else:
            kv_a_TC = kv_a_TX[:, kv_a_TX.shape[1] - self.mla.cache_dim :]
            N, D = w_uk.shape[0], self.mla.nope_dim + self.mla.rope_dim
            q_TND = q_TX[:, : N * D].reshape(-1, N, D)
            cache = write_latent(cache, kv_a_TC, kv_norm.weight[...], cos, sin, *places, eps=kv_norm.eps)
            out_TNV = self.attend_prefill(q_TND[:P], cos[:P], sin[:P], cache, meta)
            if q_TND.shape[0] > P:
                q_TNC = mla_query(q_TND[P:], w_uk, cos[P:], sin[P:])
                decoded_TNV = self.attend_decode(q_TNC, cache, meta.decode_tables, meta.decode_bounds)
                out_TNV = jnp.concatenate([out_TNV, decoded_TNV])
        return jnp.einsum("tnv,hnv->th", out_TNV, self.o[...]), cache

    def catch_up(
        self,
        x_TH: jax.Array,
        live_R: jax.Array,
        cache: LatentCache,
        meta: StepMetadata,
        rope: tuple[jax.Array, jax.Array],
        tables_R: jax.Array,
        bounds_R: jax.Array,
    ) -> tuple[jax.Array, LatentCache]:
        """Writes all T latents but attends for the R live tokens only, each like a decode window of one: -> [R, H]."""
        cos, sin = rope
        if self.q_lora_rank:
            q_a_RQ = linear(x_TH[live_R], self.qkv_a[: self.q_lora_rank])
            q_RND = linear(self.q_norm(q_a_RQ), self.q_b[...])
            kv_a_TC = linear(x_TH, self.qkv_a[self.q_lora_rank :])
        else:
            q_RND, kv_a_TC = linear(x_TH[live_R], self.q[...]), linear(x_TH, self.kv_a[...])
        cache = write_latent(
            cache, kv_a_TC, self.kv_norm.weight[...], cos, sin, meta.pages, meta.offsets, eps=self.kv_norm.eps
        )
        q_RNC = mla_query(q_RND, self.w_uk[...], cos[live_R], sin[live_R])
        out_RNV = self.attend_decode(q_RNC, cache, tables_R, bounds_R[:, None])
        return jnp.einsum("tnv,hnv->th", out_RNV, self.o[...]), cache

    def project(self, x_TH: jax.Array, norm: RMSNorm | None = None) -> tuple[jax.Array, jax.Array]:
        """Queries [T, X], not yet rotated, and the raw down-projection [T, X], as matmuls leave them.

        Queries are the first N * (nope + rope) columns of theirs, the down-projection the last latent + rope of its own,
        which may be the same array.
        """
        T, inputs = x_TH.shape
        weights = (self.qkv_a[...],) if self.q_lora_rank else (self.q[...], self.kv_a[...])
        if not self.q_lora_rank and worth_merging(T):
            weights = (jnp.concatenate([weight.reshape(-1, inputs) for weight in weights]),)
        outs = norm.into(x_TH, *weights) if norm else tuple(linear(x_TH, weight) for weight in weights)
        if self.q_lora_rank:
            (q_TND,) = self.q_norm.into(outs[0][:, : self.q_lora_rank], self.q_b[...])
            return q_TND.reshape(T, -1), outs[0]
        return outs[0].reshape(T, -1), outs[-1]

    def attend_prefill(
        self, q_PND: jax.Array, cos: jax.Array, sin: jax.Array, cache: LatentCache, meta: StepMetadata
    ) -> jax.Array:
        """Queries of all prompt tokens, [P, N, nope + rope] as projected -> [P, N, v_dim]."""
        q_nope_PND, q_rope_PNR = jnp.split(q_PND, [self.mla.nope_dim], axis=-1)
        return mla_prefill(
            q_nope_PND,
            apply_rope(q_rope_PNR, cos, sin),
            self.w_uk[...],
            self.w_uv[...],
            cache,
            meta.prefill_tables,
            meta.prefill_rows,
            meta.positions[: q_PND.shape[0]],
            meta.prefill_ends,
            scale=self.mla.softmax_scale,
        )

    def attend_decode(self, q_TNC: jax.Array, cache: LatentCache, tables: jax.Array, bounds_Dn: jax.Array) -> jax.Array:
        """Absorbed queries [D·n, N, latent + rope] of D windows -> [D·n, N, v_dim]."""
        T, N, C = q_TNC.shape
        q = q_TNC.reshape(*bounds_Dn.shape, N, C)
        out = mla_decode(
            q, cache, tables, bounds_Dn, self.w_uv[...], scale=self.mla.softmax_scale, value_dim=self.mla.kv_lora_rank
        )
        return out.reshape(T, N, self.mla.v_dim)

    def cache_shapes(self, num_pages: int, page_size: int) -> tuple[int, ...]:
        return (num_pages, page_size, self.mla.cache_dim)
