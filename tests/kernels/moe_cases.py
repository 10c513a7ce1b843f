"""Routings of published models and of a small one, difficult logits, and the reference's choices for them."""

import dataclasses

import jax
import numpy as np

from pallas_kernels.moe import reference
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS

# Published routings: groups, how many of them stay, whether weights are normalised, and their scale.
PUBLISHED = {"moonlight": (1, 1, True, 2.446), "deepseek-v3": (8, 4, True, 2.5), "deepseek-v2": (8, 3, False, 16.0)}
# Number of experts, and how they are chosen.
ROUTINGS = {name: (LAYERS[name].experts, Routing(LAYERS[name].top_k, *options)) for name, options in PUBLISHED.items()}
ROUTINGS["odd"] = (8, Routing(2, 2, 1, True, 1.0))


def routers(shape: str, T: int, *, sigmoid: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """Logits, among them rows of ties, NaN and infinities if there are tokens enough, and the bias of a sigmoid routing."""
    E, _ = ROUTINGS[shape]
    rng = np.random.default_rng(T)
    logits = rng.normal(size=(T, E)).astype(np.float32)
    odd = [np.full(E, 0.0), np.round(rng.normal(size=E)), np.where(np.arange(E) == 3, np.nan, logits[-1])]
    odd += [np.where(np.arange(E) < E // 2, -np.inf, logits[-1]), np.full(E, np.nan), np.full(E, -np.inf)]
    odd += [np.where(np.arange(E) == E - 1, np.inf, np.round(logits[-1]))]
    for t, row in enumerate(odd[: T - 1]):
        logits[t] = row
    # Equal biases leave ties among the scores.
    bias = np.where(np.arange(E) % 3 == 0, rng.normal(size=E) / 10, -0.5).astype(np.float32)
    return logits, bias if sigmoid else None


def by_reference(logits, bias, routing: Routing) -> tuple[np.ndarray, np.ndarray]:
    """Weights and ids, computed on the CPU in GPU tests too, so that the oracle does not share their device."""
    options = dataclasses.asdict(routing)
    with jax.default_device(jax.devices("cpu")[0]):
        if bias is None:
            chosen = jax.jit(lambda a: reference.route_softmax(a, **options))(logits)
        else:
            chosen = jax.jit(lambda a, b: reference.route_sigmoid(a, b, **options))(logits, bias)
    weights, ids = (np.asarray(a) for a in chosen)
    return weights, ids
