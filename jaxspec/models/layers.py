"""Layers that every architecture shares: norms, linear maps, rotary embedding, the dense MLP."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec import comm
from jaxspec.models.config import RopeConfig
from jaxspec.models.keymap import KeyMap, Piece
from jaxspec.models.params import Declare, declared
from pallas_kernels.moe.api import mlp, mlp_obstacle, mlp_to_add
from pallas_kernels.norm_linear.api import needs_separate_weights, norm_linear, norm_linear_and_zero, norms_apart
from pallas_kernels.norm_linear.reference import factor_of, project, rms_norm, whole

# cos and sin of rotary embeddings, float32 [T, dim / 2] each.
RopeTables = tuple[jax.Array, jax.Array]

# What attention adds to the residual stream: [T, H]; parts [parts, T, H] of it, see `norm_linear.api.linear_to_add`; or such of
# one device.
Attended = jax.Array | comm.Part

# Up to this many tokens projections that share an input are one matmul, for which XLA reads the weights as if they were
# one array; with more it would copy them together in every step.
MOST_MERGED_TOKENS = 128


def worth_merging(T: int) -> bool:
    """Whether the weights that T tokens go through are better put together."""
    return T <= MOST_MERGED_TOKENS and not needs_separate_weights(T)


class RMSNorm(nnx.Module):
    """Root mean square norm, rounded to the input's dtype before the weight as in Hugging Face's T5-style norms.

    Where norms are centred the weight is what a factor has over 1. The factor is float32, so nothing is rounded before it.
    """

    def __init__(self, dim: int, eps: float, declare: Declare):
        self.eps = eps
        self.centred = declare.centred_norms
        self.weight = declare((dim,), (None,), "zeros" if self.centred else "ones")

    @property
    def factor(self) -> jax.Array:
        """[dim] of the normed columns."""
        return factor_of(self.weight[...], centred=self.centred)

    def __call__(self, x: jax.Array) -> jax.Array:  # [..., dim] -> [..., dim]
        return rms_norm(x, self.factor, self.eps)

    def of_heads(self, x: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """Of this device's heads [T, *heads]: their factors [*heads], and the mean [T] of the squares of all devices' heads.

        No mean where this device has all heads: see `HeadNorms`.
        """
        _, *heads = x.shape
        if not comm.is_split():
            return self.factor.reshape(heads), None
        squares_T1 = comm.total(jnp.square(x.astype(jnp.float32)).sum(axis=range(1, x.ndim))[:, None])
        factor = comm.own(self.factor, math.prod(heads), axis=0)
        return factor.reshape(heads), squares_T1[:, 0] / self.weight[...].size

    def into(self, x_TH: jax.Array, *weights: jax.Array) -> tuple[jax.Array, ...]:
        """The linear maps of the norm: [T, dim] with weights [*out, dim] -> [T, *out] each."""
        return self.norm_linear(x_TH, weights)[2]

    def add_into(
        self, x_TH: jax.Array, delta: Attended, *weights: jax.Array
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """x + delta, its norm, and the linear maps of the norm."""
        if not isinstance(delta, comm.Part):
            return self.norm_linear(x_TH, weights, delta)
        x_TH, normed_TH = comm.add_total(x_TH, delta.array, self.factor, self.eps)
        if normed_TH is None:
            return self.norm_linear(x_TH, weights)
        return x_TH, normed_TH, project(normed_TH, weights)

    def add_into_and_zero(
        self, x_TH: jax.Array, delta: Attended, weight: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
        """As `add_into` of one weight, and a 0 for a kernel, if there is one: see `norm_linear_and_zero`."""
        if isinstance(delta, comm.Part):
            x_TH, normed_TH, (out,) = self.add_into(x_TH, delta, weight)
            return x_TH, normed_TH, out, None
        options: dict[str, Any] = {"eps": self.eps, "delta": delta, "centred": self.centred}
        x_TH, normed_TH, (out,), zero = norm_linear_and_zero(x_TH, self.weight[...], (weight,), **options)
        return x_TH, normed_TH, out, zero

    def norm_linear(
        self, x_TH: jax.Array, weights: tuple[jax.Array, ...] = (), delta: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]:
        """See `norm_linear.api.norm_linear`."""
        return norm_linear(x_TH, self.weight[...], weights, eps=self.eps, delta=delta, centred=self.centred)


def added(attended: Attended) -> jax.Array:
    """What it adds, [T, H]."""
    return comm.total(whole(attended.array)) if isinstance(attended, comm.Part) else whole(attended)


class Stream(NamedTuple):
    """The residual stream [T, H] between blocks, and its norm for what follows, where its writer made that too."""

    x: jax.Array
    normed: jax.Array | None = None

    def norm(self, following: RMSNorm) -> jax.Array:
        """The norm that follows, [T, H]."""
        if self.normed is not None:
            return self.normed
        return following.norm_linear(self.x)[1]


class ResidualMLP(Protocol):
    """The interface of an MLP module at the end of a block."""

    @property
    def num_experts(self) -> int:
        """Routed ones; 0 where there are none."""
        ...

    def add_to(
        self,
        x_TH: jax.Array,
        attended: Attended,
        norm: RMSNorm,
        live_T: jax.Array,
        following: RMSNorm | None = None,
    ) -> Stream:
        """The residual stream after the block: x + attended, and the MLP of its norm added.

        Args:
            live_T: as in `StepMetadata`; rows of other tokens must be finite, and nobody reads them.
            following: the norm that the stream is read through next, if by one only.
        """
        ...

    def chosen_experts(self, x_TH: jax.Array, attended: Attended, norm: RMSNorm) -> jax.Array | None:
        """The routed experts that `add_to` sends each token to, int32 [T, top_k]; None where there are none."""
        ...


@dataclass(frozen=True)
class DenseSpec:
    """A SwiGLU MLP of `inner` columns, its result times `scale`."""

    inner: int
    scale: float = 1.0

    def build(self, hidden: int, declare: Declare) -> "MLP":
        return MLP(hidden, self.inner, declare, scale=self.scale)

    def key_map(self, prefix: str, hidden: int) -> KeyMap:
        return {
            ("gate_up",): (
                Piece(f"{prefix}gate_proj.weight", (self.inner, hidden), 0),
                Piece(f"{prefix}up_proj.weight", (self.inner, hidden), 1),
            ),
            ("down",): (Piece(f"{prefix}down_proj.weight", (hidden, self.inner)),),
        }


class MLP(nnx.Module):
    """SwiGLU: down(silu(gate x) * up x) * scale."""

    num_experts = 0

    def __init__(self, hidden: int, inner: int, declare: Declare, *, scale: float = 1.0):
        self.scale = scale
        self.gate_up = declare((2, inner, hidden), (None, "mlp", None), quantisable=True)
        self.down = declare((hidden, inner), (None, "mlp"), quantisable=True)

    def __call__(self, x_TH: jax.Array) -> jax.Array:
        out_TH = comm.total(mlp(x_TH, self.gate_up[...], self.down[...]))
        return out_TH if self.scale == 1 else out_TH * self.scale

    def kernel_obstacle(self, dtype: Any, mesh_sizes: Mapping[str, int]) -> str | None:
        """Why no kernel here reads these weights, or None if one does. Arguments are those of `kernel_obstacles`."""
        return mlp_obstacle(dtype, declared(self.gate_up, mesh_sizes), declared(self.down, mesh_sizes))

    def add_to(
        self,
        x_TH: jax.Array,
        attended: Attended,
        norm: RMSNorm,
        live_T: jax.Array,  # noqa: ARG002
        following: RMSNorm | None = None,
    ) -> Stream:
        """See `ResidualMLP`."""
        if not isinstance(attended, comm.Part):
            if following is not None and self.scale == 1 and not comm.is_split() and norms_apart(x_TH.shape[0]):
                x_TH, normed_TH, _ = norm.add_into(x_TH, attended)
                delta = mlp_to_add(normed_TH, self.gate_up[...], self.down[...])
                return Stream(*following.norm_linear(x_TH, delta=delta)[:2])
            x_TH = x_TH + whole(attended)
            return Stream(x_TH + self(norm(x_TH)))
        x_TH, normed_TH, _ = norm.add_into(x_TH, attended)
        if following is None or self.scale != 1:
            return Stream(x_TH + self(normed_TH))
        part_TH = mlp(normed_TH, self.gate_up[...], self.down[...])
        return Stream(*comm.add_total(x_TH, part_TH, following.factor, following.eps))

    def chosen_experts(self, x_TH: jax.Array, attended: Attended, norm: RMSNorm) -> None:
        """See `ResidualMLP`."""


def rope_frequencies(config: RopeConfig) -> tuple[np.ndarray, float]:
    """Inverse frequencies float32 [dim / 2] and the factor on cos and sin.

    Sources: RoPE arXiv 2104.09864; YaRN arXiv 2309.00071 with DeepSeek's mscale (modeling_deepseek.py);
    Llama 3.1's rescaling as in transformers' modeling_rope_utils.py.
    """
    d, base = config.dim, config.theta
    inv = 1.0 / base ** (np.arange(0, d, 2, dtype=np.float32) / d)
    if config.kind == "none":
        inv = np.zeros_like(inv)
    elif config.kind == "linear":
        inv = inv / config.factor
    elif config.kind == "longrope":
        return (inv / np.array(config.factors, np.float32)).astype(np.float32), config.attention_factor or 1.0
    elif config.kind == "llama3":
        length = config.original_max_position
        wavelength = 2 * math.pi / inv
        smooth = (length / wavelength - config.low_freq_factor) / (config.high_freq_factor - config.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        inv = (1 - smooth) * inv / config.factor + smooth * inv
    elif config.kind == "yarn":

        def turns_at(n: float) -> float:  # the dimension that makes n turns over the original context
            return d * math.log(config.original_max_position / (n * 2 * math.pi)) / (2 * math.log(base))

        low, high = turns_at(config.beta_fast), turns_at(config.beta_slow)
        if config.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, d - 1)
        high += 0.001 if low == high else 0.0
        ramp = np.clip((np.arange(d // 2, dtype=np.float32) - low) / (high - low), 0, 1)
        inv = inv * (1 - ramp) + inv / config.factor * ramp
        return inv.astype(np.float32), _yarn_attention_factor(config)
    return inv.astype(np.float32), 1.0


def yarn_mscale(factor: float, mscale: float) -> float:
    """YaRN's attention temperature, as in the DeepSeek model files."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.attention_factor is not None:
        return config.attention_factor
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def rope_tables(config: RopeConfig, positions_T: jax.Array) -> RopeTables:
    """Of int32 positions [T]."""
    inv, factor = rope_frequencies(config)
    angles = positions_T.astype(jnp.float32)[:, None] * inv
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor
