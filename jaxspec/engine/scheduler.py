"""Which requests take part in the next step, and which pages they get.

One token budget a step: running requests decode first, prompt chunks use what is left. Where a request finds no page,
the longest decoding one is preempted: it is prefilled again later and goes on with the same text.

Steps are planned while earlier ones are still unread: the host then knows each request's tokens only up to what it has
read, and reserves pages for the most that the unread steps can add.

Rows whose masks follow from an unread step wait for it, unless the step may choose late: see `StepPlan.split`.

Each step has one number of drafts, which `DraftControl` chooses before the rows are: a window has so many tokens more.

Where requests are split over ranks, each rank has a `Scheduler` with pages, slots and a prefix index of its own. A request
stays on the rank that `placement.rank_for` has given it to; `plan_step` plans one step for all.
"""

import bisect
import time
from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.config import Settings
from jaxspec.engine.buckets import Bucket, draft_choices, most_prompt_tokens
from jaxspec.engine.draft_control import DraftControl, FixedDrafts, Load
from jaxspec.engine.pages import PageAllocator
from jaxspec.engine.plan import NO_ID, PrefillRow, StepPlan, joined, pages_needed
from jaxspec.engine.prefill_delay import PrefillDelay
from jaxspec.engine.prefix_cache import Match, PrefixCache
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.snapshots import Snapshots, next_cut


def reserved_slots(known: int, *, k: int = 0, verified: int = 0, unread_most: int = 0) -> int:
    """KV slots that a decode step of a request with `known` host-known tokens may touch.

    The step begins with at most A = known - 1 + unread_most tokens written. Its window writes the k + 1 slots from A on.
    It leaves at most A + verified + 1 tokens, and its k - 1 later draft steps write one slot each from there on.

    Args:
        k: drafts of the step.
        verified: how many of its drafts the request may accept.
        unread_most: most tokens that steps add which have been dispatched but not read.
    """
    return known + unread_most + k + max(verified - 1, 0)


class _Rows(NamedTuple):
    """What a rank is going to run in the next step."""

    prefill: list[PrefillRow]
    decode: list[Request]


