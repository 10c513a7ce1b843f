"""What /metrics counts."""

import re
from collections import defaultdict

import httpx
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.config import EngineConfig, Settings
from jaxspec.engine.acceptance import Acceptance
from jaxspec.engine.engine import EngineStats, RankStats
from jaxspec.engine.expert_load import ExpertLoad
from serve.metrics import EngineSnapshot, Metrics
from serve.model import cache_config
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

BODY = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "hi", "max_tokens": 400, "ignore_eos": True}


def samples(server, label: str = "finished_reason") -> dict[str, dict[str, float]]:
    """Name -> value of `label` ("" where there is none) -> value."""
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(server.get("/metrics").text):
        for sample in family.samples:
            found[sample.name][sample.labels.get(label, "")] = sample.value
    return found


@pytest.mark.parametrize("prefix", ["jaxspec", "vllm"])
def test_metrics(start_server, prefix):
    server = start_server(served(MockEngine(), byte_tokenizer()), metrics_prefix=prefix)
    answers = [server.post("/v1/completions", BODY | {"ignore_eos": True, "max_tokens": n}).json() for n in (1, 9)]
    ended = {"length": 2, "stop": 0, "abort": 0, "error": 0}
    server.wait_until(lambda: samples(server).get(f"{prefix}:request_success_total") == ended)
    found = samples(server)
    values = {name.removeprefix(f"{prefix}:"): next(iter(by.values())) for name, by in found.items()}
    assert all(name.startswith((f"{prefix}:", "http_request", "process_")) for name in found)
    assert values["generation_tokens_total"] == sum(a["usage"]["completion_tokens"] for a in answers) == 10
    assert values["prompt_tokens_total"] == 4
    assert values["num_requests_running"] == values["num_requests_waiting"] == values["kv_cache_usage_perc"] == 0
    assert values["admission_rejections_total"] == 0
    assert values["num_preemptions_total"] == values["jit_compiles_after_warmup_total"] == 0
    assert values["jit_compiles_total"] == 7
    for histogram in (
        "time_to_first_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_preemption_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
    ):
        assert values[f"{histogram}_count"] == 2, histogram
    assert values["inter_token_latency_seconds_count"] >= 5
    assert values["request_time_per_output_token_seconds_count"] == 1
    families = text_string_to_metric_families(server.get("/metrics").text)
    labels = [f.samples[0].labels for f in families if f.name.startswith(f"{prefix}:")]
    assert all(each["engine"] == "0" for each in labels)
    assert [each for each in labels if each.get("model_name") != "mock"] == [
        {**served(MockEngine(), None).cache_config, "engine": "0"}
    ]


def test_the_choices_of_a_prompt_are_one_request_in_some_figures(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()))
    body = BODY | {"prompt": ["hi", "there"], "n": 3, "max_tokens": 9, "temperature": 1}
    answer = server.post("/v1/completions", body | {"return_token_ids": True}).json()
    lengths = [len(choice["token_ids"]) for choice in answer["choices"]]
    server.wait_until(lambda: samples(server)["jaxspec:request_params_n_count"] == {"": 2})
    values = {name.removeprefix("jaxspec:"): by.get("") for name, by in samples(server).items()}
    assert values["request_params_n_sum"] == 6
    assert values["request_params_max_tokens_sum"] == 6 * 9
    assert values["request_max_num_generation_tokens_sum"] == max(lengths[:3]) + max(lengths[3:])
    assert values["request_max_num_generation_tokens_count"] == 2


def test_where_prompts_come_from(start_server):
    server = start_server(served(MockEngine(cached_tokens=3), byte_tokenizer()))
    server.post("/v1/completions", BODY | {"prompt": "1234567"})
    server.wait_until(lambda: samples(server)["jaxspec:request_prefill_kv_computed_tokens_count"] == {"": 1})
    found = samples(server, "source")
    assert found["jaxspec:prompt_tokens_by_source_total"] == {"local_cache_hit": 3, "local_compute": 4}
    assert found["jaxspec:prompt_tokens_cached_total"] == {"": 3}
    assert found["jaxspec:prompt_tokens_cached_by_source_total"] == {"device": 3}
    assert found["jaxspec:request_prefill_kv_computed_tokens_sum"] == {"": 4}


