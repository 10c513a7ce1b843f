"""Both matmuls of the experts in one kernel, on the GPU."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.moe import api
from pallas_kernels.moe.config import configure
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.weights import ExpertWeights
from tests.gpu.moe_layers import SHAPES, layer, shared_experts
from tests.kernels.moe_cases import ROUTINGS

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("T", [9, 32, 128])
@pytest.mark.parametrize(
    ("shape", "shared_inner"), [("moonlight", 0), ("moonlight", 2 * 1408), ("minimax-m2", 0), ("odd", 448)]
)
def test_both_matmuls_in_one_kernel(shape, shared_inner, T):
    """Bit for bit what two kernels give, in each of many layers that run one after another."""
    H, E, k, _ = SHAPES[shape]
    shared = shared_experts(shape, shared_inner) if shared_inner else None
    parameters, live = ExpertWeights(*layer(shape), shared), jnp.arange(T) % 5 != 4
    routing = ROUTINGS[shape][1] if shape in ROUTINGS else Routing(k, 1, 1, True, 1.0)
    keys = jax.random.split(jax.random.key(T), 16)
    logits = jnp.stack([jax.random.normal(key, (T, E), jnp.float32) for key in keys])
    x = jnp.stack([jax.random.normal(key, (T, H), jnp.bfloat16) for key in keys])
    results = []
    for together in (False, True):
        jax.clear_caches()
        with use(Backends(moe="mosaic")), tuning.use(dataclasses.replace(tuning.current(), experts_together=together)):
            # 320 columns are no two blocks of rows.
            assert configure(T, E, k, H, parameters.gate_up.shape[2]).together == (together and shape != "odd")
            options = dataclasses.asdict(routing)
            run = jax.jit(
                lambda x, logits, options=options: [
                    api.routed_experts(each, parameters, of_each, None, live, **options)
                    for each, of_each in zip(x, logits, strict=True)
                ]
            )
            for _ in range(5):  # from the second or third on a recorded graph's
                results.append([np.asarray(each, np.float32) for each in run(x, logits)])
    for result in results[1:]:
        np.testing.assert_array_equal(np.stack(result), np.stack(results[0]))
