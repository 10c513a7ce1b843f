"""Engines with a pool for exactly one load, and their compilation."""

import itertools
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
from jax.sharding import Mesh

from bench.harness.models import Weights
from bench.step.sizes import Sizes
from jaxspec.compat import compiles
from jaxspec.compile_cache import open_store
from jaxspec.config import EngineConfig, pages_for, resolve
from jaxspec.engine.buckets import Bucket, bucket_table, choose_bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import Runner
from jaxspec.models.params import TENSOR_AXIS, num_ranks


def build_engine(
    weights: Weights,
    sizes: Sizes,
    k: int,
    mesh: Mesh,
    *,
    dtype: Any,
    lean: bool,
    full: bool = False,
    split: bool = False,
    skip_dead: bool = True,
    method: Any = None,
    adaptive: bool = False,
) -> Engine:
    """The engine as `LLM` makes it, with a pool for exactly this load; nothing is compiled yet. Its steps are kept as a
    server's are.

    Args:
        k: drafted tokens a step; 0 for plain steps.
        lean: only the buckets that are measured, see `measured_buckets`, of every number of drafts.
        full: of them also those that know every sampling parameter.
        split: the step of the most rows that know every sampling parameter also exists in two parts.
        skip_dead: see `Runner`.
        method: what proposes tokens, as in `EngineConfig` (default: the draft of the weights).
        adaptive: the number of drafts follows the load.
    """
    ranks = num_ranks(mesh)
    rows = tuple(dict.fromkeys(-(-n // ranks) for n in sizes.rows))  # of each
    most_rows = rows[-1]
    budget = max(sizes.budget, 2 * most_rows * (k + 1))
    length = sizes.longest(k, budget)
    settings = resolve(
        EngineConfig(
            dtype=dtype,
            max_model_len=length,
            max_num_seqs=most_rows,
            max_num_batched_tokens=budget,
            num_gpu_blocks_override=most_rows * pages_for(length) + 1,
            num_speculative_tokens=k,
            speculative_method=method if k else None,
            adaptive_speculation=adaptive,
            readout_depth=0,
            enable_prefix_caching=False,  # measurements start again from the same tokens
            tensor_parallel_size=mesh.shape[TENSOR_AXIS],
            data_parallel_size=ranks,
            enable_expert_parallel=ranks > 1,
        ),
        model_max_position=weights.model.config.max_position,
        page_bytes=0,
        free_bytes=0,
        on_gpu=jax.devices()[0].platform == "gpu",
    )
    table = bucket_table(settings)
    buckets = table
    if lean:
        by_drafts = [tuple(b for b in table if b.drafts == n) for n in sorted({b.drafts for b in table})]
        each = (measured_buckets(of_one, rows, sizes.context, full=full) for of_one in by_drafts)
        buckets = tuple(sorted(itertools.chain.from_iterable(each)))
    runner = Runner(
        weights.model,
        weights.params,
        settings,
        mesh,
        draft=weights.draft if settings.model_drafts else None,
        buckets=buckets,
        split=(decode_bucket(table, most_rows, full=True),) if split else (),
        skip_dead=skip_dead,
        files=open_store(None),
    )
    return Engine(runner, vocab_size=weights.model.config.vocab_size)


def decode_bucket(buckets: tuple[Bucket, ...], rows: int, *, full: bool = False) -> Bucket:
    """The bucket of a decode step of so many rows."""
    return choose_bucket(
        buckets, prefill_tokens=0, prefill_rows=0, decode_rows=rows, full=full, drafts=buckets[0].drafts
    )


def measured_buckets(
    table: tuple[Bucket, ...], rows: Sequence[int], context: int, *, full: bool = False
) -> tuple[Bucket, ...]:
    """The bucket of each row count's decode steps, the largest one for prompts, and where a single row is measured that of
    one prompt of `context` tokens; with `full`, of both variants."""
    variants = ("lean", "full") if full else ("lean",)
    decode = {decode_bucket(table, n, full=variant == "full") for n in rows for variant in variants}
    largest = {
        max(
            (b for b in table if b.prefill_tokens),
            key=lambda b: (b.prefill_tokens, b.decode_rows, b.variant == variant),
        )
        for variant in variants
    }
    one = set[Bucket]()
    if rows[0] == 1:
        tokens, k = min(context, max(b.prefill_tokens for b in largest)), table[0].drafts
        one = {
            choose_bucket(table, prefill_tokens=tokens, prefill_rows=1, decode_rows=0, full=variant == "full", drafts=k)
            for variant in variants
        }
    return tuple(sorted(decode | largest | one))


def warm_up(engines: Mapping[str, Engine]) -> dict[str, float]:
    """Compiles for all engines at once, then measures what steps cost where engines choose by it.

    Returns:
        Seconds from the start until each bucket was ready, whether it was compiled or kept by an earlier run.
    """
    started = time.perf_counter()
    seconds: dict[str, float] = {}

    def warm(name: str) -> None:
        def progress(done: int, total: int, what: str) -> None:
            bucket = f"{name}, {what.rsplit(':', 1)[0]}"
            seconds[bucket] = round(time.perf_counter() - started, 2)
            print(f"ready {done}/{total} {bucket}: {seconds[bucket]} s", flush=True)

        engines[name].runner.warm_up(progress)

    # On a CPU executables may not be kept while others compile.
    on_gpu = jax.devices()[0].platform == "gpu"
    with ThreadPoolExecutor(len(engines) if on_gpu else 1) as pool:
        list(pool.map(warm, engines))
    for engine in engines.values():
        engine.measure_costs()
    compiles.mark_warm()
    return seconds


def executables(engines: Iterable[Engine]) -> dict[str, int]:
    """For records: how many steps there are, and how many of them an earlier run had compiled."""
    runners = [engine.runner for engine in engines]
    return {
        "executables": sum(len(runner.executables) for runner in runners),
        "executables_of_earlier_runs": sum(runner.num_kept for runner in runners),
    }
