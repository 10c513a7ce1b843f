"""The memory left for KV pages beside the weights and the largest steps, measured by running those steps."""

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import jax

from jaxspec.config import Settings, pages_for
from jaxspec.engine.buckets import Bucket, bucket_table, split_table
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.runner import Runner
from jaxspec.engine.warmup import largest_buckets
from jaxspec.errors import ConfigError

# For what other executables allocate besides, and for gaps between the allocator's blocks.
MARGIN_BYTES = 256 << 20
logger = logging.getLogger("jaxspec.memory")


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
        ConfigError: such a step does not fit beside the weights with any number of pages.
    """
    settings = smallest_pool(settings)
    buckets = largest_buckets(bucket_table(settings))
    logger.info("measuring what the largest steps need: %s", "; ".join(bucket.words for bucket in buckets))
    try:
        runner = make_runner(settings, buckets)
        runner.warm_up()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            "the weights leave too little memory for a step of max_num_batched_tokens "
            f"{settings.max_num_batched_tokens} and max_num_seqs {settings.max_num_seqs}; lower them or max_model_len, or "
            "raise gpu_memory_utilization"
        ) from error
    pool = settings.num_pages * page_bytes
    # A step in two parts needs what it needs as one, which one of the largest covers, and what lies between the parts.
    handed = sum(map(runner.handed_bytes, split_table(settings)))

    def left(device: Any) -> int:
        stats = device.memory_stats()
        return stats["bytes_limit"] - (stats["peak_bytes_in_use"] - pool) - handed - MARGIN_BYTES

    return min(map(left, devices))
