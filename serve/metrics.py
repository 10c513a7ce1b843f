"""Prometheus metrics: vLLM's names after our own prefix, so that its dashboards work (`--metrics-prefix vllm`)."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jaxspec.engine.output import FinishReason
from serve.generation import Choice
from serve.http_metrics import HttpMetrics
from serve.request_metrics import times_of
from serve.token_gaps import TokenGaps

if TYPE_CHECKING:
    from jaxspec.engine.acceptance import Acceptance
    from jaxspec.engine.engine import EngineStats
    from jaxspec.engine.expert_load import ExpertLoad
    from jaxspec.engine.output import RequestOutput, RequestStats

_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5,
    0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_PER_TOKEN = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST = (
    0.01, 0.05, 0.1, 0.3, 0.5,
    0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_CHOICES = (1, 2, 5, 10, 20)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine's state after its latest step, as the engine thread saw it."""

    stats: "EngineStats"
    compiles: int
    compiles_after_warmup: int
    synthetic_acceptance_length: float | None = None
    cache_config: Mapping[str, str] = field(default_factory=dict)

    @property
    def step_tokens(self) -> int:
        """Tokens of all steps: prompt tokens computed and tokens generated."""
        return self.stats.prefill_tokens + self.stats.generation_tokens


class Metrics(Collector):
    """All metrics of one server, in a registry of its own.

    Attributes:
        snapshot: replaced by the engine thread, read when /metrics is scraped; None while the model loads.
        http: of requests, whatever became of them.
    """

    def __init__(self, model_name: str, prefix: str = "jaxspec"):
        self._prefix = prefix
        self._labels = {"model_name": model_name, "engine": "0"}
        self.snapshot: EngineSnapshot | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        self.http = HttpMetrics(self._registry)
        self._success = self._counter("request_success", "Requests that ended", "finished_reason")
        for reason in FinishReason:  # a share of errors needs their number also where it is 0
            self._success.labels(**self._labels, finished_reason=reason.value)
        # Where prompts came from, counted when their first token has come.
        self._by_source = self._counter(
            "prompt_tokens_by_source", "Prompt tokens by where their KV came from", "source"
        )
        self._cached = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache").labels(
            **self._labels
        )
        self._cached_by_source = self._counter(
            "prompt_tokens_cached_by_source", "The same, by the memory that held them", "source"
        ).labels(**self._labels, source="device")
        # An open proposal for vLLM has this name; its released versions have none.
        rejections = self._counter("admission_rejections", "HTTP requests answered 429, the queue being full")
        self._rejections = rejections.labels(**self._labels)
        failures = self._counter(
            "num_nan_aborted_requests", "Requests that the engine ended because their logits held NaN"
        )
        self._failures = failures.labels(**self._labels)
        self._first_token = self._histogram("time_to_first_token_seconds", "Arrival to first token", _FIRST_TOKEN)
        name = f"{prefix}:inter_token_latency_seconds"
        self._inter_token = TokenGaps(name, "Time between two tokens", self._labels, _PER_TOKEN)
        self._registry.register(self._inter_token)
        self._per_output_token = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between two tokens of a request", _PER_TOKEN
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "Arrival to last token", _REQUEST)
        self._queue = self._histogram("request_queue_time_seconds", "Arrival to first step", _REQUEST)
        self._prefill = self._histogram("request_prefill_time_seconds", "First step to first token", _REQUEST)
        self._decode = self._histogram("request_decode_time_seconds", "First to last token", _REQUEST)
        self._inference = self._histogram("request_inference_time_seconds", "First step to last token", _REQUEST)
        self._preemption = self._histogram(
            "request_preemption_time_seconds", "Between a preemption and the step that goes on, in all", _REQUEST
        )
        self._prompt_length = self._histogram("request_prompt_tokens", "Prompt tokens of a request", _TOKENS)
        self._output_length = self._histogram("request_generation_tokens", "Output tokens of a request", _TOKENS)
        self._computed_length = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Prompt tokens of a request that were not in the prefix cache",
            _TOKENS,
        )
        self._longest_length = self._histogram(
            "request_max_num_generation_tokens", "Output tokens of the longest choice of a prompt", _TOKENS
        )
        self._choices = self._histogram("request_params_n", "Choices asked for of a prompt", _CHOICES)
        self._max_tokens = self._histogram("request_params_max_tokens", "max_tokens, where it was given", _TOKENS)
        self._step = self._histogram("iteration_tokens_total", "Prompt and output tokens of a step", _STEP_TOKENS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, [*self._labels, *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        family = Histogram(f"{self._prefix}:{name}", text, list(self._labels), buckets=buckets, registry=self._registry)
        return family.labels(**self._labels)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def publish(self, snapshot: EngineSnapshot) -> None:
        """What the engine is after a step, or between steps. Called by the engine thread."""
        last, self.snapshot = self.snapshot, snapshot
        if snapshot.stats.num_steps != (last.stats.num_steps if last else 0):
            self._step.observe(snapshot.step_tokens - (last.step_tokens if last else 0))

    def record_rejection(self) -> None:
        self._rejections.inc()

    def record_unfinished(self, choices: int, *, failed: bool) -> None:
        """Choices that did not end by themselves: their request has failed, or their client has left."""
        reason = FinishReason.ERROR if failed else FinishReason.ABORT
        self._success.labels(**self._labels, finished_reason=reason.value).inc(choices)

    def record_failure(self) -> None:
        """The engine ends a request with an error for NaN only."""
        self._failures.inc()

    def record(self, choice: Choice, output: "RequestOutput") -> None:
        """Output of one step for one choice. Latency between tokens counts each token, not each step."""
        new = len(output.new_ids)
        if new:
            if choice.last_token_time is None:
                self._first_token.observe(output.time - choice.submission.arrival_time)
                self._record_prompt(len(choice.submission.prompt_ids), output.num_cached_tokens)
            else:
                self._inter_token.add((output.time - choice.last_token_time) / new, new)
            choice.last_token_time = output.time
        if output.finish_reason is not None and output.stats is not None:
            self._success.labels(**self._labels, finished_reason=output.finish_reason.value).inc()
            self._record_end(output.stats)
            self._record_choice(choice, output.stats)

    def _record_prompt(self, tokens: int, cached: int) -> None:
        self._cached.inc(cached)
        self._cached_by_source.inc(cached)
        self._by_source.labels(**self._labels, source="local_cache_hit").inc(cached)
        self._by_source.labels(**self._labels, source="local_compute").inc(tokens - cached)

    def _record_choice(self, choice: Choice, stats: "RequestStats") -> None:
        submission = choice.submission
        if submission.params.max_tokens is not None:
            self._max_tokens.observe(submission.params.max_tokens)
        longest = submission.group.end(stats.num_output_tokens)
        if longest is not None:
            self._longest_length.observe(longest)
            self._choices.observe(submission.group.size)

    def _record_end(self, stats: "RequestStats") -> None:
        times = times_of(stats)
        self._computed_length.observe(stats.num_prompt_tokens - stats.num_cached_tokens)
        if stats.first_scheduled_time is not None:
            self._inference.observe(stats.end_time - stats.first_scheduled_time)
        self._e2e.observe(stats.end_time - stats.arrival_time)
        self._prompt_length.observe(stats.num_prompt_tokens)
        self._output_length.observe(stats.num_output_tokens)
        for histogram, seconds in (
            (self._queue, times.queue),
            (self._prefill, times.prefill),
            (self._decode, times.decode),
            (self._preemption, times.preemption),
        ):
            if seconds is not None:
                histogram.observe(seconds)
        if times.decode is not None and stats.num_output_tokens > 1:
            self._per_output_token.observe(times.decode / (stats.num_output_tokens - 1))

    def collect(self) -> Iterable[Metric]:
        """Gauges and counters that the engine keeps itself, read at scrape time."""
        if self.snapshot is None:
            return
        stats = self.snapshot.stats
        ranks = stats.ranks or (stats,)
        for name, text, values in (
            ("num_requests_running", "Requests with KV pages", [rank.num_running for rank in ranks]),
            ("num_requests_waiting", "Requests without KV pages", [rank.num_waiting for rank in ranks]),
            ("kv_cache_usage_perc", "Part of the KV pages in use, 0 to 1", [rank.kv_cache_usage for rank in ranks]),
        ):
            yield self._by_rank(name, text, values)
        pending = {"": stats.buckets_pending}
        yield self._gauge("buckets_pending", "Steps that are still compiled while larger ones serve", pending)
        # All wait for pages or rows: nothing else can hold a request back.
        waiting = {"capacity": stats.num_waiting, "deferred": 0}
        yield self._gauge("num_requests_waiting_by_reason", "Requests without KV pages, by reason", waiting, "reason")
        awake = {"awake": 1, "weights_offloaded": 0, "discard_all": 0}
        yield self._gauge("engine_sleep_state", "This engine never sleeps", awake, "sleep_state")
        if self.snapshot.cache_config:
            config = {"engine": self._labels["engine"], **self.snapshot.cache_config}
            info = GaugeMetricFamily(f"{self._prefix}:cache_config_info", "The KV pages", labels=list(config))
            info.add_metric(list(config.values()), 1)
            yield info
        for name, text, value in (
            ("prompt_tokens", "Prompt tokens accepted", stats.prompt_tokens),
            ("generation_tokens", "Tokens generated", stats.generation_tokens),
            ("prefix_cache_queries", "Tokens looked up in the prefix cache", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Tokens found in the prefix cache", stats.prefix_cache_hits),
            ("num_preemptions", "Requests that lost their KV pages to others", stats.num_preemptions),
            ("jit_compiles", "XLA compilations", self.snapshot.compiles),
            ("jit_compiles_after_warmup", "XLA compilations that warm-up missed", self.snapshot.compiles_after_warmup),
            (
                "jit_compiles_while_serving",
                "XLA compilations of steps for which larger ones served until then",
                stats.compiles_while_serving,
            ),
        ):
            counter = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        if stats.acceptance is not None:
            yield from self._speculation(stats.acceptance, stats.steps_by_drafts)
        if stats.expert_load is not None:
            yield from self._experts(stats.expert_load)
        if self.snapshot.synthetic_acceptance_length is not None:
            yield self._gauge(
                "spec_decode_synthetic_acceptance_length",
                "Drafts are accepted at random to this mean length: the text is worthless",
                {"": self.snapshot.synthetic_acceptance_length},
            )

    def _by_rank(self, name: str, text: str, values: Sequence[float]) -> Metric:
        """A value of each rank, whose number is the label `engine`, as vLLM has it."""
        gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=list(self._labels))
        for rank, value in enumerate(values):
            gauge.add_metric(list((self._labels | {"engine": str(rank)}).values()), value)
        return gauge

    def _gauge(self, name: str, text: str, values: Mapping[str, float], label: str | None = None) -> Metric:
        """One value, or one for each value of `label`."""
        gauge = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=[*self._labels, *([label] if label else [])])
        for key, value in values.items():
            gauge.add_metric([*self._labels.values(), *([key] if label else [])], value)
        return gauge

    def _experts(self, load: "ExpertLoad") -> Iterable[Metric]:
        """A series a layer and device and no more: one for each of thousands of experts would take long to write."""
        layers = list(map(str, load.layers))
        routed = CounterMetricFamily(
            f"{self._prefix}:routed_tokens",
            "Tokens that a mixture layer sent to a device's experts, once for each expert",
            labels=[*self._labels, "layer", "device"],
        )
        for layer, counts in zip(layers, load.by_device.tolist(), strict=True):
            for device, count in enumerate(counts):
                routed.add_metric([*self._labels.values(), layer, str(device)], count)
        yield routed
        ratios = dict(zip(layers, load.busiest_over_mean.tolist(), strict=True))
        text = "Tokens of a mixture layer's busiest expert over the mean of its experts, since the start"
        yield self._gauge("expert_load_busiest_over_mean", text, ratios, "layer")

    def _speculation(self, acceptance: "Acceptance", steps_by_drafts: Mapping[int, int]) -> Iterable[Metric]:
        """vLLM's four counters. Mean acceptance length is 1 + accepted / drafts; steps beside a prefill count too.

        And one of our own: which number of drafts was chosen how often.
        """
        for name, text, value in (
            ("num_drafts", "Windows verified", acceptance.num_steps),
            (
                "num_draft_tokens",
                "Tokens drafted and verified: k a window, or as few as its request or its step had",
                acceptance.num_drafted,
            ),
            ("num_accepted_tokens", "Drafted tokens that the target agreed with", acceptance.num_accepted),
        ):
            counter = CounterMetricFamily(f"{self._prefix}:spec_decode_{name}", text, labels=list(self._labels))
            counter.add_metric(list(self._labels.values()), value)
            yield counter
        by_position = CounterMetricFamily(
            f"{self._prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens by position in the window",
            labels=[*self._labels, "position"],
        )
        for position, accepted in enumerate(acceptance.accepted_per_position):
            by_position.add_metric([*self._labels.values(), str(position)], accepted)
        yield by_position
        by_drafts = CounterMetricFamily(
            f"{self._prefix}:spec_decode_num_steps", "Steps by the drafts of a row", labels=[*self._labels, "k"]
        )
        for k, steps in steps_by_drafts.items():
            by_drafts.add_metric([*self._labels.values(), str(k)], steps)
        if steps_by_drafts:
            yield by_drafts
