"""How many experts decode steps really reach."""

import statistics
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from bench.harness.models import Weights
from bench.step.load import Load
from jaxspec.compile_cache import open_store
from jaxspec.engine.runner import Runner


def touched_experts(load: Load, weights: Weights, mesh: Mesh, rows: Sequence[int], steps: int) -> dict[int, float]:
    """Distinct experts that a step's live rows reach, mean over the layers and over `steps` steps from the load's start.

    Counted with an executable of its own, which also returns what the routers chose.
    """
    bucket = load.bucket(max(rows))
    runner = Runner(
        weights.model, weights.params, load.engine.settings, mesh, buckets=(bucket,), probe=True, files=open_store(None)
    )
    runner.warm_up()
    counts: dict[int, float] = {}
    for n in rows:
        load.rewind()
        load.select(n)
        runner.state = load.runner.state
        found = []
        for _ in range(steps):
            plan = load.plan()
            runner.dispatch(plan)
            output = runner.read()
            for request, token in zip(plan.decode, output.ids[:, 0], strict=True):
                request.tokens.append(int(token))
            assert output.probe is not None
            found += [len(np.unique(ids_Tk[:n])) for ids_Tk in output.probe.experts]
        counts[n] = statistics.mean(found)
        load.runner.state = runner.state
    return counts
