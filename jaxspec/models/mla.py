"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): decompressed for prompts, absorbed for decoding."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import comm
from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.config import RopeConfig
from jaxspec.models.keymap import Index, KeyMap, Piece, Pieces, nested, norm_weight
from jaxspec.models.layers import Attended, RMSNorm, RopeTables, worth_merging
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.kv_write.api import latent_writer, write_latent
from pallas_kernels.latents import GROUP, Latents, from_arrays
from pallas_kernels.mla_decode.api import decoder, head_rows, mla_decode
from pallas_kernels.mla_prefill.api import mla_prefill, prefiller
from pallas_kernels.mla_query.api import mla_query, write_and_query
from pallas_kernels.norm_linear.api import joined_linear, joins_linears, linear_to_add
from pallas_kernels.quant.reference import linear
from pallas_kernels.rope import apply_rope
from pallas_kernels.split_kv import PAGE


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 section 2.1): sizes of the latent and the heads."""

    num_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    nope_dim: int
    rope_dim: int
    v_dim: int
    softmax_scale: float
    rope: RopeConfig
    # The reference implementations build the two latent norms with their class default, not with rms_norm_eps.
    latent_norm_eps: float = 1e-6
    # Of what attention adds to the residual stream.
    output_scale: float = 1.0

    @property
    def cache_dim(self) -> int:
        """Values cached for one token in one layer: the normed latent and the rotated shared key."""
        return self.kv_lora_rank + self.rope_dim

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "MLA":
        return MLA(hidden, self, declare, input_dim=input_dim)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        N, L, Q, inputs = self.num_heads, self.kv_lora_rank, self.q_lora_rank or 0, input_dim or hidden
        R, D, V = self.rope_dim, self.nope_dim, self.v_dim
        interleaved = self.rope.interleaved
        q_rows: Index = (slice(None), halves(D, R)) if interleaved else ...
        kv_rows: Index = (halves(L, R),) if interleaved else ...

        def kv_a(at: Index) -> Piece:
            return Piece(f"{prefix}kv_a_proj_with_mqa.weight", (L + R, inputs), at, take=kv_rows)

        def q(name: str, width: int) -> Pieces:
            return (Piece(f"{prefix}{name}.weight", (N * (D + R), width), view=(N, D + R, width), take=q_rows),)

        def kv_b(rows: slice) -> Pieces:
            return (Piece(f"{prefix}kv_b_proj.weight", (N * (D + V), L), view=(N, D + V, L), take=(slice(None), rows)),)

        queries: KeyMap = {("q",): q("q_proj", inputs), ("kv_a",): (kv_a(...),)}
        if Q:
            q_a = Piece(f"{prefix}q_a_proj.weight", (Q, inputs), slice(0, Q))
            queries = {("qkv_a",): (q_a, kv_a(slice(Q, None))), ("q_b",): q("q_b_proj", Q)}
            queries |= nested({"q_norm": norm_weight(f"{prefix}q_a_layernorm", Q)})
        return (
            queries
            | nested({"kv_norm": norm_weight(f"{prefix}kv_a_layernorm", L)})
            | {
                ("w_uk",): kv_b(slice(0, D)),
                ("w_uv",): kv_b(slice(D, None)),
                ("o",): (Piece(f"{prefix}o_proj.weight", (hidden, N * V), view=(hidden, N, V)),),
            }
        )


def halves(start: int, dim: int) -> np.ndarray:
    """Row order that keeps `start` rows and turns `dim` rows of rotary pairs (0,1), (2,3), ... into two halves.

    The model code rotates halves; for P = [0, 2, .., 1, 3, ..] both conventions give the same scores.
    """
    pairs = np.arange(start, start + dim)
    return np.concatenate([np.arange(start), pairs[0::2], pairs[1::2]])


def _fp8_arrays(rank: int, rope_dim: int) -> tuple[CacheArray, ...]:
    """A cache of `Fp8Latents`."""
    sizes = {
        "codes": (rank, jnp.float8_e4m3fn),
        "scale": (-(-rank // GROUP), jnp.float32),
        "rope": (rope_dim, jnp.bfloat16),
    }
    return tuple(CacheArray(name, "token", (n,), np.dtype(dtype), (None,)) for name, (n, dtype) in sizes.items())


class MLA(nnx.Module):
    """Attention over one latent vector a token, shared by all heads. Its cache: the latents, with the rotated key.

    The down-projections of queries and latents share one matmul where the model has both. `kv_b_proj` is kept split
    into W_UK (latent to keys) and W_UV (latent to values), the form that both paths use.

    Args:
        input_dim: width of the input where it is not the hidden size.
    """

    def __init__(self, hidden: int, mla: MLASpec, declare: Declare, *, input_dim: int | None = None):
        H, N, inputs = hidden, mla.num_heads, input_dim or hidden
        L, R, Dq = mla.kv_lora_rank, mla.rope_dim, mla.nope_dim + mla.rope_dim
        self.mla = mla
        plain = CacheArray("latents", "token", (mla.cache_dim,), declare.dtype, (None,))
        self.cache_spec = CacheSpec((plain,), fp8=_fp8_arrays(L, R))
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
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables,
        norm: RMSNorm | None = None,
    ) -> tuple[Attended, LayerCache]:
        """Writes the T new latents, then attends: [T, input_dim], `norm` of it if given, -> [T, H] and the new cache."""
        latents = from_arrays(cache)
        q_TX, kv_a_TX = self.project(x_TH, norm)
        cos, sin = rope
        kv_norm, w_uk, places = self.kv_norm, self.w_uk[...], (meta.pages, meta.offsets)
        P = meta.num_prefill_tokens
        if P == 0:
            window = meta.decode_bounds.shape[1]
            latents, q_TNC = self._write_and_query(latents, q_TX, kv_a_TX, meta, rope, window)
            out_TNV = self.attend_decode(q_TNC, latents, meta.decode_tables, meta.decode_bounds)
        else:
            kv_a_TC = kv_a_TX[:, kv_a_TX.shape[1] - self.mla.cache_dim :]
            N, D = w_uk.shape[0], self.mla.nope_dim + self.mla.rope_dim
            q_TND = q_TX[:, : N * D].reshape(-1, N, D)
            latents = write_latent(latents, kv_a_TC, kv_norm.factor, cos, sin, *places, eps=kv_norm.eps)
            out_TNV = self.attend_prefill(q_TND[:P], cos[:P], sin[:P], latents, meta)
            if q_TND.shape[0] > P:
                q_TNC = mla_query(q_TND[P:], w_uk, cos[P:], sin[P:])
                decoded_TNV = self.attend_decode(q_TNC, latents, meta.decode_tables, meta.decode_bounds)
                out_TNV = jnp.concatenate([out_TNV, decoded_TNV])
        return self.project_out(out_TNV), tuple(jax.tree.leaves(latents))

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: RopeTables
    ) -> tuple[Attended, LayerCache]:
        """See `Attention`."""
        cos, sin = rope
        if joins_linears(x_TH, self._input_weights()):
            # What takes long is to read the weights, so queries of all tokens cost no more than those of live ones.
            projected = self.project(x_TH)
            latents, q_TNC = self._write_and_query(from_arrays(cache), *projected, meta, rope, window=1)
            out_RNV = self.attend_decode(q_TNC[live.tokens], latents, live.tables, live.bounds[:, None])
            return self.project_out(out_RNV), tuple(jax.tree.leaves(latents))
        if self.q_lora_rank:
            q_a_RQ = linear(x_TH[live.tokens], self.qkv_a[: self.q_lora_rank])
            q_RND = linear(self.q_norm(q_a_RQ), self.q_b[...])
        else:
            q_RND = linear(x_TH[live.tokens], self.q[...])
        cache = self.write_keys(x_TH, cache, meta, rope)
        q_RNC = mla_query(q_RND, self.w_uk[...], cos[live.tokens], sin[live.tokens])
        out_RNV = self.attend_decode(q_RNC, from_arrays(cache), live.tables, live.bounds[:, None])
        return self.project_out(out_RNV), cache

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: RopeTables) -> LayerCache:
        """See `Attention`."""
        latents = from_arrays(cache)
        cos, sin = rope
        kv_a_TC = linear(x_TH, self.qkv_a[self.q_lora_rank :] if self.q_lora_rank else self.kv_a[...])
        eps, weight = self.kv_norm.eps, self.kv_norm.factor
        latents = write_latent(latents, kv_a_TC, weight, cos, sin, meta.pages, meta.offsets, eps=eps)
        return tuple(jax.tree.leaves(latents))

    def _write_and_query(
        self,
        latents: Latents,
        q_TX: jax.Array,
        kv_a_TX: jax.Array,
        meta: StepMetadata,
        rope: RopeTables,
        window: int,
    ) -> tuple[Latents, jax.Array]:
        """What `project` gives -> the cache with the tokens written, and queries that attend in windows of so many tokens."""
        w_uk, kv_norm, (cos, sin) = self.w_uk[...], self.kv_norm, rope
        rows = head_rows(window, w_uk.shape[0])
        return write_and_query(
            latents,
            kv_a_TX,
            kv_norm.factor,
            q_TX,
            w_uk,
            cos,
            sin,
            meta.pages,
            meta.offsets,
            eps=kv_norm.eps,
            head_rows=rows,
        )

    def _input_weights(self) -> tuple[jax.Array, ...]:
        """Of the linear maps that read what attention reads."""
        return (self.qkv_a[...],) if self.q_lora_rank else (self.q[...], self.kv_a[...])

    def project(self, x_TH: jax.Array, norm: RMSNorm | None = None) -> tuple[jax.Array, jax.Array]:
        """Queries [T, X], not yet rotated, and the raw down-projection [T, X], as matmuls leave them.

        Queries are the first N * (nope + rope) columns of theirs, the down-projection the last latent + rope of its own,
        which may be the same array.
        """
        T, inputs = x_TH.shape
        weights = self._input_weights()
        if joins_linears(x_TH, weights):
            outs: tuple[jax.Array, ...] = (joined_linear(norm(x_TH) if norm else x_TH, weights),)
        else:
            if not self.q_lora_rank and worth_merging(T):
                weights = (jnp.concatenate([weight.reshape(-1, inputs) for weight in weights]),)
            outs = norm.into(x_TH, *weights) if norm else tuple(linear(x_TH, weight) for weight in weights)
        if self.q_lora_rank:
            q_a_TQ, weights = outs[0][:, : self.q_lora_rank], (self.q_b[...],)
            if joins_linears(q_a_TQ, weights):
                return joined_linear(self.q_norm(q_a_TQ), weights), outs[0]
            (q_TND,) = self.q_norm.into(q_a_TQ, *weights)
            return q_TND.reshape(T, -1), outs[0]
        return outs[0].reshape(T, -1), outs[-1]

    def project_out(self, out_TNV: jax.Array) -> Attended:
        """Values of the heads -> what attention adds to the residual stream."""
        if self.mla.output_scale == 1:
            added = linear_to_add(out_TNV, self.o[...])
            return comm.Part(added) if comm.is_split() else added
        return comm.total(jnp.einsum("tnv,hnv->th", out_TNV, self.o[...])) * self.mla.output_scale

    def attend_prefill(
        self, q_PND: jax.Array, cos: jax.Array, sin: jax.Array, latents: Latents, meta: StepMetadata
    ) -> jax.Array:
        """Queries of all prompt tokens, [P, N, nope + rope] as projected -> [P, N, v_dim]."""
        q_nope_PND, q_rope_PNR = jnp.split(q_PND, [self.mla.nope_dim], axis=-1)
        return mla_prefill(
            q_nope_PND,
            apply_rope(q_rope_PNR, cos, sin),
            self.w_uk[...],
            self.w_uv[...],
            latents,
            meta.prefill_tables,
            meta.prefill_rows,
            meta.positions[: q_PND.shape[0]],
            meta.prefill_ends,
            scale=self.mla.softmax_scale,
        )

    def attend_decode(self, q_TNC: jax.Array, latents: Latents, tables: jax.Array, bounds_Dn: jax.Array) -> jax.Array:
        """Absorbed queries [D·n, at least N, latent + rope] of D windows -> [D·n, N, v_dim]."""
        q = q_TNC.reshape(*bounds_Dn.shape, *q_TNC.shape[1:])
        out = mla_decode(
            q, latents, tables, bounds_Dn, self.w_uv[...], scale=self.mla.softmax_scale, value_dim=self.mla.kv_lora_rank
        )
        return out.reshape(-1, *out.shape[2:])


def fp8_without_kernels(model: nnx.Module, dtype: Any) -> set[str]:
    """Operations on FP8 latents that run on plain XLA in steps traced under the current backends, of all layers.

    Args:
        dtype: of activations.

    Raises:
        UnsupportedError: the requested attention backend does not support one.
    """
    sizes = {
        module.mla for _, module in nnx.iter_modules(model) if isinstance(module, MLA) and module.cache_spec.in_fp8
    }
    return set().union(*(_without_kernels(mla, dtype) for mla in sizes))


def _without_kernels(mla: MLASpec, dtype: Any) -> set[str]:
    N, D, L, R, V = mla.num_heads, mla.nope_dim, mla.kv_lora_rank, mla.rope_dim, mla.v_dim
    shapes = {"q": (1, 1, N, L + R), "nope": (1, N, D), "rope": (1, N, R), "uk": (N, D, L), "uv": (N, V, L)}
    shapes |= {"kv_a": (1, L + R), "norm": (L,)}
    cache = tuple(jax.ShapeDtypeStruct((1, PAGE, *a.shape), a.dtype) for a in _fp8_arrays(L, R))
    chosen = {}

    def choose(cache: LayerCache, x: dict[str, jax.Array]) -> None:
        latents = from_arrays(cache)
        chosen["kv_write"] = latent_writer(latents, x["kv_a"], x["norm"])
        chosen["mla_decode"] = decoder(x["q"], latents, L)
        chosen["mla_prefill"] = prefiller(x["nope"], x["rope"], x["uk"], x["uv"], latents)

    jax.eval_shape(choose, cache, {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()})
    return {operation for operation, implementation in chosen.items() if implementation == "reference"}
