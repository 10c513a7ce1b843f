"""The memory left for KV pages beside the weights and the largest steps, measured by running those steps.

Where all pages that requests can use leave plenty, nothing is measured: see `evidently_fits`.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspec.config import Settings, pages_for
from jaxspec.engine.buckets import Bucket, bucket_table, split_table
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import StepState
from jaxspec.engine.warmup import largest_buckets
from jaxspec.models.params import shard_bytes

# For what other executables allocate besides, and for gaps between the allocator's blocks.
MARGIN_BYTES = 256 << 20
# The largest steps need a few GiB beside weights and state. Should that be more, `Runner.warm_up` says which options to change.
_PLENTY_BYTES = 8 << 30
logger = logging.getLogger("jaxspec.memory")


def evidently_fits(state: StepState, free_bytes: int) -> bool:
    """Whether steps have plenty of memory beside this state: as much as it takes itself, and at least 8 GiB.

    Args:
        state: shapes and shardings.
        free_bytes: on each device beside the weights.
    """
    needed = shard_bytes(jax.tree.leaves(state))
    return free_bytes - needed >= max(needed, _PLENTY_BYTES)


def smallest_pool(settings: Settings) -> Settings:
    """With as many pages as one request may need: those that steps are measured with."""
    return replace(settings, num_pages=pages_for(settings.max_model_len) + 1)


def free_bytes(
    measure: Callable[[], int], store: ExecutableStore, key: str | None, devices: Sequence[Any], *, slack: int = 1 << 26
) -> int:
    """What `measure` gives, or gave at an earlier start that kept it.

    Args:
        key: of all that the steps follow from: model, settings, devices and their memory.
        devices: on which the weights are, and nothing else. If more is in use than there was then, it is measured again.
    """
    in_use = max(device.memory_stats()["bytes_in_use"] for device in devices)
    kept = store.load_record(key, ("free_bytes", "bytes_in_use"))
    if kept is not None and in_use <= kept["bytes_in_use"] + slack:
        logger.info("what the largest steps need was measured by an earlier start")
        return int(kept["free_bytes"])
    measured = measure()
    store.save_record(key, {"free_bytes": measured, "bytes_in_use": in_use})
    return measured


def measure_free_bytes(
    make_runner: Callable[[Settings, tuple[Bucket, ...]], Runner],
    settings: Settings,
    page_bytes: int,
    devices: Iterable[Any],
) -> int:
    """Bytes that KV pages may take on each device.

    Args:
        make_runner: from settings and the buckets to compile. The weights are on the devices already.
        settings: of the engine to be; its number of pages does not matter.
        page_bytes: bytes of one KV page over all layers, on one device.
        devices: of the mesh.

    Raises:
        ConfigError: such a step does not fit beside the weights with any number of pages (see `Runner.warm_up`).
    """
    settings = smallest_pool(settings)
    buckets = largest_buckets(bucket_table(settings))
    logger.info("measuring what the largest steps need: %s", "; ".join(bucket.words for bucket in buckets))
    runner = make_runner(settings, buckets)
    runner.warm_up()
    pool = settings.num_pages * page_bytes
    # A step in two parts needs what it needs as one, which one of the largest covers, and what lies between the parts.
    handed = sum(map(runner.compiler.handed_bytes, split_table(settings)))

    def left(device: Any) -> int:
        stats = device.memory_stats()
        return stats["bytes_limit"] - (stats["peak_bytes_in_use"] - pool) - handed - MARGIN_BYTES

    return min(map(left, devices))
