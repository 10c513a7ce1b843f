"""A process that starts a tiny runner with a store: prints JSON of what it traced and compiled, and of what it ran."""

import dataclasses
import hashlib
import json
import logging
import sys
from pathlib import Path

import jax
import jax.monitoring
import numpy as np
from jax.sharding import Mesh

from jaxspec.compile_cache import FileStore
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import nest, with_shardings
from jaxspec.models.registry import read_config
from tests.engine.tiny import HF_CONFIG, SETTINGS

EVENTS = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")


def main(folder: str) -> None:
    logging.basicConfig(level=logging.WARNING)
    counts = dict.fromkeys(EVENTS, 0)
    lowered = []

    def count(event: str, *_: float, **__: str | int) -> None:
        name = event.rpartition("/")[2]
        if name in counts:
            counts[name] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    compile_lowered = jax.stages.Lowered.compile

    def digested(self, *args, **kwargs):
        lowered.append(hashlib.sha256(self.as_text().encode()).hexdigest())
        return compile_lowered(self, *args, **kwargs)

    jax.stages.Lowered.compile = digested
    model = CausalLM(read_config(HF_CONFIG), np.dtype("float32"))
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    rng = np.random.default_rng(0)
    params = {
        path: jax.device_put(rng.standard_normal(target.shape).astype(target.dtype), target.sharding)
        for path, target in with_shardings(model, mesh).items()
    }
    smallest = (dataclasses.replace(bucket_table(SETTINGS)[0], variant="lean"),)
    runner = Runner(model, nest(params), SETTINGS, mesh, buckets=smallest, files=FileStore(Path(folder)))
    runner.warm_up()
    kernels = {name: sorted(ran) for name, ran in runner.kernels.items()}
    packed = np.asarray(runner.run_padding(smallest[0]).packed).tolist()
    print(json.dumps({"counts": counts, "lowered": lowered, "kernels": kernels, "packed": packed}))


if __name__ == "__main__":
    main(sys.argv[1])
