"""Routings of published models and of a small one, difficult logits, and the reference's choices for them.

Also routing and slot tables from one launch and from two, which are compared on a CPU and on a GPU.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from pallas_kernels.moe import reference
from pallas_kernels.moe.dispatch import dispatch_and_copy, dispatch_assigned
from pallas_kernels.moe.dispatch_meet import chunks_of, route_and_place
from pallas_kernels.moe.dispatch_small import Copied, Plan
from pallas_kernels.moe.routing import route_padded
from pallas_kernels.moe.selection import Routing
from pallas_kernels.moe.shapes import LAYERS
from pallas_kernels.moe.slots import SlotTables, max_slots

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


Planned = tuple[jax.Array, SlotTables, jax.Array | None]


def planned_in_one_launch_and_in_two(
    logits: Any,
    bias: Any,
    live: jax.Array,
    x: jax.Array,
    *,
    routing: Routing,
    copies: bool,
    ordered: bool = False,
    interpret: Any = False,
) -> tuple[Planned, Planned]:
    """Weights, tables of slots of 8 rows, and if it `copies` the slots' rows of x, by one kernel and by two."""
    (T, H), E, width = x.shape, logits.shape[-1], routing.width
    slots = max_slots(T, routing.top_k, E, 8, all_tokens=False)
    weights, ids, zero = route_padded(logits, bias, live, routing=routing, interpret=interpret)
    ids_N = ids.reshape(-1, 64)
    if copies:
        two = weights, *dispatch_and_copy(ids_N, x, width, E, 8, slots, ordered=ordered, interpret=interpret)
    else:
        two = weights, dispatch_assigned(ids_N, width, E, 8, slots, all_tokens=False, interpret=interpret), None
    plan = Plan(chunks_of(T, width), E, width, 8, slots, copied=Copied(H, x.dtype, ordered) if copies else None)
    one = route_and_place(logits, bias, live, x, zero, plan, routing=routing, interpret=interpret)
    return one, two


def assert_same_plan(one: Planned, two: Planned, live: jax.Array, k: int) -> None:
    """Bit for bit, but for rows of slots without a token, which no kernel writes."""
    (weights, tables, copied), (want_weights, want, want_copied) = one, two
    np.testing.assert_array_equal(*(np.asarray(a).view(np.int32) for a in (weights, want_weights)))
    assert tables.num_slots.tolist() == want.num_slots.tolist()
    np.testing.assert_array_equal(tables.expert, want.expert)
    np.testing.assert_array_equal(tables.used, want.used)
    np.testing.assert_array_equal(tables.place, want.place)
    assert (copied is None) == (want_copied is None)
    used = np.asarray(want.place)[: len(live)][np.asarray(live), :k].reshape(-1)
    if copied is None:
        np.testing.assert_array_equal(tables.token[used], want.token[used])
    else:
        rows = (np.asarray(a).view(np.int16).reshape(-1, a.shape[-1])[used] for a in (copied, want_copied))
        np.testing.assert_array_equal(*rows)
