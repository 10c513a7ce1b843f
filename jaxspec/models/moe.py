"""The mixture-of-experts block: float32 router, routed experts, shared experts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxspec import comm
from jaxspec.models.keymap import KeyMap, Piece
from jaxspec.models.layers import MLP, Attended, DenseSpec, RMSNorm, Stream
from jaxspec.models.params import Declare, QuantisedParam, declared
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.moe.api import (
    add_routed_experts,
    experts,
    experts_obstacle,
    logit_parts,
    mlp,
    route_sigmoid,
    route_softmax,
    routed_experts,
    splits_router,
)
from pallas_kernels.moe.weights import ExpertWeights


@dataclass(frozen=True)
class MoESpec:
    """Routed experts (DeepSeek-V3, arXiv 2412.19437 section 2.1.2; V2, arXiv 2405.04434 section 2.2).

    Attributes:
        scoring: "sigmoid" selects with a learned bias and scores a group by its best two experts; "softmax" selects
            without a bias and scores a group by its best expert.
        num_shared: shared experts, each as wide as a routed one; they are one ungated MLP of their joint width.
        biases: of the router's logits, before they are scored, and of the experts' linear maps.
        clamp: how an expert joins gate and up, where it is not SwiGLU.
    """

    num_experts: int
    top_k: int
    expert_dim: int
    num_shared: int
    scoring: Literal["sigmoid", "softmax"]
    num_groups: int = 1
    top_groups: int = 1
    normalize: bool = False
    scale: float = 1.0
    biases: bool = False
    clamp: Clamp | None = None

    @property
    def shared(self) -> DenseSpec | None:
        return DenseSpec(self.expert_dim * self.num_shared) if self.num_shared else None

    def build(self, hidden: int, declare: Declare) -> "MoE":
        return MoE(hidden, self, declare)

    def key_map(self, prefix: str, hidden: int) -> KeyMap:
        E, inner = self.num_experts, self.expert_dim
        out: KeyMap = {
            ("router",): (Piece(f"{prefix}gate.weight", (E, hidden)),),
            ("gate_up",): tuple(
                Piece(f"{prefix}experts.{e}.{half}_proj.weight", (inner, hidden), (e, i))
                for e in range(E)
                for i, half in enumerate(("gate", "up"))
            ),
            ("down",): tuple(Piece(f"{prefix}experts.{e}.down_proj.weight", (hidden, inner), e) for e in range(E)),
        }
        if self.scoring == "sigmoid":
            out["router_bias",] = (Piece(f"{prefix}gate.e_score_correction_bias", (E,)),)
        if self.shared:
            shared = self.shared.key_map(f"{prefix}shared_experts.", hidden)
            out |= {("shared", *path): pieces for path, pieces in shared.items()}
        return out


class Logits(NamedTuple):
    """What a router gives.

    Attributes:
        values: float32 [T, E], or their `logit_parts`.
        zero: int32 [1] for the experts' kernel, where the kernel before it makes one: see `routed_experts`.
    """

    values: jax.Array
    zero: jax.Array | None = None


class MoE(nnx.Module):
    """Routed sum plus the shared experts."""

    def __init__(self, hidden: int, spec: MoESpec, declare: Declare):
        E, inner = spec.num_experts, spec.expert_dim
        self.spec = spec
        # bf16 logits flip the chosen experts of some tokens, so the router is float32 throughout.
        self.router = declare((E, hidden), (None, None), dtype=jnp.float32)
        if spec.scoring == "sigmoid":
            self.router_bias = declare((E,), (None,), "zeros", dtype=jnp.float32)
        self.gate_up = declare((E, 2, inner, hidden), ("experts", None, None, None), quantisable=True)
        self.down = declare((E, hidden, inner), ("experts", None, None), quantisable=True)
        if spec.biases:
            self.logit_bias = declare((E,), (None,), "zeros", dtype=jnp.float32)
            self.gate_up_bias = declare((E, 2, inner), ("experts", None, None), "zeros")
            self.down_bias = declare((E, hidden), ("experts", None), "zeros")
        if spec.shared:
            self.shared: MLP = spec.shared.build(hidden, declare)

    @property
    def num_experts(self) -> int:
        """See `ResidualMLP`."""
        return self.spec.num_experts

    def add_to(
        self,
        x_TH: jax.Array,
        attended: Attended,
        norm: RMSNorm,
        live_T: jax.Array,
        following: RMSNorm | None = None,
    ) -> Stream:
        """See `ResidualMLP`. Padding tokens are routed to no expert."""
        return self.add_experts(*self.logits(x_TH, attended, norm), live_T, following)

    def add_experts(
        self,
        x_TH: jax.Array,
        normed_TH: jax.Array,
        logits: Logits,
        live_T: jax.Array,
        following: RMSNorm | None = None,
    ) -> Stream:
        """x and what the experts that `logits` names make of its norm."""
        spec = self.spec
        bias_E = self.router_bias[...] if spec.scoring == "sigmoid" else None
        parameters = self._parameters(lambda weight: weight[...])
        if comm.has_ranks():
            shared = parameters.shared
            routed = replace(parameters, shared=None, first=comm.first_expert(parameters.down.shape[0]))
            out_AH = self._of_all_ranks(normed_TH, routed, logits.values, live_T)
            beside_TH = None if shared is None else mlp(normed_TH, *shared)
            if following is not None and not comm.is_split():
                added = comm.add_total_of_own_rows(x_TH, out_AH, beside_TH, following.factor, following.eps)
                return Stream(*added)
            out_TH = comm.total_of_own_rows(out_AH)
            return Stream(x_TH + comm.total(out_TH if beside_TH is None else out_TH + beside_TH))
        if comm.is_split():
            parameters = replace(parameters, first=comm.first(parameters.down.shape[0]))
            out_TH = routed_experts(normed_TH, parameters, logits.values, bias_E, live_T, **self._routing())
            if following is None:
                return Stream(x_TH + comm.total(out_TH))
            return Stream(*comm.add_total(x_TH, out_TH, following.factor, following.eps))
        norm_after = (following.factor, following.eps) if following else None
        arguments = x_TH, normed_TH, parameters, logits.values, bias_E, live_T, norm_after, logits.zero
        return Stream(*add_routed_experts(*arguments, **self._routing()))

    def _of_all_ranks(
        self, x_TH: jax.Array, parameters: ExpertWeights, logits: jax.Array, live_T: jax.Array
    ) -> jax.Array:
        """What this device's experts give the tokens of all ranks: [A, H], a part of the sum over devices.

        A token's experts are chosen on its own rank.
        """
        E, K = self.spec.num_experts, self.spec.top_k
        weights_TK, ids_TK = self._route(logits, x_TH.shape[0])
        # No expert has the id E. So the others know which tokens are padding.
        ids_TK = jnp.where(live_T[:, None], ids_TK, E)
        numbers_TN = jnp.concatenate([lax.bitcast_convert_type(weights_TK, jnp.int32), ids_TK], axis=1)
        # Rows as long as kernels that tell them want them.
        numbers_TN = jnp.pad(numbers_TN, ((0, 0), (0, -2 * K % 128)))
        x_AH, numbers_AN = comm.rows_of_all_ranks(x_TH, numbers_TN)
        weights_AK, ids_AK = lax.bitcast_convert_type(numbers_AN[:, :K], jnp.float32), numbers_AN[:, K : 2 * K]
        return experts(x_AH, parameters, weights_AK, ids_AK, ids_AK[:, 0] < E)

    def _route(self, logits: jax.Array, T: int) -> tuple[jax.Array, jax.Array]:
        """Weights float32 and ids int32 [T, top_k] of what `logits` gives."""
        if self.spec.scoring == "sigmoid":
            weights, ids = route_sigmoid(logits, self.router_bias[...], **self._routing())
        else:
            weights, ids = route_softmax(logits, **self._routing())
        return weights[:T], ids[:T]

    def kernel_obstacle(self, dtype: Any, mesh_sizes: Mapping[str, int]) -> str | None:
        """See `MLP`."""
        return experts_obstacle(dtype, self._parameters(lambda weight: declared(weight, mesh_sizes)))

    def _parameters(self, read: Callable[[nnx.Param | QuantisedParam], Any]) -> ExpertWeights:
        """All that the kernels are given, as `read` gives it."""
        return ExpertWeights(
            read(self.gate_up),
            read(self.down),
            shared=(read(self.shared.gate_up), read(self.shared.down)) if self.spec.shared else None,
            biases=(read(self.gate_up_bias), read(self.down_bias)) if self.spec.biases else None,
            clamp=self.spec.clamp,
        )

    def chosen_experts(self, x_TH: jax.Array, attended: Attended, norm: RMSNorm) -> jax.Array:
        """See `ResidualMLP`."""
        _, _, logits = self.logits(x_TH, attended, norm)
        return self._route(logits.values, x_TH.shape[0])[1]

    def logits(self, x_TH: jax.Array, attended: Attended, norm: RMSNorm) -> tuple[jax.Array, jax.Array, Logits]:
        """x + attended, its norm, and the router's logits."""
        if not self.spec.biases and splits_router(x_TH, self.router[...]):
            x_TH, normed_TH, _ = norm.add_into(x_TH, attended)
            return x_TH, normed_TH, Logits(*logit_parts(normed_TH, self.router[...]))
        x_TH, normed_TH, logits_TE, zero = norm.add_into_and_zero(x_TH, attended, self.router[...])
        return x_TH, normed_TH, Logits(logits_TE + self.logit_bias[...] if self.spec.biases else logits_TE, zero)

    def _routing(self) -> dict[str, Any]:
        spec = self.spec
        return {
            "top_k": spec.top_k, "num_groups": spec.num_groups, "top_groups": spec.top_groups,
            "normalize": spec.normalize, "scale": spec.scale,
        }  # fmt: skip
