"""Grouped-query attention (arXiv 2305.13245) over paged keys and values."""

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import comm
from jaxspec.models.cache import CacheArray, CacheSpec, LayerCache
from jaxspec.models.config import RopeConfig
from jaxspec.models.keymap import KeyMap, ParamPath, Piece, nested, norm_weight
from jaxspec.models.layers import Attended, RMSNorm, RopeTables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare, fits
from pallas_kernels.gqa_decode.api import gqa_decode
from pallas_kernels.gqa_prefill.api import gqa_prefill
from pallas_kernels.gqa_write.api import write_heads
from pallas_kernels.gqa_write.reference import HeadNorms, place
from pallas_kernels.kv_write.api import write_kv
from pallas_kernels.norm_linear.api import joined_linear, joins_linears, linear_to_add
from pallas_kernels.norm_linear.reference import whole
from pallas_kernels.quant.reference import linear


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention.

    Attributes:
        rope: of the first `rope.dim` columns of a head; the others pass.
        qk_norm: an RMS norm of queries and keys before they are rotated, with `norm_eps`: over each "head" (Qwen3), or
            over all heads together, "whole" (MiniMax-M2).
        bias, out_bias: whether queries, keys and values, and the output, have biases.
        window: a token sees so many keys, its own included, and none before them; None: all before it.
        sinks: a learned score of each head takes part in the softmax, and nothing is read for it.
        gated: each column of a head is multiplied by the sigmoid of a column of its own; checkpoints store both in `q_proj`,
            head by head.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    softmax_scale: float
    rope: RopeConfig
    qk_norm: Literal["head", "whole"] | None = None
    norm_eps: float = 1e-6
    bias: bool = False
    out_bias: bool = False
    window: int | None = None
    sinks: bool = False
    gated: bool = False

    @property
    def norm_dims(self) -> dict[str, int]:
        """The norms of queries and keys, and how many columns each spans; none without them."""
        if self.qk_norm is None:
            return {}
        heads, kv_heads = (self.num_heads, self.num_kv_heads) if self.qk_norm == "whole" else (1, 1)
        return {"q_norm": heads * self.head_dim, "k_norm": kv_heads * self.head_dim}

    def build(self, hidden: int, declare: Declare, *, input_dim: int | None = None) -> "GQA":
        return GQA(hidden, self, declare, input_dim=input_dim)

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        K, D, inputs = self.num_kv_heads, self.head_dim, input_dim or hidden
        G = self.num_heads // K
        queries = f"{prefix}q_proj.weight"
        q = Piece(queries, (K * G * D, inputs), (slice(None), slice(0, G)), view=(K, G, D, inputs))
        if self.gated:
            both = replace(q, shape=(2 * K * G * D, inputs), view=(K, G, 2, D, inputs))
            q, gate = (replace(both, take=(slice(None), slice(None), i)) for i in range(2))
        out: KeyMap = {
            ("qkv",): (
                q,
                Piece(f"{prefix}k_proj.weight", (K * D, inputs), (slice(None), G), view=(K, D, inputs)),
                Piece(f"{prefix}v_proj.weight", (K * D, inputs), (slice(None), G + 1), view=(K, D, inputs)),
            ),
            ("o",): (Piece(f"{prefix}o_proj.weight", (hidden, K * G * D), view=(hidden, K, G, D)),),
        }
        if self.gated:
            out["gate",] = (replace(gate, at=...),)
        if self.bias:
            out["qkv_bias",] = (
                Piece(f"{prefix}q_proj.bias", (K * G * D,), (slice(None), slice(0, G)), view=(K, G, D)),
                Piece(f"{prefix}k_proj.bias", (K * D,), (slice(None), G), view=(K, D)),
                Piece(f"{prefix}v_proj.bias", (K * D,), (slice(None), G + 1), view=(K, D)),
            )
        if self.out_bias:
            out["o_bias",] = (Piece(f"{prefix}o_proj.bias", (hidden,)),)
        if self.sinks:
            out["sinks",] = (Piece(f"{prefix}sinks", (K * G,), view=(K, G)),)
        return out | nested({name: norm_weight(f"{prefix}{name}", dim) for name, dim in self.norm_dims.items()})


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
        # A norm over all keys together needs each of them once.
        spreads = 1 if spec.qk_norm == "whole" else spec.num_heads
        self.qkv = declare((K, G + 2, D, input_dim or hidden), ("kv_heads", None, None, None), spreads=spreads)
        if spec.bias:
            self.qkv_bias = declare((K, G + 2, D), ("kv_heads", None, None), "zeros", spreads=spreads)
        for name, dim in spec.norm_dims.items():
            setattr(self, name, RMSNorm(dim, spec.norm_eps, declare))
        self.o = declare((hidden, K, G, D), (None, "kv_heads", None, None), spreads=spreads)
        if spec.out_bias:
            self.o_bias = declare((hidden,), (None,), "zeros")
        if spec.gated:
            self.gate = declare((K, G, D, input_dim or hidden), ("kv_heads", None, None, None), spreads=spreads)
        if spec.sinks:
            self.sinks = declare((K, G), ("kv_heads", None), "zeros", dtype=jnp.float32, spreads=spreads)

    def __call__(
        self,
        x_TH: jax.Array,
        cache: LayerCache,
        meta: StepMetadata,
        rope: RopeTables,
        norm: RMSNorm | None = None,
    ) -> tuple[Attended, LayerCache]:
        """Writes the T new keys and values, then attends.

        [T, input_dim], `norm` of it if given, -> [T, H] and the new cache.
        """
        weights = (self.qkv[...], *([self.gate[...]] if self.spec.gated else []))
        # XLA would need kernels to take apart what several weights give.
        if len(weights) == 1 and joins_linears(x_TH, weights):
            qkv_TX = joined_linear(norm(x_TH) if norm else x_TH, weights)
            qkv_TKxD, gate = qkv_TX.reshape(-1, *self.qkv.shape[:-1]), []
        else:
            qkv_TKxD, *gate = norm.into(x_TH, *weights) if norm else (linear(x_TH, weight) for weight in weights)
        bias = self.qkv_bias[...] if self.spec.bias else None
        norms = None
        if self.spec.qk_norm:
            biased_TKxD = qkv_TKxD if bias is None else qkv_TKxD + bias
            q, q_square_T = self._norm("q_norm", biased_TKxD[:, :, :-2])
            k, k_square_T = self._norm("k_norm", biased_TKxD[:, :, -2])
            norms = HeadNorms(q, k, q_square_T, k_square_T)
        (keys, values), (cos, sin) = cache, rope
        keys, values, q_TKGD = write_heads(
            keys, values, qkv_TKxD, bias, norms, cos, sin, meta.pages, meta.offsets, eps=self.spec.norm_eps
        )

        P = meta.num_prefill_tokens
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
                    **self._softmax(),
                )
            )
        if meta.decode_bounds.shape[0]:
            q = q_TKGD[P:].reshape(*meta.decode_bounds.shape, *q_TKGD.shape[1:])
            out = gqa_decode(q, keys, values, meta.decode_tables, meta.decode_bounds, **self._softmax())
            parts.append(out.reshape(-1, *q_TKGD.shape[1:]))
        return self._output(jnp.concatenate(parts), *gate), (keys, values)

    def catch_up(
        self, x_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata, rope: RopeTables
    ) -> tuple[Attended, LayerCache]:
        """See `Attention`."""
        x_RH = x_TH[live.tokens]
        q_RKGD = linear(x_RH, self.qkv[...][:, :-2])
        gate = [linear(x_RH, self.gate[...])] if self.spec.gated else []
        if self.spec.bias:
            q_RKGD += self.qkv_bias[...][:, :-2]
        cos, sin = rope
        q_RKGD = self._place("q_norm", q_RKGD, (cos[live.tokens], sin[live.tokens]))
        keys, values = self.write_keys(x_TH, cache, meta, rope)
        out = gqa_decode(q_RKGD[:, None], keys, values, live.tables, live.bounds[:, None], **self._softmax())
        return self._output(out[:, 0], *gate), (keys, values)

    def write_keys(self, x_TH: jax.Array, cache: LayerCache, meta: StepMetadata, rope: RopeTables) -> LayerCache:
        """See `Attention`."""
        kv_TK2D = linear(x_TH, self.qkv[...][:, -2:])
        if self.spec.bias:
            kv_TK2D += self.qkv_bias[...][:, -2:]
        k_TKD, v_TKD = self._place("k_norm", kv_TK2D[:, :, 0], rope), kv_TK2D[:, :, 1]
        keys, values = cache
        return write_kv(keys, values, k_TKD, v_TKD, meta.pages, meta.offsets)

    def _place(self, name: str, x: jax.Array, rope: RopeTables) -> jax.Array:
        """Queries [T, K, G, D] or keys [T, K, D], normed and rotated."""
        factor, square_T = self._norm(name, x) if self.spec.qk_norm else (None, None)
        return place(x, factor, square_T, *rope, self.spec.norm_eps)

    def _norm(self, name: str, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """What `HeadNorms` has for queries or for keys."""
        norm: RMSNorm = getattr(self, name)
        if self.spec.qk_norm == "head":
            return norm.factor, None
        return norm.of_heads(x)

    def _softmax(self) -> dict[str, Any]:
        """How the kernels weigh keys."""
        spec = self.spec
        sinks = self.sinks[...] if spec.sinks else None
        return {"scale": spec.softmax_scale, "window": spec.window, "sinks": sinks}

    def _output(self, attended_TKGD: jax.Array, gate_TKGD: jax.Array | None = None) -> Attended:
        if gate_TKGD is not None:
            attended_TKGD = attended_TKGD * jax.nn.sigmoid(gate_TKGD)
        added = linear_to_add(attended_TKGD, self.o[...])
        if self.spec.out_bias:
            return comm.total(whole(added)) + self.o_bias[...]
        return comm.Part(added) if comm.is_split() else added


@dataclass(frozen=True)
class Spread:
    """Makes a parameter of `GQA` one for more key heads: each is there several times, for some of its queries each time.

    Those of equal layers are equal: they need one executable.
    """

    name: str
    kv_heads: int

    def __call__(self, weight: jax.Array) -> jax.Array:
        if self.name == "o":
            return weight.reshape(weight.shape[0], self.kv_heads, -1, weight.shape[-1])
        keys = [weight[:, -2:]] if self.name in ("qkv", "qkv_bias") else []
        queries = weight[:, : weight.shape[1] - 2 * len(keys)]
        queries = queries.reshape(self.kv_heads, -1, *weight.shape[2:])
        return jnp.concatenate([queries, *(jnp.repeat(kv, self.kv_heads // len(kv), axis=0) for kv in keys)], axis=1)


def spread_heads(model: nnx.Module, devices: int) -> dict[ParamPath, Spread]:
    """Gives layers with fewer key heads than devices one for each device: devices then share keys, and split queries.

    Layers that cannot be spread so stay as they are, and `with_shardings` refuses them.

    Returns:
        By path of the parameters whose shape has changed: what makes it of the one that checkpoints have.
    """
    changed: dict[ParamPath, Spread] = {}
    modules: list[tuple[Any, nnx.Module]] = list(nnx.iter_modules(model))
    for at, module in modules:
        if not isinstance(module, GQA) or devices <= (K := module.spec.num_kv_heads):
            continue
        names = [name for name in ("qkv", "qkv_bias", "o", "gate", "sinks") if hasattr(module, name)]
        if not fits(devices, K, spreads=module.qkv.get_metadata()["spreads"]):
            continue
        for name in names:
            variable: nnx.Param = getattr(module, name)
            function = Spread(name, devices)
            before = variable.get_value()
            value = jax.eval_shape(function, before)
            setattr(module, name, nnx.Param(value, **variable.get_metadata(), unspread=before.shape))
            changed[*at, name] = function
        module.spec = replace(module.spec, num_kv_heads=devices)
        arrays = tuple(replace(array, shape=(devices, *array.shape[1:])) for array in module.cache_spec.arrays)
        module.cache_spec = CacheSpec(arrays)
    return changed