class Scheduler:
    """Owns the requests' states, the slots and the pages, of one rank. Works without a device.

    Args:
        rank: its slots are those of the state's arrays after all slots of the ranks before it.

    Attributes:
        waiting: requests without a slot, in the order in which they are admitted.
        running: requests with a slot, in state PREFILL or DECODE.
        control: chooses how many drafts each step has.
        admits: False from a preemption until a request ends, lest requests preempt each other in turn.
        snapshots: kept states, of a model that needs them to share prefixes.
        prefix_queries, prefix_hits: tokens looked up in the prefix cache, and found there.
    """

    def __init__(
        self, settings: Settings, buckets: tuple[Bucket, ...], *, control: DraftControl | None = None, rank: int = 0
    ):
        self.settings = settings
        self._rank = rank
        most = settings.num_speculative_tokens
        self.control = control or FixedDrafts(most)
        self.snapshots: Snapshots | None = None
        if settings.prefix_caching and settings.state_snapshots:
            self.snapshots = Snapshots(settings.max_slots, settings.state_snapshots)
        self.cache: PrefixCache | None = None
        if settings.prefix_caching:
            lookahead = int(settings.model_drafts)
            self.cache = PrefixCache(settings.page_size, lookahead=lookahead, states=self.snapshots)
        self.pages = PageAllocator(settings.num_pages, self.cache)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.admits = True
        self._unread = 0
        self._refused: tuple[Request | None, int] = None, 0  # who lacked pages lately, and how many were free then
        first = rank * settings.max_slots  # padding
        self._free_slots = list(range(first + settings.max_num_seqs, first, -1))
        prefill = [b for b in buckets if b.prefill_tokens]
        self._max_prefill_rows = min(b.prefill_rows for b in prefill)
        self._max_prefill_tokens = most_prompt_tokens(buckets, full=False)  # by drafts
        self._buckets, self._draft_choices = buckets, dict[tuple[int, bool], tuple[int, ...]]()

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def draft_choices(self, prompt_tokens: int, *, full: bool) -> tuple[int, ...]:
        """The numbers of drafts that a step of so many prompt tokens, or fewer, may have."""
        kind = min(prompt_tokens, self.settings.max_num_batched_tokens), full
        if kind not in self._draft_choices:
            self._draft_choices[kind] = draft_choices(self._buckets, prompt_tokens=kind[0], full=full)
        return self._draft_choices[kind]

    @property
    def prompts(self) -> list[Request]:
        """Those whose tokens the next step may prefill. None begins while the first lacks the pages that it lacked before."""
        started = [r for r in self.running if r.state is RequestState.PREFILL]
        if not self.can_begin or (self._refused[0] is self.waiting[0] and self.pages.num_free <= self._refused[1]):
            return started
        return started + self.waiting[: max(min(self._max_prefill_rows - len(started), len(self._free_slots)), 0)]

    @property
    def can_begin(self) -> bool:
        """Whether a waiting request may get a slot, if there are pages for it."""
        return bool(self.waiting and self._free_slots and (self.admits or not self.running))

    def add(self, request: Request) -> None:
        """Queues a request, whether new or preempted."""
        request.rank = self._rank
        bisect.insort(self.waiting, request, key=lambda r: r.order)

    def plan(self, split: tuple[Bucket, ...] = ()) -> StepPlan | None:
        """The next step, or None where no request can run before an unread step is read. Updates the requests it plans.

        Args:
            split: the buckets in which a step may choose later than its forward pass runs.
        """
        return plan_step((self,), split)

    def decodable(self) -> tuple[list[Request], list[Request]]:
        """The requests that may decode in the next step, and those that may if their rows choose late."""
        decoding = sorted(filter(self._may_decode, self.running), key=lambda r: r.order)
        waiting = [r for r in decoding if self._waits(r)]
        ready = [r for r in decoding if not self._waits(r)] if waiting else decoding
        return ready, [r for r in waiting if r.constraint]

    def plan_rows(self, ready: list[Request], drafts: int, *, prompts: bool) -> "_Rows | None":
        """Rows for the next step, with their pages, of those that may decode and, unless they wait, of prompts.

        None where one lacks a page while steps are unread: the victim is known once all are read.
        """
        budget, most = self.settings.max_num_batched_tokens, self._max_prefill_tokens[drafts]
        prefill = [] if self.settings.mixed or not prompts else self._plan_prefill(min(budget, most))
        decode = [] if prefill else self._plan_decode(ready, budget, drafts)
        if decode is None:
            return None
        if self.settings.mixed and prompts:
            prefill = self._plan_prefill(min(budget - len(decode) * (drafts + 1), most))
        return _Rows(prefill, decode)

    def commit(self, rows: "_Rows", drafts: int, *, needs_full: bool, split: bool) -> StepPlan:
        """The plan of these rows, whose requests count on it from now on."""
        prefill, decode = rows
        deltas: list[tuple[int, int, int]] = []
        for request in decode:
            deltas += self._unsent(request, len(request.pages))
        for row in prefill:
            request, end = row.request, row.start + row.length
            covered = self._reserved_at_first(request) if row.final else end
            deltas += self._unsent(request, pages_needed(self.settings, covered))
            request.computed = end
        verified = tuple(min(drafts, request.held_drafts, request.num_drafts) for request in decode)
        for request in (*(row.request for row in prefill if row.final), *decode):
            request.state, request.held_drafts = RequestState.DECODE, drafts
        return StepPlan(tuple(prefill), tuple(decode), tuple(deltas), needs_full, drafts, verified, split=split)

    def dispatched(self, plan: StepPlan) -> None:
        """The plan's array has been packed: the device will know these slots."""
        self._unread += bool(plan.requests)
        for row in plan.prefill:
            row.request.needs_reset = False
        for request, most in self._most_tokens(plan):
            request.unread_steps += 1
            request.unread_least += min(most, 1)
            request.unread_most += most

    def read(self, plan: StepPlan) -> None:
        """The output of the oldest unread plan has been read; its tokens have not been added to the requests yet."""
        self._unread -= bool(plan.requests)
        for request, most in self._most_tokens(plan):
            request.unread_steps -= 1
            request.unread_least -= min(most, 1)
            request.unread_most -= most
            if request.state is RequestState.FINISHED and not request.unread_steps:
                self._give_back(request)

    def publish(self, request: Request, written: int) -> None:
        """Lets others share the request's pages whose KV is final. Of its known tokens the first `written` have their KV."""
        if self.cache is None:
            return
        final = self.cache.final_pages(len(request.tokens), written)
        for column in range(request.published, final):
            request.node = self.cache.publish(request.node, request.tokens, column, request.pages[column])
            request.published = column + 1
            state = request.taken_states.pop(request.published * self.settings.page_size, None)
            if state is not None:
                assert self.snapshots is not None
                self.snapshots.keep(request.node, state)

    def finish(self, request: Request) -> None:
        """Ends a request in any state. Slot and pages come back once no unread step names them."""
        if request.state is RequestState.WAITING:
            self.waiting.remove(request)
        else:
            self.running.remove(request)
        self.admits = True
        request.state = RequestState.FINISHED
        if not request.unread_steps:
            self._give_back(request)

    def preempt(self, request: Request) -> None:
        """Takes slot and pages from a running request without unread steps, and queues it again by its arrival."""
        self.running.remove(request)
        self._give_back(request)
        request.state = RequestState.WAITING
        request.preempted_time = time.monotonic()
        request.num_preemptions += 1
        self.num_preemptions += 1
        self.admits = False
        self.add(request)

    def reserved(self, request: Request, drafts: int) -> int:
        """KV slots that the request's next decode step may need. KV past its last possible token is never read."""
        verified = min(drafts, request.held_drafts, request.num_drafts)
        slots = reserved_slots(len(request.tokens), k=drafts, verified=verified, unread_most=request.unread_most)
        return min(slots, request.max_total)

    def reset_prefix_cache(self) -> None:
        """No request finds earlier pages any more; those of running requests stay theirs."""
        self.pages.forget_texts()

    def _may_decode(self, request: Request) -> bool:
        surely_over = len(request.tokens) + request.unread_least >= request.max_total
        return request.state is RequestState.DECODE and not surely_over

    def _waits(self, request: Request) -> bool:
        """For the host to see its tokens."""
        return request.needs_readback and request.unread_steps > 0

    def _plan_decode(self, ready: list[Request], budget: int, drafts: int) -> list[Request] | None:
        """Rows that decode. None where one lacks a page while steps are unread: the victim is known once all are read."""
        decode: list[Request] = []
        for request in ready:
            if request.state is not RequestState.DECODE or budget < drafts + 1:  # it may have been preempted just now
                continue
            if self._grow(request, drafts, decode):
                decode.append(request)
                budget -= drafts + 1
            elif self._unread:
                return None
        return decode

    def plan_early(
        self, early: list[Request], decode: list[Request], drafts: int, split: tuple[Bucket, ...]
    ) -> list[Request]:
        """Rows that choose late, to come after `decode` in a step without prompts: those for which there is room."""
        most = max((b.decode_rows for b in split if b.drafts == drafts), default=0)
        room = max(min(most, self.settings.max_num_batched_tokens // (drafts + 1)) - len(decode), 0)
        rows: list[Request] = []
        for request in early[:room]:
            # Without a page it waits until the unread steps are read: only then it may preempt.
            if self._grow(request, drafts, [*decode, *rows]):
                rows.append(request)
        return rows

    def _plan_prefill(self, budget: int) -> list[PrefillRow]:
        rows: list[PrefillRow] = []
        found_pages = self.settings.max_pages  # that a step can tell the device of: see `InputLayout`
        started = sorted((r for r in self.running if r.state is RequestState.PREFILL), key=lambda r: r.order)
        for request in [*started, *self.waiting]:
            if budget <= 0 or len(rows) == self._max_prefill_rows:
                break
            cached = restored = 0
            if request.state is RequestState.WAITING:
                if not self._admit(request, found_pages):
                    break  # later ones wait too: a long prompt must not starve
                found_pages -= request.published
                cached = _counted_cached(request)
                if self.snapshots is not None and request.published:
                    restored = self.snapshots.find(request.node)
            start, target = request.computed, request.prefill_target
            length, kept = self._cut(request, min(budget, target - start))
            final = start + length == target
            forced = request.tokens[-1] if final and request.resuming else NO_ID
            next_id = NO_ID if final else request.tokens[start + length]
            rows.append(PrefillRow(request, start, length, final, forced, next_id, cached, restored, kept))
            budget -= length
        return rows

    def _cut(self, request: Request, length: int) -> tuple[int, int]:
        """Of a chunk of at most `length` tokens: its length, and the slot for the state after it, or 0."""
        if self.snapshots is None:
            return length, 0
        settings, start = self.settings, request.computed
        cut = next_cut(
            start,
            request.prefill_target,
            page_size=settings.page_size,
            interval=settings.state_interval,
            parting=request.parting,
        )
        if cut is None or start + length < cut:
            return length, 0
        slot = self.snapshots.take()
        if slot is None:
            return length, 0
        request.taken_states[cut] = slot
        return cut - start, slot

    def _admit(self, request: Request, found_pages: int) -> bool:
        """Gives a waiting request a slot and the pages of all its known tokens. False: it has to wait.

        found_pages: most pages that may come from the prefix cache.
        """
        if not self.can_begin:
            return False
        found, node, known = self._find(request)
        if len(found) > found_pages:
            return False
        slots = max(self._reserved_at_first(request), len(request.tokens) + 1)
        self.pages.share(found)
        fresh = self.pages.allocate(pages_needed(self.settings, slots) - len(found))
        if fresh is None:
            self.pages.free(found)
            self._refused = request, self.pages.num_free
            return False
        request.pages, request.published, request.node = [*found, *fresh], len(found), node
        request.computed, request.parting = len(found) * self.settings.page_size, known * self.settings.page_size
        if not request.num_preemptions:
            request.num_cached_tokens = request.computed
        request.slot, request.state = self._free_slots.pop(), RequestState.PREFILL
        self.control.admitted(request.slot)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def _find(self, request: Request) -> Match:
        """Pages of the prefix cache that hold the request's beginning. At least one token is computed again."""
        if self.cache is None or _is_scored(request):
            return Match([], request.cache_salt, 0)
        most = (request.prefill_target - 1) // self.settings.page_size
        match = self.cache.match(request.tokens, most, request.cache_salt)
        self.prefix_queries += request.prefill_target
        self.prefix_hits += len(match.pages) * self.settings.page_size
        return match

    def prefix_pages(self, request: Request) -> int:
        """How many pages the prefix cache has of the request's beginning, if it began now."""
        if self.cache is None or _is_scored(request):
            return 0
        most = (request.prefill_target - 1) // self.settings.page_size
        return len(self.cache.match(request.tokens, most, request.cache_salt).pages)

    def _reserved_at_first(self, request: Request) -> int:
        """KV slots that the request's first decode step may need, however many drafts it is going to have."""
        most = self.settings.num_speculative_tokens
        return min(reserved_slots(len(request.tokens), k=most, verified=most), request.max_total)

    def _grow(self, request: Request, drafts: int, planned: list[Request]) -> bool:
        """Makes the request's pages cover its next step, preempting longer requests if need be.

        False: it was preempted itself, or no request can be preempted because steps are unread.
        """
        while True:
            missing = pages_needed(self.settings, self.reserved(request, drafts)) - len(request.pages)
            if missing <= 0:
                return True
            pages = self.pages.allocate(missing)
            if pages is not None:
                request.pages += pages
                return True
            if self._unread:
                return False
            # Requests already planned for this step keep their pages: their rows are about to use them.
            victims = [r for r in self.running if r.state is RequestState.DECODE and r not in planned]
            victim = max(victims, key=lambda r: (len(r.tokens), r.order))
            self.preempt(victim)
            if victim is request:
                return False

    def _give_back(self, request: Request) -> None:
        if request.slot:
            self._free_slots.append(request.slot)
            self.pages.free(request.pages)
        if self.snapshots is not None:
            for state in request.taken_states.values():
                self.snapshots.give_back(state)
            request.taken_states.clear()
        request.slot, request.pages, request.sent_pages, request.computed, request.published = 0, [], 0, 0, 0
        request.needs_reset, request.held_drafts = True, 0

    def _most_tokens(self, plan: StepPlan) -> list[tuple[Request, int]]:
        """How many tokens each row of a plan can add."""
        prefill = [(row.request, int(row.final and row.forced == NO_ID)) for row in plan.prefill]
        return prefill + [(r, verified + 1) for r, verified in zip(plan.decode, plan.verified, strict=True)]

    def _unsent(self, request: Request, upto: int) -> list[tuple[int, int, int]]:
        upto = min(upto, len(request.pages))
        if upto <= request.sent_pages:
            return []
        deltas = [(request.slot, column, request.pages[column]) for column in range(request.sent_pages, upto)]
        request.sent_pages = upto
        return deltas


def plan_step(
    ranks: Sequence[Scheduler], split: tuple[Bucket, ...] = (), delay: PrefillDelay | None = None
) -> StepPlan | None:
    """The next step of all ranks, see `Scheduler.plan`.

    A rank plans its rows as if it were alone, and some may have none. But what they run is one executable: the number of
    drafts is the same for all, and rows choose late on all of them or on none.

    Args:
        delay: lets prompts wait for those of other ranks (default: they never do).
    """
    candidates = [rank.decodable() for rank in ranks]
    if not split or any(r.state is RequestState.PREFILL for rank in ranks for r in rank.running):
        candidates = [(ready, []) for ready, _ in candidates]
    decodable = [[*ready, *early] for ready, early in candidates]
    held = delay is not None and any(decodable) and delay.holds(ranks)
    drafts = _choose_drafts(ranks, decodable, prompts=not held)
    rows = [rank.plan_rows(ready, drafts, prompts=not held) for rank, (ready, _) in zip(ranks, candidates, strict=True)]
    if held and not any(
        own.decode for own in rows if own
    ):  # what could have decoded had no pages, and waits itself now
        rows = [own and rank.plan_rows([], drafts, prompts=True) for rank, own in zip(ranks, rows, strict=True)]
    late = False
    if not any(own.prefill for own in rows if own):
        for rank, own, (_, early) in zip(ranks, rows, candidates, strict=True):
            if own is not None:
                waited = rank.plan_early(early, own.decode, drafts, split)
                own.decode.extend(waited)
                late = late or bool(waited)
    planned = [own or _Rows([], []) for own in rows]
    if not any(own.prefill or own.decode for own in planned):
        return None
    needs_full = any(r.needs_full for own in planned for r in (*(row.request for row in own.prefill), *own.decode))
    # What prompts turned out to run may need a bucket that has no such windows: fewer drafts are always right.
    prompt_tokens = max(sum(row.length for row in own.prefill) for own in planned)
    drafts = _at_most(drafts, ranks[0].draft_choices(prompt_tokens, full=needs_full))
    return joined(
        [rank.commit(own, drafts, needs_full=needs_full, split=late) for rank, own in zip(ranks, planned, strict=True)]
    )


def _choose_drafts(ranks: Sequence[Scheduler], ready: list[list[Request]], *, prompts: bool) -> int:
    """The number of drafts of the next step, of each rank's rows that may decode and, unless they wait, of prompts."""
    of_ranks = [rank.prompts if prompts else [] for rank in ranks]
    begin = [r for own in of_ranks for r in own]
    if begin and not ranks[0].settings.mixed:
        ready = [[] for _ in ranks]
    decode = [r for own in ready for r in own]
    requests = [*decode, *begin]
    full = any(r.needs_full for r in requests)
    # At most: the prefix cache may have some of them.
    prompt_tokens = max(sum(r.prefill_target - r.computed for r in own) for own in of_ranks)
    choices = ranks[0].draft_choices(prompt_tokens, full=full)
    if len(choices) == 1 or not requests:
        return choices[-1]
    return ranks[0].control.choose(
        Load(
            slots=[r.slot for r in decode],
            wanted=[r.num_drafts for r in decode],
            most=max(r.num_drafts for r in requests),
            prompts=bool(begin),
            full=full,
            choices=choices,
            ranks=tuple(map(len, ready)),
            tokens=max(sum(len(r.tokens) for r in own) for own in ready),
        )
    )


def _is_scored(request: Request) -> bool:
    """Nothing passes through a step again just to be scored: what is to be scored is not looked up."""
    return request.params.prompt_logprobs is not None and not request.resuming


def _at_most(drafts: int, choices: tuple[int, ...]) -> int:
    """The most of the choices that is not over `drafts`; the fewest if all are."""
    return max((k for k in choices if k <= drafts), default=choices[0])


def _counted_cached(request: Request) -> int:
    """Of a request that begins or resumes: how many tokens the prefix cache had, if its penalties see any of them."""
    params = request.params
    unseen = request.computed
    if params.repetition_penalty != 1:
        unseen = 0
    elif params.presence_penalty or params.frequency_penalty:
        unseen = request.prompt_len
    return request.computed if request.computed > unseen else 0
