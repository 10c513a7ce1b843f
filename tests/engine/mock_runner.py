"""A runner without a model: it keeps paged memory as the device would and checks every access.

The next token is a hash of all tokens that the request's page table shows, so a wrong page, a lost page delta or a stale
slot changes the text. How many drafts of a window are accepted is another hash. The draft's memory holds, as a draft's
KV does, the token that follows each position. Of penalties it checks that each token has been counted, once; of masks,
which say how many ids their request had put out, that they are those of the step that chooses.
"""

import collections
from collections.abc import Callable

import numpy as np

from jaxspec.config import Settings
from jaxspec.engine.batch import RESET_INTS, RESET_STOPS, InputLayout, bucket_for
from jaxspec.engine.buckets import Bucket, bucket_table
from jaxspec.engine.handoff import FLAG_DONE, FLAG_NAN
from jaxspec.engine.pages import PADDING_PAGE
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.engine.state import MAX_LEN, NUM_DRAFTS, SEED_LOW
from jaxspec.engine.step_output import StepOutput
from jaxspec.sampling.params import MAX_LOGPROBS

JUNK = -2


def next_token(tokens, seed: int, vocab: int) -> int:
    return hash((seed, *tokens)) % vocab  # of integers: the same in every process


class MockRunner:
    """Has the runner's interface. What a step changes on the device happens at its dispatch; `read` only tells of it.

    Args:
        rank: it is what this rank of a `MockRanks` has.

    Attributes:
        plans: what was dispatched, for assertions.
        touched: of each slot, the last KV slot of its request that the latest step wrote.
        shared: whether a page's text is known to others, so that writing it is a fault.
        on_dispatch: called with each plan before it runs.
        nan_in: id of a request whose rows are NaN.
    """

    def __init__(self, settings: Settings, vocab: int, rank: int = 0):
        self.settings, self.vocab = settings, vocab
        self._first_slot = rank * settings.max_slots
        self.drafts = 0  # of the step that runs
        self.buckets = bucket_table(settings)
        self.num_pending = 0
        self.expert_load = None
        self.split_ready: tuple[Bucket, ...] = ()
        self.begun: StepPlan | None = None
        self._begun: tuple[InputLayout, np.ndarray] | None = None
        self.mask_shape = settings.window, 1
        self._layouts = {b: InputLayout(b, settings.page_size, settings.max_pages) for b in self.buckets}
        self.plans: list[StepPlan] = []
        self.touched: dict[int, int] = {}
        self.shared: Callable[[int], bool] = lambda _page: False
        self.on_dispatch: Callable[[StepPlan], None] = lambda _plan: None
        self.nan_in: str | None = None
        self._queue: collections.deque[StepOutput] = collections.deque()
        S, page = settings.max_slots, settings.page_size
        self.memory = np.full((settings.num_pages, page), -1)
        self.draft_memory = np.full((settings.num_pages, page), -1)
        self.page_table = np.zeros((S, settings.max_pages), int)
        self.seq_len, self.last_token, self.max_len = np.zeros(S, int), np.zeros(S, int), np.zeros(S, int)
        self.done = np.zeros(S, bool)
        self.masks = np.full(S, JUNK)
        self.held, self.num_drafts = np.zeros(S, int), np.zeros(S, int)
        self.seeds = [0] * S
        self.stop_ids: list[set[int]] = [set()] * S
        self.counted: list[list[int]] = [[] for _ in range(S)]  # positions, in the order in which they were
        # What a recurrent layer would have read, the kept states after those of slots.
        self.states: list[list[int]] = [[JUNK] for _ in range(S + settings.state_snapshots)]

    @property
    def in_flight(self) -> int:
        return len(self._queue) + (self.begun is not None)

    def write_masks(self, slots: np.ndarray, verified: np.ndarray, counts: np.ndarray, words: np.ndarray) -> None:
        assert len(words) == counts.sum()
        assert len(set(slots.tolist())) == len(slots)
        self.masks[slots] = words[np.cumsum(counts) - counts, 0]
        self.held[slots] = np.minimum(self.held[slots], verified)

    def slot_of(self, request: Request) -> int:
        """In this rank's arrays."""
        return request.slot - self._first_slot

    def dispatch(self, plan: StepPlan, bucket: Bucket | None = None) -> None:
        assert self.begun is None
        self.on_dispatch(plan)
        self.plans.append(plan)
        layout = self._layouts[bucket or bucket_for(self.split_ready if plan.split else self.buckets, plan)]
        packed = layout.pack(plan, self._first_slot)
        if plan.split:
            assert self._queue, "nothing to wait for"
            self.begun, self._begun = plan, (layout, packed)
        else:
            self._run(plan, layout, packed)

    def choose(self) -> None:
        """Here the whole step: nothing else is dispatched since it began."""
        assert not self._queue, "a step before is not read"
        assert self.begun is not None
        assert self._begun is not None
        plan, self.begun = self.begun, None
        self._run(plan, *self._begun)

    def _run(self, plan: StepPlan, layout: InputLayout, packed: np.ndarray) -> None:
        self.drafts = layout.bucket.drafts
        inputs = layout.split(packed)
        self.full = layout.bucket.variant == "full"
        # A step that is told of no rules has none.
        assert inputs.needs_full or not any(request.needs_full for request in plan.requests)
        self._requests = {self.slot_of(request): request for request in plan.requests}
        self._decoding = {self.slot_of(request) for request in plan.decode}
        for fields, record in zip(inputs.prefill, inputs.resets, strict=True):
            if slot := record[0]:
                if self.full:
                    self.counted[slot] = list(range(fields[6]))
                ints = record[RESET_INTS:RESET_STOPS]
                low, high = ints[SEED_LOW:][:2].view(np.uint32)
                self.seeds[slot] = int(low) | int(high) << 32
                self.max_len[slot], self.done[slot] = ints[MAX_LEN], False
                self.held[slot], self.num_drafts[slot] = 99, ints[NUM_DRAFTS]  # what a former request has left
                self.stop_ids[slot] = {int(t) for t in record[RESET_STOPS:] if t >= 0}
                self.page_table[slot] = 0
        for slot, column, page in inputs.deltas:
            if slot:
                self.page_table[slot, column] = page
        self._check(plan)
        for row in plan.prefill:
            if row.restored:
                self.states[self.slot_of(row.request)] = list(self.states[row.restored])
        self.touched = {}
        rows: list[tuple[list[int], int]] = []  # emitted ids, accepted drafts
        offset = 0
        for fields in inputs.prefill[: len(plan.prefill)]:
            chunk = inputs.chunk_ids[offset : offset + fields[2]]
            offset += fields[2]
            rows.append((self._prefill(*fields[:2], chunk, *fields[3:6]), 0))
        for slot, verified in zip(inputs.decode_slots[: len(plan.decode)], plan.verified, strict=True):
            if not self.done[slot]:
                assert verified == min(self.drafts, self.held[slot], self.num_drafts[slot])
            rows.append(self._decode(slot))
        for row in plan.prefill:
            if row.kept:
                assert not row.final, "what comes after the prompt would be in it"
                self.states[row.kept] = list(self.states[self.slot_of(row.request)])
        slots = [self.slot_of(r) for r in plan.requests]
        nan = np.array([r.id == self.nan_in for r in plan.requests], bool)
        ids = np.full((len(rows), self.drafts + 1), JUNK)
        for row, (emitted, _) in enumerate(rows):
            ids[row, : len(emitted)] = emitted
        self._queue.append(
            StepOutput(
                plan,
                layout.bucket,
                np.array([len(emitted) for emitted, _ in rows], int),
                np.array([0] * len(plan.prefill) + list(plan.verified), int),
                np.array([accepted for _, accepted in rows], int),
                np.where(self.done[np.array(slots, int)], FLAG_DONE, 0) | np.where(nan, FLAG_NAN, 0),
                ids,
                -ids.astype(np.float32),
                np.full((len(rows), self.settings.num_speculative_tokens), JUNK),
                top_ids=np.repeat(ids[..., None], MAX_LOGPROBS, axis=2),
                top_logprobs=np.repeat(-ids.astype(np.float32)[..., None], MAX_LOGPROBS, axis=2),
            )
        )

    def read(self) -> StepOutput:
        return self._queue.popleft()

    def _prefill(self, slot, start, chunk, final, forced, next_id) -> list[int]:
        following = [*chunk[1:].tolist(), JUNK]
        for position, (token, after) in enumerate(zip(chunk, following, strict=True), start):
            self._write(slot, position, token, after)
        self.seq_len[slot] = start + len(chunk)
        self.states[slot] = [*(self.states[slot] if start else []), *chunk.tolist()]
        self._count(slot, start, len(chunk))
        if not final:
            assert next_id >= 0, "a middle chunk must know the token that follows"
            self._write(slot, self.seq_len[slot] - 1, chunk[-1], next_id)
            return []
        if forced < 0:
            self._check_mask(slot)
        token = forced if forced >= 0 else self._sample(slot)
        self._count(slot, self.seq_len[slot], 1)
        self._write(slot, self.seq_len[slot] - 1, chunk[-1], token)
        self.last_token[slot] = token
        self._draft(slot)
        if forced >= 0:
            return []
        self.done[slot] = self._stops(slot, token)
        return [token]

    def _decode(self, slot) -> tuple[list[int], int]:
        if self.done[slot]:
            return [], 0
        self._check_mask(slot)
        base, n = self.seq_len[slot], self.drafts + 1
        for i in range(n):  # the window: drafts are junk until they turn out to be right
            self._write(slot, base + i, self.last_token[slot] if i == 0 else JUNK, JUNK)
        verified = min(self.drafts, self.held[slot], self.num_drafts[slot])
        accepted = hash((self.seeds[slot], int(base))) % (int(verified) + 1)
        emitted: list[int] = []
        for _ in range(accepted + 1):
            token, position = self.last_token[slot], self.seq_len[slot]
            self._write(slot, position, token, JUNK)
            self.states[slot].append(int(token))
            self.seq_len[slot] += 1
            self.last_token[slot] = self._sample(slot)
            self._count(slot, self.seq_len[slot], 1)
            self._write(slot, position, token, self.last_token[slot])
            emitted.append(self.last_token[slot])
            if self._stops(slot, emitted[-1]):
                self.done[slot] = True
                break
        # What comes after a stop is never read: the device's own length goes on to the end of what was accepted.
        self.seq_len[slot] = base + accepted + 1
        self._draft(slot)
        return emitted, accepted

    def _count(self, slot, start, length) -> None:
        if self.full:
            self.counted[slot] += range(start, start + length)

    def _check_mask(self, slot) -> None:
        """Before a token is chosen: the host had seen all before it. Of a request that the host has ended nobody cares."""
        request = self._requests[slot]
        if request.constraint and request.state is not RequestState.FINISHED:
            sequence = self.seq_len[slot] + (slot in self._decoding)  # the newest token of a decode row is not written
            assert self.masks[slot] == sequence - request.prompt_len, "masks of another step"

    def _check_counts(self, slot) -> None:
        """Before a token is chosen: penalties see every token that they are about."""
        params, length = self._requests[slot].params, self.seq_len[slot]
        if params.repetition_penalty != 1:
            first = 0
        elif params.presence_penalty or params.frequency_penalty:
            first = self._requests[slot].prompt_len
        else:
            return
        assert [p for p in self.counted[slot] if p >= first] == list(range(first, length)), "wrong counts"

    def _draft(self, slot) -> None:
        """Draft steps after the newest token: they write the draft's memory only."""
        self.held[slot] = self.drafts
        for i in range(self.drafts - 1):
            self._place(slot, self.seq_len[slot] + i, self.draft_memory, JUNK)

    def _stops(self, slot, token) -> bool:
        return token in self.stop_ids[slot] or self.seq_len[slot] + 1 >= self.max_len[slot]

    def _write(self, slot, position, token, after) -> None:
        self._place(slot, position, self.memory, token)
        if self.settings.num_speculative_tokens:
            self._place(slot, position, self.draft_memory, after)

    def _place(self, slot, position, memory, value) -> None:
        """Positions past the request's last possible token may lie on the padding page, and so may the context's end."""
        column = position // self.settings.page_size
        page = self.page_table[slot, column] if column < self.settings.max_pages else PADDING_PAGE
        if page == PADDING_PAGE:
            assert position >= self.max_len[slot], f"slot {slot} has no page for position {position}"
        else:
            assert page in self._owned[slot], f"slot {slot} writes page {page}, which it does not own"
            assert not self.shared(page), f"slot {slot} writes page {page}, which others may read"
            self.touched[slot] = max(self.touched.get(slot, 0), position)
        memory[page, position % self.settings.page_size] = value

    def _sample(self, slot) -> int:
        self._check_counts(slot)
        size, length = self.settings.page_size, self.seq_len[slot]
        positions = np.arange(length)
        places = self.page_table[slot, positions // size], positions % size
        tokens = self.memory[places].tolist()
        if self.settings.state_snapshots or not self.settings.prefix_caching:
            assert self.states[slot] == tokens, "the state is not the request's"
        if self.settings.num_speculative_tokens:
            assert self.draft_memory[places].tolist()[:-1] == tokens[1:], "the draft's memory is not the request's"
        return next_token(tokens, self.seeds[slot], self.vocab)

    def _check(self, plan: StepPlan) -> None:
        """Invariants of every plan: the budget, one row a request, no padding page, no page that another may write."""
        settings = self.settings
        requests: list[Request] = list(plan.requests)
        assert len({r.id for r in requests}) == len(requests)
        assert len({r.slot for r in requests}) == len(requests)
        assert all(1 <= self.slot_of(r) < settings.max_slots for r in requests)
        assert plan.prefill_tokens + len(plan.decode) * (plan.drafts + 1) <= settings.max_num_batched_tokens
        self._owned = {self.slot_of(r): set(r.pages) for r in requests}
        for request in requests:
            assert PADDING_PAGE not in request.pages
        for request in plan.decode:
            assert not (request.needs_readback and any(request in out.plan.requests for out in self._queue))
        pages = [page for r in requests for page in r.pages[r.published :]]
        assert len(set(pages)) == len(pages), "a page belongs to two requests"


class MockRanks:
    """As many of them as the settings have ranks, which run each step in one bucket: the least that holds what each does.

    Attributes:
        ranks: one `MockRunner` each.
        others: see `MockRunner`; of all ranks together.
    """

    def __init__(self, settings: Settings, vocab: int):
        self.settings = settings
        self.ranks = [MockRunner(settings, vocab, rank) for rank in range(settings.data_parallel_size)]
        self.buckets, self.num_pending, self.mask_shape = self.ranks[0].buckets, 0, self.ranks[0].mask_shape
        self.expert_load = None
        self.split_ready: tuple[Bucket, ...] = ()
        self.begun: StepPlan | None = None
        self.plans: list[StepPlan] = []
        self.on_dispatch: Callable[[StepPlan], None] = lambda _plan: None
        self._plans: collections.deque[StepPlan] = collections.deque()

    @property
    def in_flight(self) -> int:
        return self.ranks[0].in_flight

    def write_masks(self, slots: np.ndarray, verified: np.ndarray, counts: np.ndarray, words: np.ndarray) -> None:
        numbers, own = np.divmod(slots, self.settings.max_slots)
        for number, rank in enumerate(self.ranks):
            mine = numbers == number
            rank.write_masks(own[mine], verified[mine], counts[mine], words[np.repeat(mine, counts)])

    def dispatch(self, plan: StepPlan) -> None:
        assert all(request.rank == number for number, part in enumerate(plan.parts) for request in part.requests)
        self.on_dispatch(plan)
        self.plans.append(plan)
        self._plans.append(plan)
        bucket = bucket_for(self.split_ready if plan.split else self.buckets, plan)
        for rank, part in zip(self.ranks, plan.parts, strict=True):
            rank.dispatch(part, bucket)
        self.begun = plan if plan.split else None

    def choose(self) -> None:
        self.begun = None
        for rank in self.ranks:
            rank.choose()

    def read(self) -> StepOutput:
        plan, outputs = self._plans.popleft(), [rank.read() for rank in self.ranks]

        def of_all(name: str) -> np.ndarray:
            each = [np.split(getattr(output, name), [len(output.plan.prefill)]) for output in outputs]
            return np.concatenate([rows for kind in zip(*each, strict=True) for rows in kind])

        arrays = ("emitted", "verified", "accepted", "flags", "ids", "logprobs", "drafts", "top_ids", "top_logprobs")
        return StepOutput(plan, outputs[0].bucket, **{name: of_all(name) for name in arrays})
