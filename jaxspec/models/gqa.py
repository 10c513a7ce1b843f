"""Grouped-query attention (arXiv 2305.13245) over paged keys and values."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import GQAConfig, ModelConfig
from jaxspec.models.layers import RMSNorm, apply_rope, linear
from jaxspec.models.metadata import StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.gqa_prefill.api import gqa_prefill
from pallas_kernels.kv_write.api import write_kv

# A layer's cache: keys and values, each [num_pages, page_size, num_kv_heads, head_dim].
KVCache = tuple[jax.Array, jax.Array]


class GQA(nnx.Module):
    """Attention with G query heads for each key head.

    One matmul makes queries, keys and values: for each key head its G query heads, then the key, then the value.

    Args:
        input_dim: width of the input where it is not the hidden size (EAGLE3 drafts read two hiddens at once).
    """

    def __init__(self, config: ModelConfig, gqa: GQAConfig, declare: Declare, *, input_dim: int | None = None):
        K, D = gqa.num_kv_heads, gqa.head_dim
        G = config.num_heads // K
        self.gqa = gqa
        self.qkv = declare((K, G + 2, D, input_dim or config.hidden_size), ("kv_heads", None, None, None))
        if gqa.qk_norm:
            self.q_norm = RMSNorm(D, config.rms_norm_eps, declare)
            self.k_norm = RMSNorm(D, config.rms_norm_eps, declare)
        self.o = declare((config.hidden_size, K, G, D), (None, "kv_heads", None, None))

    def __call__(
        self,
        x_TH: jax.Array,
        cache: KVCache,
        meta: StepMetadata,
        rope: tuple[jax.Array, jax.Array],
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Writes the T new keys and values, then attends.

        [T, input_dim], `norm` of it if given, -> [T, H] and the new cache.
        """
        qkv_TKxD = norm.into(x_TH, self.qkv[...])[0] if norm else linear(x_TH, self.qkv[...])
        q_TKGD, k_TKD, v_TKD = qkv_TKxD[:, :, :-2], qkv_TKxD[:, :, -2], qkv_TKxD[:, :, -1]
        if self.gqa.qk_norm:
            q_TKGD, k_TKD = self.q_norm(q_TKGD), self.k_norm(k_TKD)
        cos, sin = rope
        q_TKGD, k_TKD = apply_rope(q_TKGD, cos, sin), apply_rope(k_TKD, cos, sin)
        cache = write_kv(*cache, k_TKD, v_TKD, meta.pages, meta.offsets)

        P, scale = meta.num_prefill_tokens, self.gqa.softmax_scale
        parts = []
        if P:
            parts.append(
                gqa_prefill(
                    q_TKGD[:P],
                    *cache,
                    meta.prefill_tables,
                    meta.prefill_rows,
                    meta.positions[:P],
                    meta.prefill_ends,
                    scale=scale,
                )
            )
        if meta.decode_bounds.shape[0]:
            q = q_TKGD[P:].reshape(*meta.decode_bounds.shape, *q_TKGD.shape[1:])
            out = gqa_decode(q, *cache, meta.decode_tables, meta.decode_bounds, scale=scale)
            parts.append(out.reshape(-1, *q_TKGD.shape[1:]))
        return jnp.einsum("tkgd,hkgd->th", jnp.concatenate(parts), self.o[...]), cache

    def catch_up(
        self,
        x_TH: jax.Array,
        live_R: jax.Array,
        cache: KVCache,
        meta: StepMetadata,
        rope: tuple[jax.Array, jax.Array],
        tables_R: jax.Array,
        bounds_R: jax.Array,
    ) -> tuple[jax.Array, KVCache]:
        """Writes all T keys and values but attends for the R live tokens only, like windows of one: -> [R, H]."""
        qkv = self.qkv[...]
        q_RKGD = linear(x_TH[live_R], qkv[:, :-2])
        kv_TK2D = linear(x_TH, qkv[:, -2:])
        k_TKD, v_TKD = kv_TK2D[:, :, 0], kv_TK2D[:, :, 1]
        if self.gqa.qk_norm:
            q_RKGD, k_TKD = self.q_norm(q_RKGD), self.k_norm(k_TKD)
        cos, sin = rope
        q_RKGD, k_TKD = apply_rope(q_RKGD, cos[live_R], sin[live_R]), apply_rope(k_TKD, cos, sin)
        cache = write_kv(*cache, k_TKD, v_TKD, meta.pages, meta.offsets)
        out = gqa_decode(q_RKGD[:, None], *cache, tables_R, bounds_R[:, None], scale=self.gqa.softmax_scale)
        return jnp.einsum("tkgd,hkgd->th", out[:, 0], self.o[...]), cache

    def cache_shapes(self, num_pages: int, page_size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape = (num_pages, page_size, self.gqa.num_kv_heads, self.gqa.head_dim)
        return shape, shape
