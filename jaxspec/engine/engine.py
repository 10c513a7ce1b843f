"""The engine: requests in, tokens out, one device step at a time. Synchronous, no threads, no text, no HTTP.

With a readout depth the engine dispatches steps while earlier ones run, and reads each step's tokens that much later.
"""

import collections
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from jaxspec.compat import compiles
from jaxspec.config import Settings, pages_for
from jaxspec.engine.acceptance import Acceptance, acceptance_of, probability_for
from jaxspec.engine.adaptive_drafts import AdaptiveDrafts
from jaxspec.engine.batch import bucket_for
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.calibration import Calibration
from jaxspec.engine.draft_control import DraftControl, FixedDrafts
from jaxspec.engine.expert_load import ExpertLoad
from jaxspec.engine.handoff import FLAG_NAN
from jaxspec.engine.mask_pace import MaskPace
from jaxspec.engine.masks import write_masks
from jaxspec.engine.output import FinishReason, RequestOutput
from jaxspec.engine.placement import rank_for
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.prefill_delay import PrefillDelay
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.runner import Runner
from jaxspec.engine.scheduler import Scheduler, plan_step
from jaxspec.engine.scoring import record_scores
from jaxspec.engine.step_log import StepObserver, StepTimes
from jaxspec.engine.step_output import StepOutput
from jaxspec.errors import InvalidRequestError
from jaxspec.progress import Progress


