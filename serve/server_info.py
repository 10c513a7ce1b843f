"""GET /server_info: what is served, how it was loaded, and what the engine does now."""

import time
from typing import TYPE_CHECKING

from typing_extensions import TypedDict

from serve.service import Service

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance


class EngineInfo(TypedDict):
    """Gauges, and counters since the start."""

    num_requests_running: int
    num_requests_waiting: int
    kv_cache_usage: float  # part of the pages, 0 to 1
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int
    prefix_cache_hits: int
    acceptance_histogram: list[int] | None  # entry i: windows with i accepted drafts; null without speculation


class ServerInfo(TypedDict):
    models: list[str]
    max_model_len: int
    time: float  # seconds since any fixed point, for rates
    sampling_defaults: dict[str, float]
    description: dict[str, str]
    cache_config: dict[str, str]
    engine: EngineInfo | None  # null until the first step


def describe_server(service: Service) -> ServerInfo:
    """
    Raises:
        ApiError: 503 while the model loads, and when it is stuck or has failed.
    """
    model = service.model()
    # Folders are nobody's business who only has a key.
    shown = {label: str(value) for label, value in model.description.items() if label != "Model"}
    return {
        "models": list(service.settings.names),
        "max_model_len": model.engine.max_model_len,
        "time": time.monotonic(),
        "sampling_defaults": dict(model.sampling_defaults),
        "description": shown,
        "cache_config": dict(model.cache_config),
        "engine": _engine(service),
    }


def _engine(service: Service) -> EngineInfo | None:
    snapshot = service.metrics.snapshot
    if snapshot is None:
        return None
    stats = snapshot.stats
    acceptance: Acceptance | None = stats.acceptance
    return {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage": stats.kv_cache_usage,
        "num_preemptions": stats.num_preemptions,
        "prompt_tokens": stats.prompt_tokens,
        "generation_tokens": stats.generation_tokens,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
        "acceptance_histogram": None if acceptance is None else list(acceptance.histogram),
    }
