"""The line about throughput in the server's log."""

import logging

import pytest

from jaxspec.engine.engine import EngineStats
from serve.metrics import EngineSnapshot
from serve.throughput import ThroughputLog
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

BODY = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(autouse=True)
def info(caplog):
    caplog.set_level(logging.INFO, "jaxspec.serve")


def test_a_line_for_each_interval_with_work_and_none_without(caplog):
    now: list[float] = [100.0]
    latest: list[EngineStats | None] = [None]
    log = ThroughputLog(lambda: latest[0] and EngineSnapshot(latest[0], 0, 0), clock=lambda: now[0])

    def line(seconds: float = 10.0, **stats) -> str | None:
        now[0] += seconds
        base = {"num_running": 0, "num_waiting": 0, "kv_cache_usage": 0.0, "num_preemptions": 0, "prompt_tokens": 0}
        latest[0] = EngineStats(**{**base, "generation_tokens": 0, **stats}) if stats else None
        caplog.clear()
        log.write()
        return caplog.messages[0] if caplog.messages else None

    assert line() is None  # the model loads
    assert line(num_running=0) is None  # nothing came in yet
    after = {"prefill_tokens": 1000, "generation_tokens": 50, "prefix_cache_queries": 1200, "prefix_cache_hits": 300}
    assert line(num_running=3, num_waiting=2, kv_cache_usage=0.125, **after) == (
        "Engine 000: Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 5.0 tokens/s, "
        "Running: 3 reqs, Waiting: 2 reqs, GPU KV cache usage: 12.5%, Prefix cache hit rate: 25.0%"
    )
    assert "throughput: 0.0 tokens/s, Running: 1 reqs" in line(num_running=1, **after)  # it works, if slowly
    later = after | {"generation_tokens": 80}
    assert "generation throughput: 7.5 tokens/s, Running: 0" in line(4.0, **later)  # it ended in the interval
    assert line(**later) is None  # idle


@pytest.mark.parametrize("k", [0, 3])
def test_a_server_writes_the_line_with_and_without_speculation(start_server, caplog, k):
    server = start_server(served(MockEngine(k=k), byte_tokenizer()), log_seconds=0.05)
    server.post("/v1/completions", BODY)
    server.wait_until(lambda: "Avg generation throughput" in caplog.text)
    server.wait_until(lambda: ("Mean acceptance length" in caplog.text) == bool(k))


def test_the_lines_can_be_left_out(start_server, monkeypatch):
    intervals: list[float] = []  # of this test's servers: others in the process write to the same log

    async def write_every(seconds: float, *_logs) -> None:
        intervals.append(seconds)

    monkeypatch.setattr("serve.service.write_every", write_every)
    for log_stats in (True, False):
        start_server(served(MockEngine(), byte_tokenizer()), log_seconds=0.5, log_stats=log_stats)
        assert intervals == [0.5]