@dataclass(frozen=True)
class RankStats:
    """Gauges of a rank."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float


@dataclass(frozen=True)
class EngineStats:
    """Gauges and counters since the engine started, of all ranks."""

    num_running: int
    num_waiting: int
    kv_cache_usage: float  # part of the usable pages that requests hold, 0 to 1
    num_preemptions: int
    prompt_tokens: int
    generation_tokens: int
    prefix_cache_queries: int = 0  # tokens of starting requests, and how many of them were in the prefix cache
    prefix_cache_hits: int = 0
    acceptance: Acceptance | None = None  # over all requests; None without speculation
    num_steps: int = 0  # steps read
    prefill_tokens: int = 0  # prompt tokens that these steps computed, those of a preempted request again
    buckets_pending: int = 0  # that are still loaded or compiled while larger ones serve
    compiles_while_serving: int = 0  # of such buckets; not among the compilations that warm-up missed
    steps_by_drafts: Mapping[int, int] = field(default_factory=dict)  # with speculation: of these, by drafts a row
    ranks: tuple[RankStats, ...] = ()  # where there are several
    expert_load: ExpertLoad | None = None  # where it is counted


class Engine:
    """Continuous batching over one `Runner`.

    Args:
        eos_token_ids: ids that end every output unless its request ignores them. Nobody else needs to know them.
        seed: of the generator that seeds requests without a seed of their own.
        observer: sees every step's output before its tokens are accepted; may be exchanged between steps.
        step_log: sees every step with its times.
        control: chooses how many drafts each step has (default: as many as there are buckets for, by load and measured
            costs where the settings say so).

    Attributes:
        ranks: of each rank, what owns its requests' states, slots and pages; for tests and benchmarks.
        accept_probability: that requests get when they are added; see `Request`. For benchmarks.
        mask_pace: says how long masks may keep a split step waiting; None: as long as they take.
    """

    def __init__(
        self,
        runner: Runner,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int] = (),
        seed: int = 0,
        observer: Callable[[StepOutput], None] | None = None,
        step_log: StepObserver | None = None,
        control: DraftControl | None = None,
    ):
        self.runner = runner
        self.step_log = step_log
        self.observer = observer
        self.settings: Settings = runner.settings
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        if control is None and runner.settings.adaptive_drafts:
            slots = runner.settings.data_parallel_size * runner.settings.max_slots
            control = AdaptiveDrafts(runner.settings.num_speculative_tokens, slots)
        self.control: DraftControl = control or FixedDrafts(runner.settings.num_speculative_tokens)
        self._calibration: Calibration | None = None
        # On a CPU it is the step that takes the time, and the same requests should take the same steps.
        self.mask_pace = MaskPace() if runner.settings.on_gpu else None
        self._last_read, self._mask_seconds = -math.inf, 0.0
        self._last_bucket: Bucket | None = None
        self.ranks = tuple(
            Scheduler(runner.settings, runner.buckets, control=self.control, rank=rank)
            for rank in range(runner.settings.data_parallel_size)
        )
        most = runner.settings.max_prefill_delay_steps
        self._delay = PrefillDelay(most) if most else None
        length = self.settings.synthetic_acceptance_length
        self.accept_probability = probability_for(length, self.settings.num_speculative_tokens) if length else 0.0
        self._requests: dict[str, Request] = {}
        self._finished_early: list[RequestOutput] = []
        self._started: list[Request] = []  # scheduled for the first time since the last output
        # Of each unread step: when planning began, and when it was dispatched.
        self._times: collections.deque[tuple[float, float]] = collections.deque()
        self._seeds = random.Random(seed)
        self._prompt_tokens = 0
        self._generation_tokens = 0
        self._num_steps = 0
        self._prefill_tokens = 0
        self._windows = self._no_windows()
        self._drafted = 0
        speculates = runner.settings.num_speculative_tokens > 0
        self._steps_by_drafts = (
            {b.drafts: 0 for b in sorted(runner.buckets, key=lambda b: b.drafts)} if speculates else {}
        )

    def _no_windows(self) -> list[int]:
        return [0] * self.settings.window if self.settings.num_speculative_tokens else []

    @property
    def scheduler(self) -> Scheduler:
        """The only rank's."""
        (scheduler,) = self.ranks
        return scheduler

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    @property
    def steps_in_flight(self) -> int:
        """Dispatched and not read."""
        return self.runner.in_flight

    @property
    def has_work(self) -> bool:
        """Something is left to do, if only to read steps that were dispatched before the last request ended."""
        return bool(self._requests or self._finished_early or self.runner.in_flight)

    def warm_up(
        self, progress: Progress | None = None, *, announce: Progress | None = None, wait_for_all: bool = True
    ) -> None:
        """Compiles and runs buckets; later compilations are counted as faults. See `Runner.warm_up`."""
        self.runner.warm_up(progress, announce=announce, wait_for_all=wait_for_all)
        self.measure_costs()
        self.runner.go_on()  # not before: what compiles would disturb what is measured
        compiles.mark_warm()

    def measure_costs(self) -> None:
        """Of the warm runner's buckets, where drafts are chosen by what steps cost and that is not known.

        The first buckets hold every plan, so they decide until others are there, which `prepare` measures.
        """
        if isinstance(self.control, AdaptiveDrafts) and self.control.costs is None:
            self._calibration = Calibration(self.runner, self.vocab_size)
            self.control.costs = self._calibration.measure(self._blank_pages())

    def _blank_pages(self) -> list[list[int]]:
        return [rank.pages.blank_pages for rank in self.ranks]

    def add(self, *requests: Request) -> None:
        """Queues all requests, or none. From here on they are the engine's: read its outputs instead of them.

        Raises:
            InvalidRequestError: an id in use, an empty prompt, ids outside the vocabulary, or more tokens than the
                context or the pool can ever hold.
        """
        seen: set[str] = set()
        for request in requests:
            if request.id in self._requests or request.id in seen:
                raise InvalidRequestError(f"request id {request.id!r} is in use")
            seen.add(request.id)
            self._validate(request)
        for request in requests:
            self._queue(request)

    def _queue(self, request: Request) -> None:
        params = request.params
        room = self.max_model_len - request.prompt_len
        request.max_total = request.prompt_len + min(room if params.max_tokens is None else params.max_tokens, room)
        request.seed = (params.seed if params.seed is not None else self._seeds.getrandbits(64)) & (2**64 - 1)
        eos = () if params.ignore_eos else self.eos_token_ids
        request.stop_ids = frozenset(eos) | frozenset(params.stop_token_ids)
        k, wanted = self.settings.num_speculative_tokens, params.num_speculative_tokens
        request.num_drafts = k if wanted is None else min(wanted, k)
        request.accept_probability = self.accept_probability
        request.windows = self._no_windows()
        self._requests[request.id] = request
        self._prompt_tokens += request.prompt_len
        rank_for(self.ranks, request).add(request)

    def _validate(self, request: Request) -> None:
        prompt_len, limit = request.prompt_len, self.max_model_len
        if prompt_len == 0:
            raise InvalidRequestError("the prompt is empty: it must hold at least one token", param="prompt")
        params = request.params
        if params.n != 1:
            raise InvalidRequestError("a request of the engine has one output: see SamplingParams.choices", param="n")
        for name, ids in (
            ("prompt", request.tokens),
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", tuple(params.logit_bias)),
        ):
            outside = next((t for t in ids if not 0 <= t < self.vocab_size), None)
            if outside is not None:
                raise InvalidRequestError(
                    f"token id {outside} in {name} is outside the vocabulary of {self.vocab_size} ids", param=name
                )
        if request.constraint and self.settings.synthetic_acceptance_length is not None:
            raise InvalidRequestError(
                "structured output needs drafts that are verified, but this engine accepts them synthetically",
                param="structured_outputs",
            )
        max_tokens = params.max_tokens
        least = 1 if max_tokens is None else max_tokens
        if prompt_len + least > limit:
            asked = "at least one output token" if max_tokens is None else f"{max_tokens} output tokens"
            raise InvalidRequestError(
                f"the prompt has {prompt_len} tokens and {asked} were asked for, {prompt_len + least} in all, "
                f"but the maximum context length is {limit} tokens",
                param="max_tokens" if max_tokens and prompt_len < limit else "prompt",
                code="context_length_exceeded",
            )
        longest = min(prompt_len + (limit if max_tokens is None else max_tokens), limit)
        needed, usable = pages_for(longest, self.settings.page_size), self.ranks[0].pages.usable
        if needed > usable:
            raise InvalidRequestError(
                f"the request may need {needed} KV pages but the pool has {usable}; ask for fewer tokens",
                param="max_tokens",
            )

    def prepare(self) -> bool:
        """While there is no work: lets a step serve that was compiled since the start, or measures what one costs.

        A call takes some steps' time. What costs is measured once nothing compiles that would disturb it.

        Returns:
            Whether more may come.
        """
        if self.runner.install_prepared():
            return True
        if self._calibration is None or not self._calibration.unknown:
            return False
        assert isinstance(self.control, AdaptiveDrafts)
        self.control.costs = self._calibration.measure(self._blank_pages(), most=1)
        return bool(self._calibration.unknown)

    def abort(self, request_id: str) -> None:
        """Ends a request in any state; an unknown id is ignored, for the request may just have ended."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request)
            self._finished_early.append(request.report(time.monotonic(), FinishReason.ABORT))

    def step(self) -> list[RequestOutput]:
        """Dispatches steps up to the readout depth, and reads the oldest; at most one output a request.

        A split step lets its rows choose as soon as every step before it is read; until then no other is dispatched.
        Ids come from one device step. Requests that have just been scheduled for the first time have an output even
        where their first step is still unread. A request that is aborted, or that a host rule ends, costs the device at
        most `readout_depth` steps more, whose ids are dropped.
        """
        self.dispatch_ahead()
        return self.read_oldest()

    def dispatch_ahead(self) -> None:
        """The first half of `step`: dispatches steps up to the readout depth, and waits for nothing."""
        while self.runner.in_flight <= self.settings.readout_depth and not self.runner.begun:
            began = time.monotonic()
            plan = plan_step(self.ranks, self.runner.split_ready, self._delay)
            if plan is None:
                break
            self._started += [row.request for row in plan.prefill if row.request.first_scheduled_time is None]
            self.dispatch(plan, began)

    def read_oldest(self) -> list[RequestOutput]:
        """The second half of `step`: waits for the oldest step."""
        outputs, self._finished_early = self._finished_early, []
        started, self._started = self._started, []
        if self.runner.in_flight:
            outputs += self.read()
        elif self._requests and not outputs:
            raise RuntimeError("requests are waiting but nothing can be scheduled")
        if started:
            told = {output.request_id for output in outputs}
            outputs += [r.report(time.monotonic()) for r in started if r.id not in told]
        return outputs

    def reset_prefix_cache(self) -> None:
        """Later requests find no pages of earlier ones."""
        for rank in self.ranks:
            rank.reset_prefix_cache()

    def stats(self) -> EngineStats:
        ranks = self.ranks
        each = tuple(
            RankStats(len(rank.running), len(rank.waiting), 1 - rank.pages.num_free / rank.pages.usable)
            for rank in ranks
        )
        return EngineStats(
            num_running=sum(rank.num_running for rank in each),
            num_waiting=sum(rank.num_waiting for rank in each),
            kv_cache_usage=sum(rank.kv_cache_usage for rank in each) / len(each),
            num_preemptions=sum(rank.num_preemptions for rank in ranks),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=sum(rank.prefix_queries for rank in ranks),
            prefix_cache_hits=sum(rank.prefix_hits for rank in ranks),
            acceptance=acceptance_of(self._windows, self._drafted),
            num_steps=self._num_steps,
            prefill_tokens=self._prefill_tokens,
            buckets_pending=self.runner.num_pending,
            compiles_while_serving=compiles.num_apart,
            steps_by_drafts=dict(self._steps_by_drafts),
            ranks=each if len(each) > 1 else (),
            expert_load=self.runner.expert_load,
        )

    def dispatch(self, plan: StepPlan, began: float) -> None:
        """Starts the step that the scheduler has just planned, since `began`."""
        for row in plan.prefill:
            row.request.scheduled(began)
        if not plan.split:
            write_masks(self.runner, plan)
        self.runner.dispatch(plan)
        for rank, part in zip(self.ranks, plan.parts, strict=True):
            rank.dispatched(part)
        self._times.append((began, time.monotonic()))

    def read(self) -> list[RequestOutput]:
        """Waits for the oldest unread step, and gives each of its requests what it brought.

        Where it was the last one before a split step, that one's rows choose now.
        """
        planned, dispatched = self._times.popleft()
        reading = time.monotonic()
        step = self.runner.read()
        read = time.monotonic()
        for rank, part in zip(self.ranks, step.plan.parts, strict=True):
            rank.read(part)
        self._num_steps += 1
        if self._steps_by_drafts:
            self._steps_by_drafts[step.plan.drafts] += 1
        self._prefill_tokens += sum(chunk.length for chunk in step.plan.prefill)
        if self.observer:
            self.observer(step)
        record_scores(step.plan.prefill, step.scores)
        counts = (step.emitted.tolist(), step.verified.tolist(), step.accepted.tolist(), step.flags.tolist())
        rows = zip(*counts, step.ids.tolist(), step.logprobs.tolist(), step.plan.requests, strict=True)
        outputs = []
        first = len(step.plan.prefill)
        seen: list[tuple[int, int, int]] = []  # of each window: slot, drafts wanted, drafts accepted
        for row, (emitted, verified, accepted, flags, ids, logprobs, request) in enumerate(rows):
            if request.state is RequestState.FINISHED:
                continue
            if flags & FLAG_NAN:
                self._finish(request)
                outputs.append(request.report(read, FinishReason.ERROR, "the model produced NaN for this request"))
                continue
            if row < first:
                chunk = step.plan.prefill[row]
                self.ranks[request.rank].publish(request, chunk.start + chunk.length)
            elif emitted and (wanted := step.plan.verified[row - first]):
                # What was looked up and not found is no window, but tells that drafting gained nothing. Where masks came too
                # late for drafts, these tell nothing.
                seen.append((request.slot, verified if request.constraint else wanted, accepted))
                if verified:
                    self._count_window(request, verified, accepted)
            if request.constraint:
                held = min(request.num_drafts, step.plan.drafts)
                request.drafts = tuple(step.drafts[row, :held].tolist())
            if emitted:
                alternatives = step.alternatives(row, emitted, request.params.logprobs or 0)
                output = request.emit(ids[:emitted], logprobs[:emitted], alternatives, num_accepted=accepted, now=read)
                self._emitted(request, output)
                outputs.append(output)
        if self.mask_pace is not None and step.plan.split:
            self.mask_pace.observe(step.bucket, read - self._last_read, reading - self._last_read - self._mask_seconds)
        self._note_time(step, planned, read)
        self._last_read, self._last_bucket = read, step.bucket
        if self.runner.begun and self.runner.in_flight == 1:
            self._choose(self.runner.begun)
        self.control.observe(seen)
        if self.step_log is not None:
            times = StepTimes(planned, dispatched, reading, read, time.monotonic())
            waiting = sum(len(rank.waiting) for rank in self.ranks)
            self.step_log.write(step.plan, step.bucket, times, step.emitted, step.accepted, waiting=waiting)
        return outputs

    def _note_time(self, step: StepOutput, planned: float, read: float) -> None:
        """Where drafts are chosen by what steps cost: what this one did, if it was planned before the last one was read.

        On a CPU the same requests take the same steps.
        """
        plan = step.plan
        if not isinstance(self.control, AdaptiveDrafts) or not self.settings.on_gpu:
            return
        if planned > self._last_read or step.bucket != self._last_bucket:
            return
        if plan.decode and not plan.prefill and not plan.split:
            rows = max(len(part.decode) for part in plan.parts)
            tokens = max(sum(len(r.tokens) for r in part.decode) for part in plan.parts)
            self.control.took(step.bucket, rows, tokens, read - self._last_read)

    def _choose(self, begun: StepPlan) -> None:
        """Lets the rows of the split step choose, all steps before which are read."""
        started = time.monotonic()
        if self.mask_pace is None:
            write_masks(self.runner, begun)
        else:
            bucket = bucket_for(self.runner.split_ready, begun)
            write_masks(self.runner, begun, self.mask_pace.from_now(bucket, len(begun.requests)))
        self._mask_seconds = time.monotonic() - started
        self.runner.choose()

    def _emitted(self, request: Request, output: RequestOutput) -> None:
        self.ranks[request.rank].publish(request, len(request.tokens) - 1)
        self._generation_tokens += len(output.new_ids)
        if output.finish_reason:
            self._finish(request)

    def _count_window(self, request: Request, verified: int, accepted: int) -> None:
        request.windows[accepted] += 1
        request.drafted += verified
        self._windows[accepted] += 1
        self._drafted += verified

    def _finish(self, request: Request) -> None:
        self.ranks[request.rank].finish(request)
        del self._requests[request.id]
