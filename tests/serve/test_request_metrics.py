"""Where a request's time went: in its answer and at /metrics, which agree with each other."""

import json
import threading

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.engine.output import FinishReason
from jaxspec.engine.request import Request
from jaxspec.sampling.params import SamplingParams
from serve.request_metrics import request_metrics
from tests.serve.client_checks import sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

TIMES = ("queue", "prefill", "decode", "preemption")
COMPLETION = ("/v1/completions", {"prompt": "hi"})
CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})
OPTIONS = {"return_metrics": True, "ignore_eos": True}


def histograms(server) -> dict[str, float]:
    """Sums and counts, by their names after the prefix."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {s.name.removeprefix("jaxspec:"): s.value for f in families for s in f.samples if "le" not in s.labels}


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [COMPLETION, CHAT])
def test_a_preempted_request_says_so(start_server, path, body, stream):
    engine = MockEngine(max_running=1, step_seconds=0.01)
    server = start_server(served(engine, byte_tokenizer()))
    found: dict[int, dict] = {}

    def run(priority: int, max_tokens: int) -> None:
        asked = body | OPTIONS | {"priority": priority, "max_tokens": max_tokens}
        if not stream:
            found[priority] = server.post(path, asked).json()["choices"][0]["metrics"]
            return
        chunks = [json.loads(e)["choices"][0] for e in sse(server.base_url, path, asked | {"stream": True})[1][:-1]]
        assert ["metrics" in c for c in chunks] == [False] * (len(chunks) - 1) + [True]
        found[priority] = chunks[-1]["metrics"]

    threads = []
    for priority, max_tokens in ((2, 200), (1, 40), (3, 5)):  # runs, is put before it, waits for both
        threads.append(threading.Thread(target=run, args=(priority, max_tokens)))
        threads[-1].start()
        server.wait_until(lambda: server.service.engine_thread.num_generations == len(threads))
        server.wait_until(lambda: engine.stats().generation_tokens > 4)
        engine.gate.clear()  # the others have arrived before a step more, however slow they are
    engine.gate.set()
    for thread in threads:
        thread.join()

    assert [found[p]["num_preemptions"] for p in (1, 2, 3)] == [0, 1, 0]
    assert found[1]["preemption_time_seconds"] == found[3]["preemption_time_seconds"] == 0
    first, preempted, last = found[1], found[2], found[3]
    ran = first["prefill_time_seconds"] + first["decode_time_seconds"]
    assert preempted["preemption_time_seconds"] > ran / 2
    assert preempted["preemption_time_seconds"] < preempted["decode_time_seconds"]
    assert last["queue_time_seconds"] > preempted["preemption_time_seconds"]
    for metrics in found.values():
        to_first = metrics["queue_time_seconds"] + metrics["prefill_time_seconds"]
        assert metrics["time_to_first_token_seconds"] == pytest.approx(to_first)

    sums = histograms(server)
    for name in TIMES:
        assert sums[f"request_{name}_time_seconds_count"] == 3
        total = sum(m[f"{name}_time_seconds"] for m in found.values())
        assert sums[f"request_{name}_time_seconds_sum"] == pytest.approx(total)
    total = sum(m["time_to_first_token_seconds"] for m in found.values())
    assert sums["time_to_first_token_seconds_sum"] == pytest.approx(total)
    latency = sum(m[f"{name}_time_seconds"] for m in found.values() for name in TIMES[:3])
    assert sums["e2e_request_latency_seconds_sum"] == pytest.approx(latency)
    assert sums["num_preemptions_total"] == 1


def test_without_a_token_there_are_no_times_of_it():
    request = Request("r", [1], SamplingParams(), arrival_time=10.0)
    request.scheduled(12.0)
    assert request_metrics(request.report(15.0, FinishReason.ABORT).stats) == {
        "queue_time_seconds": 2.0,
        "prefill_time_seconds": None,
        "time_to_first_token_seconds": None,
        "decode_time_seconds": None,
        "preemption_time_seconds": 0.0,
        "num_preemptions": 0,
        "speculative_decoding": None,
    }
