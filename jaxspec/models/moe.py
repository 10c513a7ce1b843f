"""The mixture-of-experts block: float32 router, routed experts, shared experts."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec.models.config import MoEConfig
from jaxspec.models.layers import MLP
from jaxspec.models.params import Declare
from pallas_kernels.moe.api import routed_experts


class MoE(nnx.Module):
    """Routed sum plus the shared experts, which are one ungated MLP of their joint width."""

    def __init__(self, hidden: int, config: MoEConfig, declare: Declare):
        E, inner = config.num_experts, config.expert_dim
        self.config = config
        # bf16 logits flip the chosen experts of some tokens, so the router is float32 throughout.
        self.router = declare((E, hidden), (None, None), dtype=jnp.float32)
        if config.scoring == "sigmoid":
            self.router_bias = declare((E,), (None,), "zeros", dtype=jnp.float32)
        self.gate_up = declare((E, 2, inner, hidden), ("experts", None, None, None))
        self.down = declare((E, hidden, inner), ("experts", None, None))
        if config.num_shared:
            self.shared = MLP(hidden, inner * config.num_shared, declare)

    def __call__(self, x_TH: jax.Array, logits_TE: jax.Array, live_T: jax.Array, residual_TH: jax.Array) -> jax.Array:
        """[T, H], with float32 logits of the router for it, -> [T, H], added to the residual."""
        c = self.config
        bias_E = self.router_bias[...] if c.scoring == "sigmoid" else None
        shared = (self.shared.gate_up[...], self.shared.down[...]) if c.num_shared else None
        return routed_experts(
            x_TH, self.gate_up[...], self.down[...], logits_TE, bias_E, live_T, shared, residual_TH, top_k=c.top_k,
            num_groups=c.num_groups, top_groups=c.top_groups, normalize=c.normalize, scale=c.scale,
        )  # fmt: skip