def test_the_tokens_of_steps_are_those_of_requests(start_server):
    engine = MockEngine(k=3, cached_tokens=1)
    server = start_server(served(engine, byte_tokenizer()))
    for max_tokens in (1, 20):
        server.post("/v1/completions", BODY | {"prompt": "abcdef", "max_tokens": max_tokens, "ignore_eos": True})
    server.wait_until(lambda: samples(server)["jaxspec:request_success_total"]["length"] == 2)
    values = {name.removeprefix("jaxspec:"): by.get("") for name, by in samples(server).items()}
    assert values["iteration_tokens_total_sum"] == 2 * (6 - 1) + 21
    assert values["iteration_tokens_total_count"] == engine.stats().num_steps


def test_a_step_is_observed_once():
    metrics = Metrics("m")
    for num_steps, prefill, generated in ((0, 0, 0), (1, 64, 0), (1, 64, 0), (2, 64, 5)):
        stats = EngineStats(0, 0, 0.0, 0, 0, generated, num_steps=num_steps, prefill_tokens=prefill)
        metrics.publish(EngineSnapshot(stats, 0, 0))
    text = metrics.render().decode()
    assert 'jaxspec:iteration_tokens_total_sum{engine="0",model_name="m"} 69.0' in text
    assert 'jaxspec:iteration_tokens_total_count{engine="0",model_name="m"} 2.0' in text


def test_ranks_have_gauges_of_their_own():
    """Under the label that vLLM has for them; their sums are the engine's."""
    metrics = Metrics("m")
    ranks = (RankStats(3, 1, 0.25), RankStats(4, 0, 0.75))
    metrics.publish(EngineSnapshot(EngineStats(7, 1, 0.5, 0, 0, 0, ranks=ranks), 0, 0))
    text = metrics.render().decode()
    for name, values in (
        ("num_requests_running", (3, 4)),
        ("num_requests_waiting", (1, 0)),
        ("kv_cache_usage_perc", (0.25, 0.75)),
    ):
        found = re.findall(rf'jaxspec:{name}{{engine="(\d)",model_name="m"}} (\S+)', text)
        assert found == [(str(rank), str(float(value))) for rank, value in enumerate(values)]


def test_a_client_that_leaves_is_an_abort(start_server):
    engine = MockEngine(step_seconds=0.01)
    server = start_server(served(engine, byte_tokenizer()))
    body = LONG | {"n": 2, "stream": True}
    with httpx.stream("POST", f"{server.base_url}/v1/completions", json=body) as response:
        next(response.iter_lines())
    server.wait_until(lambda: samples(server)["jaxspec:request_success_total"]["abort"] == 2)


def test_a_refused_request_is_no_abort(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()))
    assert server.post("/v1/completions", BODY | {"max_tokens": 100_000}).status_code == 400
    assert server.post("/v1/completions", BODY | {"ignore_eos": True}).status_code == 200
    server.wait_until(lambda: samples(server)["jaxspec:request_success_total"]["length"] == 1)
    assert samples(server)["jaxspec:request_success_total"]["abort"] == 0


def test_a_failed_request_is_an_error(start_server):
    engine = MockEngine()
    engine.nan_in = 7
    server = start_server(served(engine, byte_tokenizer()))
    assert server.post("/v1/completions", BODY | {"prompt": [7]}).status_code == 500
    assert samples(server)["jaxspec:request_success_total"]["error"] == 1


def test_a_dead_engine_is_an_error_of_all_requests(start_server):
    engine = MockEngine()
    engine.fail = RuntimeError("out of luck")
    server = start_server(served(engine, byte_tokenizer()))
    assert server.post("/v1/completions", LONG | {"n": 3}).status_code == 500
    assert samples(server)["jaxspec:request_success_total"] == {"stop": 0, "length": 0, "abort": 0, "error": 3}


def test_http_requests(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()))
    server.post("/v1/completions", BODY)
    server.post("/v1/completions", {})
    server.get("/v1/models/mock")
    server.get("/v1/models/other")
    for i in range(3):
        server.get(f"/made-up/{i}")
    server.get("/health")
    server.wait_until(lambda: samples(server, "handler")["http_requests_total"].get("none") == 3)
    by_handler = samples(server, "handler")
    handlers = {"/v1/completions", "/v1/models/{name:path}", "none"}  # what clients make up is no label
    assert set(by_handler["http_requests_total"]) == set(by_handler["http_request_duration_seconds_sum"]) == handlers
    assert by_handler["http_request_duration_seconds_count"]["/v1/completions"] == 2
    found = {
        (s.labels["handler"], s.labels["method"], s.labels["status"]): s.value
        for f in text_string_to_metric_families(server.get("/metrics").text)
        for s in f.samples
        if s.name == "http_requests_total"
    }
    assert found == {
        ("/v1/completions", "POST", "2xx"): 1,
        ("/v1/completions", "POST", "4xx"): 1,
        ("/v1/models/{name:path}", "GET", "2xx"): 1,
        ("/v1/models/{name:path}", "GET", "4xx"): 1,
        ("none", "GET", "4xx"): 3,
    }


