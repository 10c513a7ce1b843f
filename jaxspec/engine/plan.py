"""What one step does, as the scheduler decides it on the host. Nothing here needs jax."""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxspec.config import Settings, pages_for
from jaxspec.engine.request import Request

# Where a token id may be missing: no forced token, no known next token, an unused stop id.
NO_ID = -1


@dataclass(frozen=True)
class PrefillRow:
    """One chunk of one request's known tokens.

    Attributes:
        start, length: the chunk is tokens[start : start + length].
        final: it holds the last known token, so a next token follows.
        forced: the token to take instead of sampling one: a preempted request goes on with its own text.
        next_id: the token after the chunk where it is known (middle chunks), which drafts read; NO_ID otherwise.
        cached: how many tokens before the chunk no step has read, because the prefix cache had them, and penalties count.
        restored: the slot of a kept state that the request goes on from; 0 for none. See `snapshots`.
        kept: the slot for the state after the chunk; 0 for none.
    """

    request: Request
    start: int
    length: int
    final: bool
    forced: int = NO_ID
    next_id: int = NO_ID
    cached: int = 0
    restored: int = 0
    kept: int = 0


@dataclass(frozen=True)
class StepPlan:
    """What one step does: prompt chunks first, then decode rows; and the pages that its rows have newly been given.

    Of several ranks what each does, see `joined`: prompt chunks of all, then decode rows of all, in the order of the ranks.

    Attributes:
        drafts: how many drafts a decode row may verify, and how many every row proposes.
        verified: for each decode row, the drafts that it verifies: those that it holds and its request allows; at most, for
            what is looked up may not be found.
        split: some decode rows have a constraint whose masks follow from a step that is not read yet. The step's forward
            pass may begin; its rows choose once all steps before it are read.
        ranks: the plans of the ranks, if there are several.
    """

    prefill: tuple[PrefillRow, ...]
    decode: tuple[Request, ...]
    page_deltas: tuple[tuple[int, int, int], ...] = ()  # (slot, column, page)
    needs_full: bool = False
    drafts: int = 0
    verified: tuple[int, ...] = ()
    split: bool = False
    ranks: "tuple[StepPlan, ...]" = ()

    @property
    def parts(self) -> "tuple[StepPlan, ...]":
        """What each rank does, be there several or one."""
        return self.ranks or (self,)

    @property
    def prefill_tokens(self) -> int:
        return sum(row.length for row in self.prefill)

    @property
    def requests(self) -> tuple[Request, ...]:
        """Of each row, prompt rows before decode rows."""
        return (*(row.request for row in self.prefill), *self.decode)


def joined(ranks: Sequence[StepPlan]) -> StepPlan:
    """One step of all ranks, whose plans have the same number of drafts and choose alike: early or late."""
    first, *others = ranks
    if not others:
        return first
    assert all((plan.drafts, plan.split) == (first.drafts, first.split) for plan in others)
    return StepPlan(
        prefill=tuple(row for plan in ranks for row in plan.prefill),
        decode=tuple(request for plan in ranks for request in plan.decode),
        page_deltas=tuple(delta for plan in ranks for delta in plan.page_deltas),
        needs_full=any(plan.needs_full for plan in ranks),
        drafts=first.drafts,
        verified=tuple(count for plan in ranks for count in plan.verified),
        split=first.split,
        ranks=tuple(ranks),
    )


def pages_needed(settings: Settings, slots: int) -> int:
    """Pages that cover `slots` KV slots of a request; slots past the context limit live on the padding page."""
    return pages_for(min(slots, settings.max_model_len), settings.page_size)
