"""How many experts decode steps really reach."""

import statistics
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from bench.harness.models import Weights
from bench.step.load import Load
from jaxspec.compile_cache import open_store
from jaxspec.engine.runner import Runner


def touched_experts(load: Load, weights: Weights, mesh: Mesh, rows: Sequence[int]) -> dict[int, float]:
    """Distinct experts that a step's live rows reach, mean over the layers.

    Counted with an executable of its own, which also returns what the routers chose, from the load's state.
    """
    load.rewind()
    bucket = load.bucket(max(rows))
    runner = Runner(
        weights.model, weights.params, load.engine.settings, mesh, buckets=(bucket,), probe=True, files=open_store(None)
    )
    runner.warm_up()
    runner.state = load.runner.state
    counts = {}
    for n in rows:
        load.select(n)
        plan = load.plan()
        runner.dispatch(plan)
        output = runner.read()
        for request, token in zip(plan.decode, output.ids[:, 0], strict=True):
            request.tokens.append(int(token))
        assert output.probe is not None
        counts[n] = statistics.mean(len(np.unique(ids_Tk[:n])) for ids_Tk in output.probe.experts)
    load.runner.state = runner.state
    return counts
