"""What the server says about speculation: per request, at /metrics, in the log, and that acceptance is synthetic."""

import dataclasses
import json
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.engine.acceptance import Acceptance
from serve.metrics import EngineSnapshot
from serve.speculation import AcceptanceLog
from tests.serve.client_checks import sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

K = 3
COMPLETION = {"prompt": ["hi", "there"], "max_tokens": 20, "temperature": 0, "ignore_eos": True, "n": 2}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 20, "n": 2}
PATHS = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]


@pytest.fixture
def server(start_server):
    return start_server(served(MockEngine(k=K), byte_tokenizer()))


def streamed(server, path, body):
    _, events = sse(server.base_url, path, body | {"stream": True})
    return [json.loads(event) for event in events[:-1]]


@pytest.mark.parametrize(("path", "body"), PATHS)
def test_an_answer_carries_its_metrics_on_request(server, path, body):
    whole = server.post(path, body | {"return_metrics": True, "return_token_ids": True}).json()
    chunks = streamed(server, path, body | {"return_metrics": True})
    for choice in whole["choices"]:
        figures = choice["metrics"]["speculative_decoding"]
        histogram = figures["acceptance_histogram"]
        assert len(histogram) == K + 1
        assert sum(histogram) == figures["num_spec_steps"] > 0
        assert sum(i * n for i, n in enumerate(histogram)) == figures["num_accepted_draft_tokens"]
        assert figures["num_draft_tokens"] == K * figures["num_spec_steps"]
        length = 1 + figures["num_accepted_draft_tokens"] / figures["num_spec_steps"]
        assert figures["mean_acceptance_length"] == pytest.approx(length)
        assert figures["draft_acceptance_rate"] == pytest.approx((length - 1) / K)
        assert len(choice["token_ids"]) <= figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] + 1
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert ["metrics" in c for c in mine] == [False] * (len(mine) - 1) + [True]
    assert not any("metrics" in c for c in server.post(path, body).json()["choices"])
    assert not any("metrics" in c["choices"][0] for c in streamed(server, path, body))
    assert server.post(path, body | {"return_metrics": "yes"}).status_code == 400


def test_no_windows_have_no_mean(server):
    (choice,) = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, "return_metrics": True}).json()[
        "choices"
    ]
    figures = choice["metrics"]["speculative_decoding"]
    assert figures["num_spec_steps"] == figures["num_accepted_draft_tokens"] == figures["num_draft_tokens"] == 0
    assert figures["mean_acceptance_length"] is figures["draft_acceptance_rate"] is None


def test_without_speculation_there_are_no_figures(mock_server):
    (choice,) = mock_server.post("/v1/completions", {"prompt": "a", "return_metrics": True}).json()["choices"]
    assert choice["metrics"]["speculative_decoding"] is None


def counters(server) -> dict[str, float]:
    families = text_string_to_metric_families(server.get("/metrics").text)
    return {
        s.name.partition("spec_decode_")[2] + s.labels.get("position", ""): s.value for f in families for s in f.samples
    }


def test_the_counters_are_the_sum_over_requests(server):
    answers = [server.post(path, body | {"return_metrics": True}).json() for path, body in PATHS]
    each = [c["metrics"]["speculative_decoding"] for a in answers for c in a["choices"]]
    histograms = [m["acceptance_histogram"] for m in each]
    steps = sum(m["num_spec_steps"] for m in each)
    server.wait_until(lambda: counters(server)["num_drafts_total"] == steps)
    found = counters(server)
    assert found["num_draft_tokens_total"] == K * steps
    assert found["num_accepted_tokens_total"] == sum(m["num_accepted_draft_tokens"] for m in each)
    by_position = [found[f"num_accepted_tokens_per_pos_total{i}"] for i in range(K)]
    assert by_position == [sum(sum(h[i + 1 :]) for h in histograms) for i in range(K)]
    assert by_position == sorted(by_position, reverse=True)
    assert "synthetic_acceptance_length" not in found


def test_synthetic_acceptance_is_named_everywhere(start_server):
    model = dataclasses.replace(served(MockEngine(k=K), byte_tokenizer()), synthetic_acceptance_length=2.5)
    server = start_server(model)
    for path, body in PATHS:
        assert server.post(path, body).json()["synthetic_acceptance_length"] == 2.5
        assert {c["synthetic_acceptance_length"] for c in streamed(server, path, body)} == {2.5}
    assert counters(server)["synthetic_acceptance_length"] == 2.5


def test_real_acceptance_is_not_called_synthetic(server):
    for path, body in PATHS:
        assert "synthetic_acceptance_length" not in server.post(path, body).json()
        assert not any("synthetic_acceptance_length" in c for c in streamed(server, path, body))


def snapshot(histogram, synthetic=None):
    engine = MockEngine(k=K if histogram else 0)
    engine.windows = list(histogram)
    return EngineSnapshot(engine.stats(), 0, 0, synthetic)


def test_the_log_tells_of_each_interval(caplog):
    caplog.set_level(logging.INFO, "jaxspec.serve")
    now, latest = [100.0], [None]
    log = AcceptanceLog(lambda: latest[0], clock=lambda: now[0])

    def line(histogram, seconds=10.0, synthetic=None):
        now[0] += seconds
        latest[0] = histogram if histogram is None else snapshot(histogram, synthetic)
        caplog.clear()
        log.write()
        assert len(caplog.records) <= 1
        return caplog.messages[0] if caplog.messages else None

    assert line(None) is None  # the model loads
    assert line((0, 0, 0, 0)) is None  # nothing came in yet
    assert line((10, 4, 4, 2)) == (
        "Speculative decoding: Mean acceptance length: 1.90, Accepted throughput: 1.80 tokens/s, Drafted throughput: "
        "6.00 tokens/s, Accepted: 18 tokens, Drafted: 60 tokens, Per-position acceptance rate: 0.500, 0.300, 0.100, "
        "Avg draft acceptance rate: 30.0%"
    )
    assert line((10, 4, 4, 2)) is None  # idle
    assert line((10, 4, 4, 4), seconds=4).startswith(
        "Speculative decoding: Mean acceptance length: 4.00, Accepted throughput: 1.50 tokens/s"
    )
    assert "synthetic_acceptance_length: 2.5" in line((10, 4, 4, 5), synthetic=2.5)


def test_no_line_without_speculation(caplog):
    caplog.set_level(logging.INFO, "jaxspec.serve")
    AcceptanceLog(lambda: snapshot(())).write()
    assert not caplog.messages


def test_a_server_writes_the_line(start_server, caplog):
    caplog.set_level(logging.INFO, "jaxspec.serve")
    server = start_server(served(MockEngine(k=K), byte_tokenizer()), log_seconds=0.05)
    server.post("/v1/completions", COMPLETION)
    server.wait_until(lambda: "Mean acceptance length" in caplog.text)


def test_figures_of_no_windows():
    nothing = Acceptance((0, 0, 0), 0)
    assert (nothing.mean_length, nothing.rate, nothing.rate_per_position) == (None, None, None)
    assert nothing.accepted_per_position == (0, 0)