def test_cache_config():
    settings = Settings(
        max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64, num_pages=101, dtype="bfloat16", on_gpu=True
    )
    assert cache_config(settings, EngineConfig(gpu_memory_utilization=0.8)) == {
        "block_size": "64",
        "num_gpu_blocks": "100",
        "num_cpu_blocks": "0",
        "cache_dtype": "bfloat16",
        "gpu_memory_utilization": "0.8",
        "enable_prefix_caching": "True",
        "kv_cache_size_tokens": "6400",
        "kv_cache_max_concurrency": "6.40",
    }
    for option, label in (("bf16", "bfloat16"), ("fp8", "fp8")):
        assert cache_config(settings, EngineConfig(kv_cache_dtype=option))["cache_dtype"] == label


# --- vLLM's dashboards ---

COUNTERS = (
    "prompt_tokens_total", "generation_tokens_total", "prompt_tokens_cached_total", "prefix_cache_hits_total",
    "prefix_cache_queries_total", "num_preemptions_total", "prompt_tokens_cached_by_source_total{source=device}",
    "prompt_tokens_by_source_total{source=local_compute}", "prompt_tokens_by_source_total{source=local_cache_hit}",
    *(f"request_success_total{{finished_reason={reason}}}" for reason in ("stop", "length", "abort", "error")),
)  # fmt: skip
GAUGES = (
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "engine_sleep_state{sleep_state=awake}",
    "num_requests_waiting_by_reason{reason=capacity}", "num_requests_waiting_by_reason{reason=deferred}",
    "engine_sleep_state{sleep_state=discard_all}",
)  # fmt: skip
HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_prefill_kv_computed_tokens", "iteration_tokens_total",
    "request_params_n", "request_params_max_tokens",
)  # fmt: skip
# The boards' choices of a limit, which must be borders of buckets.
LIMITS = {
    "time_to_first_token_seconds": ("0.1", "0.25", "0.5", "0.75", "1.0", "2.5", "5.0", "10.0"),
    "request_time_per_output_token_seconds": ("0.025", "0.05", "0.075", "0.1", "0.15", "0.2", "0.3", "0.5"),
}
SPECULATION = (
    "num_drafts_total", "num_draft_tokens_total", "num_accepted_tokens_total",
    "num_accepted_tokens_per_pos_total{position=0}",
)  # fmt: skip
# Of vllm_instances: without the prefix, and of the pages.
PROCESS = ("start_time_seconds", "cpu_seconds_total", "resident_memory_bytes", "open_fds", "max_fds")
HTTP = (
    "http_requests_total{status=2xx}", "http_requests_total{status=5xx}", "http_requests_total{handler=/v1/completions}",
    "http_request_duration_seconds_sum{handler=/v1/completions}",
    "http_request_duration_seconds_count{handler=/v1/completions}",
)  # fmt: skip
QUERIES = (
    *(f"vllm:{name}" for name in (*COUNTERS, *GAUGES)),
    *(f"vllm:{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")),
    *(f"vllm:{name}_bucket{{le={le}}}" for name, limits in LIMITS.items() for le in limits),
    *(f"vllm:spec_decode_{name}" for name in SPECULATION),
    *(f"process_{name}" for name in PROCESS),
    *HTTP,
    "vllm:cache_config_info{block_size=64}",
    "vllm:cache_config_info{num_gpu_blocks=100}",
    "vllm:cache_config_info{enable_prefix_caching=True}",
)


def matches(query: str, name: str, labels: dict[str, str]) -> bool:
    """Whether a sample is what a query selects. Prometheus itself adds `job` and `instance`."""
    wanted, _, condition = query.partition("{")
    if name != wanted:
        return False
    if name.startswith("vllm:") and name != "vllm:cache_config_info" and labels.get("model_name") != "mock":
        return False
    if name.startswith("vllm:") and labels.get("engine") != "0":
        return False
    label, _, value = condition.rstrip("}").partition("=")
    return not label or labels.get(label) == value


