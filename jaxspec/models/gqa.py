"""Grouped-query attention (arXiv 2305.13245) over paged keys and values."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.config import RopeConfig
from jaxspec.models.keymap import KeyMap, Piece, nested, norm_weight
from jaxspec.models.layers import RMSNorm, RopeTables, apply_rope, linear
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.gqa_prefill.api import gqa_prefill
from pallas_kernels.kv_write.api import write_kv


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention.

    Attributes:
        qk_norm: an RMS norm over each head's query and key (Qwen3), with `norm_eps`.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: RopeConfig
    qk_norm: bool = False
    norm_eps: float = 1e-6

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "GQA":
        return GQA(hidden, self, declare, input_dim=input_dim)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        K, D, inputs = self.num_kv_heads, self.head_dim, input_dim or hidden
        G = self.num_heads // K
        out: KeyMap = {
            ("qkv",): (
                Piece(
                    f"{prefix}q_proj.weight", (K * G * D, inputs), (slice(None), slice(0, G)), view=(K, G, D, inputs)
                ),
                Piece(f"{prefix}k_proj.weight", (K * D, inputs), (slice(None), G), view=(K, D, inputs)),
                Piece(f"{prefix}v_proj.weight", (K * D, inputs), (slice(None), G + 1), view=(K, D, inputs)),
            ),
            ("o",): (Piece(f"{prefix}o_proj.weight", (hidden, K * G * D), view=(hidden, K, G, D)),),
        }
        if self.qk_norm:
            out |= nested({norm: norm_weight(f"{prefix}{norm}", D) for norm in ("q_norm", "k_norm")})
        return out


class GQA(nnx.Module):
    """Attention with G query heads for each key head. Its cache: keys and values.

    One matmul makes queries, keys and values: for each key head its G query heads, then the key, then the value.

    Args:
        input_dim: width of the input where it is not the hidden size.
    """

    def __init__(self, hidden: int, spec: GQASpec, declare: Declare, *, input_dim: int | None = None):
        K, D = spec.num_kv_heads, spec.head_dim
        G = spec.num_heads // K
        self.spec = spec
        self.cache_spec = CacheSpec(
            tuple(CacheArray(name, "token", (K, D), declare.dtype, ("kv_heads", None)) for name in ("keys", "values"))
        )
        self.qkv = declare((K, G + 2, D, input_dim or hidden), ("kv_heads", None, None, None))
        if spec.qk_norm:
            self.q_norm = RMSNorm(D, spec.norm_eps, declare)
            self.k_norm = RMSNorm(D, spec.norm_eps, declare)
        self.o = declare((hidden, K, G, D), (None, "kv_heads", None, None))

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables,
        norm: RMSNorm | None = None,
    ) -> tuple[jax.Array, LayerCache]:
        """Writes the T new keys and values, then attends.

        [T, input_dim], `norm` of it if given, -> [T, H] and the new cache.
        """
        qkv_TKxD = norm.into(x_TH, self.qkv[...])[0] if norm else linear(x_TH, self.qkv[...])
        q_TKGD, k_TKD, v_TKD = qkv_TKxD[:, :, :-2], qkv_TKxD[:, :, -2], qkv_TKxD[:, :, -1]
        if self.spec.qk_norm:
            q_TKGD, k_TKD = self.q_norm(q_TKGD), self.k_norm(k_TKD)
        cos, sin = rope
        q_TKGD, k_TKD = apply_rope(q_TKGD, cos, sin), apply_rope(k_TKD, cos, sin)
        keys, values = cache
        keys, values = write_kv(keys, values, k_TKD, v_TKD, meta.pages, meta.offsets)

        P, scale = meta.num_prefill_tokens, self.spec.softmax_scale
        parts = []
        if P:
            parts.append(
                gqa_prefill(
                    q_TKGD[:P],
                    keys,
                    values,
                    meta.prefill_tables,
                    meta.prefill_rows,
                    meta.positions[:P],
                    meta.prefill_ends,
                    scale=scale,
                )
            )
        if meta.decode_bounds.shape[0]:
            q = q_TKGD[P:].reshape(*meta.decode_bounds.shape, *q_TKGD.shape[1:])
            out = gqa_decode(q, keys, values, meta.decode_tables, meta.decode_bounds, scale=scale)
            parts.append(out.reshape(-1, *q_TKGD.shape[1:]))
        return jnp.einsum("tkgd,hkgd->th", jnp.concatenate(parts), self.o[...]), (keys, values)

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: RopeTables
    ) -> tuple[jax.Array, LayerCache]:
        """See `Attention`."""
        q_RKGD = linear(x_TH[live.tokens], self.qkv[...][:, :-2])
        if self.spec.qk_norm:
            q_RKGD = self.q_norm(q_RKGD)
        cos, sin = rope
        q_RKGD = apply_rope(q_RKGD, cos[live.tokens], sin[live.tokens])
        keys, values = self.write_keys(x_TH, cache, meta, rope)
        out = gqa_decode(
            q_RKGD[:, None], keys, values, live.tables, live.bounds[:, None], scale=self.spec.softmax_scale
        )
        return jnp.einsum("tkgd,hkgd->th", out[:, 0], self.o[...]), (keys, values)

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: RopeTables) -> LayerCache:
        """See `Attention`."""
        kv_TK2D = linear(x_TH, self.qkv[...][:, -2:])
        k_TKD, v_TKD = kv_TK2D[:, :, 0], kv_TK2D[:, :, 1]
        if self.spec.qk_norm:
            k_TKD = self.k_norm(k_TKD)
        keys, values = cache
        return write_kv(keys, values, apply_rope(k_TKD, *rope), v_TKD, meta.pages, meta.offsets)
