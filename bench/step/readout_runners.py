"""What `bench readout` runs: a model, its compiled steps, and requests that decode."""

import argparse
import dataclasses
from collections.abc import Iterable, Sequence

import jax
import numpy as np

from bench.harness import models
from bench.harness.models import mesh_of_one
from jaxspec.compat import compiles
from jaxspec.compile_cache import open_store
from jaxspec.config import EngineConfig, Settings, np_dtype, pages_for, resolve, resolve_dtype
from jaxspec.engine.buckets import Bucket, bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner
from jaxspec.engine.step_log import StepLog
from jaxspec.errors import ConfigError
from jaxspec.sampling.params import SamplingParams

WARM_UP_STEPS = 8


class Runners:
    """A model with a runner for mixed and one for separate steps, and engines over them.

    Args:
        most_steps: that any request decodes.
    """

    def __init__(self, arguments: argparse.Namespace, most_steps: int):
        gpu = jax.devices()[0].platform == "gpu"
        self.context, self.prompt = arguments.context, arguments.prompt
        dtype = np_dtype(resolve_dtype(EngineConfig(), on_gpu=gpu))
        mesh = mesh_of_one()
        budget = arguments.budget or (2048 if gpu else 256)
        drafts = arguments.drafts
        seqs = max(arguments.rows, max(arguments.decodes) + 1)
        # Those that decode go on while the last ones prefill.
        decoding = arguments.context + most_steps + -(-seqs * arguments.context // budget) + seqs + drafts + 64
        longest = max(decoding, arguments.prompt + 64) + -(-arguments.prompt // budget)
        models.check_layers(arguments.model, arguments.layers)
        if arguments.model in models.SHAPES:
            hf = models.random_config(arguments.model, arguments.layers)
            hf["max_position_embeddings"] = max(hf["max_position_embeddings"], longest)
            weights = models.draw(hf, mesh, dtype, with_draft=drafts > 0)
        else:
            weights = models.load(arguments.model, mesh, dtype, with_draft=drafts > 0)
        if drafts and weights.draft is None:
            raise ConfigError(f"--drafts {drafts}: {arguments.model} has no MTP layer")
        model, params = weights.model, weights.params
        self.vocab_size = model.config.vocab_size
        self.rng = np.random.default_rng(0)
        self._runners: dict[bool, Runner] = {}
        for mixed in (True, False):
            settings = resolve(
                EngineConfig(
                    max_model_len=longest,
                    max_num_seqs=seqs,
                    max_num_batched_tokens=max(budget, seqs * (drafts + 1)),
                    num_gpu_blocks_override=seqs * pages_for(decoding) + pages_for(longest) + 1,
                    enable_mixed_batch=mixed,
                    enable_prefix_caching=False,
                    num_speculative_tokens=drafts,
                    adaptive_speculation=False,
                    synthetic_acceptance_length=1.0 if drafts else None,
                ),
                model_max_position=model.config.max_position,
                page_bytes=0,
                free_bytes=0,
                on_gpu=gpu,
            )
            used = {arguments.rows, *arguments.decodes} if mixed else set(arguments.decodes)
            buckets = needed_buckets(bucket_table(settings), used)
            runner = Runner(model, params, settings, mesh, draft=weights.draft, buckets=buckets, files=open_store(None))
            runner.warm_up(lambda done, total, what: print(f"compiled {done}/{total} {what}", flush=True))
            self._runners[mixed] = runner
        compiles.mark_warm()

    def engine(self, *, mixed: bool, depth: int, log: StepLog | None = None) -> Engine:
        """A new engine over the compiled steps; earlier engines' requests must have ended."""
        runner = self._runners[mixed]
        runner.settings = dataclasses.replace(runner.settings, readout_depth=depth)
        return Engine(runner, vocab_size=self.vocab_size, step_log=log)

    @property
    def settings(self) -> Settings:
        """Those of mixed steps."""
        return self._runners[True].settings

    def request(self, name: str, length: int, max_tokens: int | None = None) -> Request:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        return Request(name, self.rng.integers(0, self.vocab_size, length).tolist(), params)

    def start(self, engine: Engine, rows: int) -> list[Request]:
        """Requests that all decode, a few steps after the last one's prefill."""
        requests = [self.request(f"decode-{i}", self.context) for i in range(rows)]
        engine.add(*requests)
        while any(r.state is not RequestState.DECODE for r in requests):
            engine.step()
        for _ in range(WARM_UP_STEPS):
            engine.step()
        return requests


def needed_buckets(buckets: Sequence[Bucket], rows: Iterable[int]) -> tuple[Bucket, ...]:
    """The buckets for prompts, and for each row count the smallest that holds it."""
    alone = [b for b in buckets if not b.prefill_tokens]
    decode = {min((b for b in alone if b.decode_rows >= n), key=lambda b: b.rows) for n in rows}
    largest = max(alone, key=lambda b: b.rows)
    return tuple(sorted({*decode, largest, *(b for b in buckets if b.prefill_tokens)}))


def end(engine: Engine, requests: Sequence[Request]) -> None:
    """Ends requests, and reads the steps that are still unread."""
    for request in requests:
        engine.abort(request.id)
    while engine.has_work:
        engine.step()
