"""A runner without a model: it keeps paged memory as the device would and checks every access.

The next token is a hash of all tokens that the request's page table shows, so a wrong page, a lost page delta or a stale
slot changes the text.
"""

import collections

import numpy as np

from jaxspec.config import Settings
from jaxspec.engine.batch import RESET_INTS, InputLayout, StepPlan, bucket_for
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.runner import StepOutput
from jaxspec.engine.state import SEED_LOW


def next_token(tokens, seed: int, vocab: int) -> int:
    return hash((seed, *tokens)) % vocab  # of integers: the same in every process


class MockRunner:
    """Has the runner's interface. `plans` keeps what was dispatched, for assertions."""

    window = 1

    def __init__(self, settings: Settings, vocab: int):
        self.settings, self.vocab = settings, vocab
        self.buckets = bucket_table(settings)
        self.plans: list[StepPlan] = []
        self._queue: collections.deque[StepOutput] = collections.deque()
        S, page = settings.max_slots, settings.page_size
        self.memory = np.full((settings.num_pages, page), -1)
        self.page_table = np.zeros((S, settings.max_pages), int)
        self.seq_len, self.last_token = np.zeros(S, int), np.zeros(S, int)
        self.seeds = [0] * S

    @property
    def in_flight(self) -> int:
        return len(self._queue)

    def dispatch(self, plan: StepPlan) -> None:
        self.plans.append(plan)
        bucket = bucket_for(self.buckets, plan)
        layout = InputLayout(bucket, self.settings.page_size)
        inputs = layout.split(layout.pack(plan))
        for slot, column, page in inputs.deltas:
            if slot:
                self.page_table[slot, column] = page
        for record in inputs.resets:
            if record[0]:
                low, high = record[RESET_INTS + SEED_LOW :][:2].view(np.uint32)
                self.seeds[record[0]] = int(low) | int(high) << 32
        self._check(plan)
        emitted, ids = [], []
        offset = 0
        for slot, start, length, final, forced, next_id in inputs.prefill[: len(plan.prefill)]:
            chunk = inputs.chunk_ids[offset : offset + length]
            offset += length
            for position, token in enumerate(chunk, start):
                self._write(slot, position, token)
            self.seq_len[slot] = start + length
            if not final:
                assert next_id >= 0, "a middle chunk must know the token that follows"
            token = forced if forced >= 0 else self._sample(slot)
            self.last_token[slot] = token
            emitted.append(int(final and forced < 0))
            ids.append(token)
        for slot in inputs.decode_slots[: len(plan.decode)]:
            self._write(slot, self.seq_len[slot], self.last_token[slot])
            self.seq_len[slot] += 1
            self.last_token[slot] = self._sample(slot)
            emitted.append(1)
            ids.append(self.last_token[slot])
        logprobs = np.zeros((len(ids), 1), np.float32)
        self._queue.append(
            StepOutput(
                plan,
                np.array(emitted),
                np.zeros(len(ids), int),
                np.zeros(len(ids), int),
                np.array(ids)[:, None],
                logprobs,
            )
        )

    def read(self) -> StepOutput:
        return self._queue.popleft()

    def _write(self, slot: int, position: int, token: int) -> None:
        page = self.page_table[slot, position // self.settings.page_size]
        assert page in self._owned[slot], f"slot {slot} writes page {page}, which it does not own"
        self.memory[page, position % self.settings.page_size] = token

    def _sample(self, slot: int) -> int:
        size, length = self.settings.page_size, self.seq_len[slot]
        positions = np.arange(length)
        tokens = self.memory[self.page_table[slot, positions // size], positions % size]
        return next_token(tokens.tolist(), self.seeds[slot], self.vocab)

    def _check(self, plan: StepPlan) -> None:
        """Invariants of every plan: the budget, one row a request, no page in two requests, no padding page."""
        settings = self.settings
        requests = [row.request for row in plan.prefill] + list(plan.decode)
        assert len({r.id for r in requests}) == len(requests)
        assert len({r.slot for r in requests}) == len(requests)
        assert all(1 <= r.slot < settings.max_slots for r in requests)
        assert plan.prefill_tokens + len(plan.decode) * self.window <= settings.max_num_batched_tokens
        self._owned = {r.slot: set(r.pages) for r in requests}
        pages = [page for r in requests for page in r.pages]
        assert len(set(pages)) == len(pages), "a page belongs to two requests"
        assert 0 not in pages