def test_every_query_of_vllms_dashboards_returns_data(start_server):
    """Those that can mean something here; docs/metrics.md lists the others, with the reason."""
    engine = MockEngine(k=3, cached_tokens=1)
    engine.nan_in = 7
    server = start_server(served(engine, byte_tokenizer()), metrics_prefix="vllm")
    assert server.post("/v1/completions", BODY | {"max_tokens": 20, "ignore_eos": True}).status_code == 200
    assert server.post("/v1/completions", BODY | {"prompt": [7]}).status_code == 500
    server.wait_until(lambda: samples(server, "status")["http_requests_total"].get("5xx") == 1)
    families = list(text_string_to_metric_families(server.get("/metrics").text))
    found = [(s.name, s.labels) for f in families for s in f.samples]
    assert [query for query in QUERIES if not any(matches(query, *sample) for sample in found)] == []
    assert not matches("vllm:prompt_tokens_total", "vllm:prompt_tokens_total", {"model_name": "mock"})


def test_a_query_with_a_ratio_has_a_number_to_divide_by(start_server):
    server = start_server(served(MockEngine(k=3, cached_tokens=1), byte_tokenizer()), metrics_prefix="vllm")
    server.post("/v1/completions", BODY | {"max_tokens": 20, "ignore_eos": True})
    server.wait_until(lambda: samples(server)["vllm:request_success_total"]["length"] == 1)
    values = {name: by.get("") for name, by in samples(server).items()}
    for name in (
        "vllm:prefix_cache_queries_total",
        "vllm:prompt_tokens_total",
        "vllm:spec_decode_num_drafts_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:generation_tokens_total",
        *(f"vllm:{name}_count" for name in HISTOGRAMS),
    ):
        assert values[name] > 0, name


def test_without_speculation_there_are_no_figures_of_it():
    metrics = Metrics("m")
    metrics.publish(EngineSnapshot(EngineStats(0, 0, 0.0, 0, 0, 0), 0, 0))
    assert "spec_decode" not in metrics.render().decode()
    metrics.publish(EngineSnapshot(EngineStats(0, 0, 0.0, 0, 0, 0, acceptance=Acceptance((1, 0), 1)), 0, 0))
    assert "spec_decode" in metrics.render().decode()
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, acceptance=Acceptance((1, 0), 1), steps_by_drafts={0: 5, 1: 2, 3: 9})
    metrics.publish(EngineSnapshot(stats, 0, 0))
    found = re.findall(r'spec_decode_num_steps_total\{.*k="(\d)".*\} (\d+)', metrics.render().decode())
    assert found == [("0", "5"), ("1", "2"), ("3", "9")]


def test_the_load_of_experts_is_by_layer_and_device():
    """Two ranks' counts of two mixture layers with four experts, over two devices: the second layer's are past a word."""
    words = np.zeros((2, 2, 2, 4), np.int32)
    words[:, 0] = [[[4, 0, 1, 1], [5, 5, 5, 5]], [[4, 2, 0, 0], [5, 5, 5, 5]]]
    words[1, 1, 1, 3] = 1
    metrics = Metrics("m")
    metrics.publish(EngineSnapshot(EngineStats(0, 0, 0.0, 0, 0, 0), 0, 0))
    assert "expert" not in metrics.render().decode()
    metrics.publish(EngineSnapshot(EngineStats(0, 0, 0.0, 0, 0, 0, expert_load=ExpertLoad(words, (1, 3), 2)), 0, 0))
    families = {f.name: f for f in text_string_to_metric_families(metrics.render().decode())}
    found = {(s.labels["layer"], s.labels["device"]): s.value for s in families["jaxspec:routed_tokens"].samples}
    assert found == {("1", "0"): 10, ("1", "1"): 2, ("3", "0"): 20, ("3", "1"): 20 + 2**30}
    ratios = {s.labels["layer"]: s.value for s in families["jaxspec:expert_load_busiest_over_mean"].samples}
    assert ratios == {"1": 8 / 3, "3": (10 + 2**30) / (10 + 2**28)}


def test_what_clients_make_up_is_no_label(mock_server):
    assert httpx.request("BREW", f"{mock_server.base_url}/canary-path").status_code == 404
    text = mock_server.get("/metrics").text
    assert "BREW" not in text
    assert "canary-path" not in text
