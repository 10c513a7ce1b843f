"""MLPs of quantised weights that every token visits: shared experts, and the MLPs of dense layers.

They run on the kernels of routed experts in the same schemes, as experts that all tokens visit: `fp8_mlp.py` and
`packed_mlp.py`.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.moe import fp8_config, fp8_mlp, packed_codes, packed_mlp
from pallas_kernels.moe.config import M
from pallas_kernels.quant.values import Quantised, Weight, in_schemes


def unsupported_reason(x: jax.Array | jax.ShapeDtypeStruct, gate_up: Weight, down: Weight) -> str | None:
    """Why the kernels do not support this call, or None if they do."""
    return obstacle(gate_up, down) or hopper_unsupported_reason(x.dtype)


def obstacle(gate_up: Weight, down: Weight) -> str | None:
    """Why the kernels do not read an MLP, gate_up [2, I, H] and down [H, I], or None if they do."""
    for schemes, multiple in ((fp8_config.SCHEMES, fp8_config.MULTIPLE), (packed_codes.SCHEMES, M)):
        if in_schemes(schemes, gate_up, down):
            H, inner = down.shape
            fits = H % multiple == inner % multiple == 0
            return None if fits else f"it needs MLPs of sizes that are multiples of {multiple}, not {H} and {inner}"
    stored = (str(weight.scheme) if isinstance(weight, Quantised) else "bfloat16" for weight in (gate_up, down))
    return f"it has no MLPs with weights in {' and '.join(sorted(set(stored)))}"


def mlp_parts(x: jax.Array, gate_up: Weight, down: Weight, *, interpret: Any = False) -> jax.Array:
    """down(silu(gate x) * up x) in parts that have still to be added up: bfloat16 [parts, >= T, H].

    Args:
        x: [T, H]. gate_up: [2, I, H]. down: [H, I]. For them `unsupported_reason` is None.
        interpret: passed to Pallas.
    """
    assert isinstance(gate_up, Quantised)
    assert isinstance(down, Quantised)
    packed = in_schemes(packed_codes.SCHEMES, gate_up, down)
    return (packed_mlp if packed else fp8_mlp).mlp_parts(x, gate_up, down, interpret=interpret)


def mlp(x: jax.Array, gate_up: Weight, down: Weight) -> jax.Array:
    """down(silu(gate x) * up x): [T, H] in x's dtype. Arguments are those of `mlp_parts`."""
    parts = mlp_parts(x, gate_up, down)[:, : x.shape[0]]
    return parts.astype(jnp.float32).sum(axis=0).astype(x.dtype)
