"""Which requests take part in the next step, and which pages they get.

One token budget a step: running requests decode first, prompt chunks take what is left. A request that finds no page
retracts the longest decoding one, which is prefilled again later and goes on with the same text.
"""

from dataclasses import replace

from jaxspec.config import Settings
from jaxspec.engine.batch import PrefillRow, StepPlan, pages_needed
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.state import NO_ID


def reserved_slots(known: int, *, k: int = 0, depth: int = 0) -> int:
    """KV slots that a decoding request with `known` host-known tokens may touch before the host knows more.

    Args:
        k: drafted tokens a step.
        depth: steps dispatched but not read.
    """
    if k == 0:
        return known + depth
    verify = known + (depth + 1) * k + depth
    draft = known + (depth + 1) * (k + 1) + k - 2
    return max(verify, draft)


class Scheduler:
    """Owns the requests' states, the slots and the pages. Knows nothing of devices."""

    def __init__(self, settings: Settings, buckets: tuple[Bucket, ...], *, window: int = 1):
        self.settings = settings
        self.window = window
        self.pages = PageAllocator(settings.num_pages)
        self.waiting: list[Request] = []
        self.running: list[Request] = []  # have a slot: PREFILL or DECODE
        self.num_preemptions = 0
        self._free_slots = list(range(settings.max_num_seqs, 0, -1))
        prefill = [b for b in buckets if b.prefill_tokens]
        self._max_prefill_rows = min(b.prefill_rows for b in prefill)
        self._max_prefill_tokens = max(b.prefill_tokens for b in prefill)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        self.waiting.sort(key=lambda r: r.order)

    def plan(self) -> StepPlan | None:
        """The next step, or None where nothing can run. Marks what it plans as dispatched."""
        deltas: list[tuple[int, int, int]] = []
        budget = self.settings.max_num_batched_tokens
        decode: list[Request] = []
        for request in sorted(self.running, key=lambda r: r.order):
            if request.state is not RequestState.DECODE or budget < self.window:
                continue
            if self._grow(request, reserved_slots(len(request.tokens), k=self.window - 1), decode):
                decode.append(request)
                budget -= self.window
        for request in decode:
            deltas += self._unsent(request, len(request.pages))
        prefill = self._plan_prefill(min(budget, self._max_prefill_tokens), deltas)
        if not prefill and not decode:
            return None
        for row in prefill:
            row.request.computed = row.start + row.length
            if row.final:
                row.request.state = RequestState.DECODE
        plan = StepPlan(tuple(prefill), tuple(decode), tuple(deltas))
        return replace(plan, needs_full=any(map(_needs_full, plan.requests)))

    def dispatched(self, plan: StepPlan) -> None:
        """The plan's array has been packed: the device will know these slots."""
        for row in plan.prefill:
            row.request.needs_reset = False

    def release(self, request: Request) -> None:
        """Takes slot and pages back, whatever the request's state."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request in self.running:
            self.running.remove(request)
            self._free_slots.append(request.slot)
            self.pages.free(request.pages)
        request.slot, request.pages, request.sent_pages, request.computed = 0, [], 0, 0
        request.needs_reset = True

    def _plan_prefill(self, budget: int, deltas: list[tuple[int, int, int]]) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        started = sorted((r for r in self.running if r.state is RequestState.PREFILL), key=lambda r: r.order)
        for request in [*started, *self.waiting]:
            if budget <= 0 or len(rows) == self._max_prefill_rows:
                break
            if request.state is RequestState.WAITING and not self._admit(request):
                break  # those behind it wait too: a long prompt must not starve
            start, target = request.computed, request.prefill_target
            length = min(budget, target - start)
            final = start + length == target
            covered = reserved_slots(len(request.tokens), k=self.window - 1) if final else start + length
            deltas += self._unsent(request, pages_needed(self.settings, covered))
            rows.append(
                PrefillRow(
                    request,
                    start,
                    length,
                    final,
                    forced=request.tokens[-1] if final and request.resuming else NO_ID,
                    next_id=NO_ID if final else request.tokens[start + length],
                )
            )
            budget -= length
        admitted = {row.request.id for row in rows if row.request.state is RequestState.PREFILL}
        self.waiting = [r for r in self.waiting if r.id not in admitted]
        return rows

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a slot and the pages of all its known tokens, or nothing."""
        if not self._free_slots:
            return False
        slots = max(reserved_slots(len(request.tokens), k=self.window - 1), len(request.tokens) + 1)
        pages = self.pages.allocate(pages_needed(self.settings, slots))
        if pages is None:
            return False
        request.slot, request.pages, request.state = self._free_slots.pop(), pages, RequestState.PREFILL
        self.running.append(request)
        return True

    def _grow(self, request: Request, slots: int, planned: list[Request]) -> bool:
        """Makes the request's pages cover `slots`, retracting longer requests if need be; false if it was retracted."""
        while True:
            missing = pages_needed(self.settings, slots) - len(request.pages)
            if missing <= 0:
                return True
            pages = self.pages.allocate(missing)
            if pages is not None:
                request.pages += pages
                return True
            # Requests already planned for this step keep their pages: their rows are about to use them.
            victims = [r for r in self.running if r.state is RequestState.DECODE and r not in planned]
            victim = max(victims, key=lambda r: (len(r.tokens), r.order))
            self.retract(victim)
            if victim is request:
                return False

    def retract(self, request: Request) -> None:
        """Takes everything from a running request and queues it again by its arrival."""
        self.release(request)
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.add(request)

    def _unsent(self, request: Request, upto: int) -> list[tuple[int, int, int]]:
        upto = min(upto, len(request.pages))
        deltas = [(request.slot, column, request.pages[column]) for column in range(request.sent_pages, upto)]
        request.sent_pages = max(request.sent_pages, upto)
        return deltas


def _needs_full(request: Request) -> bool:
    """Every step of such a request is one of a "full" bucket: only these keep count of what it holds."""
    params = request.params
    penalised = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
    masked = not params.greedy and (params.top_k > 0 or params.top_p < 1 or params.min_p > 0)
    return bool(penalised or masked or params.logit_bias or params.min_tokens or params.logprobs)
