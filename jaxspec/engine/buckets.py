"""The fixed shapes that a step may have. One table drives the batch builder, the warm-up and the compile cache."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from jaxspec.config import Settings

Variant = Literal["lean", "full"]
Part = Literal["whole", "forward", "choose"]


@dataclass(frozen=True, order=True)
class Bucket:
    """Shape of one executable: up to P prompt tokens of E rows, D decode rows, and what its sampler can do.

    A decode row has a window of `drafts` + 1 tokens; a step verifies at most so many drafts a row, and proposes so many
    for the next one. Variant "lean" samples greedily or by temperature; "full" knows every sampling parameter and the likeliest
    alternatives. The tokens of a row that needs no more than "lean" are the same in both. On one device "full" has both
    samplers, and a step whose rows need no more than "lean" runs that one. An executable runs the whole step, or one of the two
    parts of it that a `StepPlan` may ask for.
    """

    prefill_tokens: int
    prefill_rows: int
    decode_rows: int
    variant: Variant
    drafts: int = 0
    part: Part = "whole"

    @property
    def window(self) -> int:
        return self.drafts + 1

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows

    @property
    def tokens(self) -> int:
        """T: tokens of the flat arrays."""
        return self.prefill_tokens + self.decode_rows * self.window

    @property
    def words(self) -> str:
        """For people who wait for it to be compiled."""
        if not self.prefill_rows:
            text = f"decode, {_count(self.decode_rows, 'row')}"
        else:
            text = f"prefill, {self.prefill_tokens} tokens of up to {_count(self.prefill_rows, 'prompt')}"
            text += f", beside {_count(self.decode_rows, 'decode row')}" if self.decode_rows else ""
        text += f", {_count(self.drafts, 'draft')}" if self.drafts else ""
        text += "" if self.part == "whole" else f", {self.part} only"
        return text if self.variant == "full" else f"{text}, greedy or by temperature"

    def __str__(self) -> str:
        drafts = f" of {self.drafts} drafts" if self.drafts else ""
        part = "" if self.part == "whole" else f", {self.part}"
        return f"prefill {self.prefill_tokens}x{self.prefill_rows}, decode {self.decode_rows}{drafts}, {self.variant}{part}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Sizes:
    """Of steps with one number of drafts and one sampler; None for the most there may be. What is over that is left out.

    Attributes:
        decode: rows of steps without prompts.
        prompts: of steps with prompts: prompt tokens, and decode rows beside them.
    """

    decode: tuple[int | None, ...]
    prompts: tuple[tuple[int | None, int | None], ...] = ()


# A prompt of any length, with few decode rows or many, should find a step that is not much larger.
PROMPT_SIZES: tuple[tuple[int | None, int | None], ...] = (
    (256, 16), (512, 16), (1024, 16), (None, 16), (256, None), (512, None), (1024, None), (2048, None), (None, None),
)  # fmt: skip
SIZES = Sizes((1, 4, 8, 16, 32, 64, 128, None), PROMPT_SIZES)
# Several devices tell each other numbers while they sample, which has not been tried in a branch of a graph: each sampler has
# executables of its own. Up to eight rows there is no lean sampler between four and eight: the full one costs little there, and
# its executable is better spent on a single row with every rule.
SIZES_OF_SEVERAL: dict[Variant, Sizes] = {
    "lean": Sizes((1, 4, 16, 32, 64, 128, None), PROMPT_SIZES),
    "full": Sizes((1, 8, 32, None), ((256, 16), (256, None), (1024, None), (2048, None), (None, None))),
}
# Where the number of drafts changes from step to step: for steps with none, with one and with the most. As many as `SIZES` has
# would be too many three times. These 24 lose little against it, with and without prompts, by what steps of an H200 were
# measured to take (tests/engine/test_adaptive_table.py). Many rows of padding cost hardly anything, but beside four rows 12 or
# 28 of them cost 3 %, and tokens of padding half of what a prompt's do. The first size of prompts is between the first two of
# `SIZES`, so that one prompt pads about as much. Steps with more prompt tokens take hardly longer with one draft than with none
# (docs/speculation.md), so there are none without drafts.
ADAPTIVE_SIZES = (
    Sizes((1, 4, 32, 64, None), ((384, None),)),
    Sizes((1, 16, 32, 64, None), ((384, None), (1024, None), (None, None))),
    Sizes((1, 4, 16, 32, 64, None), ((384, 16), (512, None), (1024, None), (None, None))),
)
# Where no model drafts: what is looked up is mostly right at every position or at none, so there is no single draft, and steps
# with none, which all rows have where nothing is found, are as near to a plain engine's as with none to change to.
LOOKED_UP_SIZES = (
    Sizes((1, 4, 8, 16, 32, 64, None), ((256, None), (512, None), (1024, None), (None, None))),
    Sizes((1, 4, 8, 16, 32, 64, None), ((512, 16), (512, None), (1024, None), (None, None))),
)


def draft_counts(settings: Settings) -> tuple[int, ...]:
    """The numbers of drafts that steps may have, fewest first."""
    most = settings.num_speculative_tokens
    if not settings.adaptive_drafts:
        return (most,)
    return tuple(sorted({0, 1, most} if settings.model_drafts else {0, most}))


def _sizes_by_drafts(settings: Settings) -> dict[int, dict[Variant, Sizes]]:
    counts = draft_counts(settings)
    if len(counts) == 1:
        return {counts[0]: SIZES_OF_SEVERAL if settings.tensor_parallel_size > 1 else {"full": SIZES}}
    if settings.model_drafts:
        none, one, most = ADAPTIVE_SIZES
        return {0: {"full": none}, 1: {"full": one}, counts[-1]: {"full": most}}
    none, most = LOOKED_UP_SIZES
    return {0: {"full": none}, counts[-1]: {"full": most}}


def bucket_table(settings: Settings) -> tuple[Bucket, ...]:
    """All buckets of an engine, smallest first: on a GPU 16 up to 128 requests, above them 17, at most 24 where the number of
    drafts changes and 25 on several GPUs; on a CPU at most 4 unless it changes.

    A CPU compiles for seconds a bucket and gains little from an exact fit, so it gets few.
    """
    most_rows = settings.max_num_seqs
    budget = settings.max_num_batched_tokens
    counts = draft_counts(settings)
    if not settings.on_gpu:
        decode = sorted({1, most_rows} if len(counts) == 1 else {most_rows})
        table = [Bucket(0, 0, rows, "full", k) for rows in decode for k in counts]
        prompts = sorted({min(64, budget), budget} if len(counts) == 1 else {budget})
        table += [_beside_prompts(settings, size, 4, "full", k) for size in prompts for k in counts]
        return tuple(sorted(table))
    return tuple(
        sorted(
            bucket
            for k, of_variants in _sizes_by_drafts(settings).items()
            for variant, sizes in of_variants.items()
            for bucket in (*_decode(settings, sizes, variant, k), *_with_prompts(settings, sizes, variant, k))
        )
    )


# Of each number of drafts, so many sizes of decode steps also exist in two parts: the largest, and others evenly between.
SPLIT_SIZES_FIXED, SPLIT_SIZES_ADAPTIVE = 3, 2


def split_table(settings: Settings) -> tuple[Bucket, ...]:
    """The buckets whose step also exists in two parts, smallest first; at most 4 of them.

    Of "full" decode steps the largest few, with the most drafts and with none; on a CPU the largest. None where no step is
    planned before the one ahead of it is read, or where no request may have a grammar.
    """
    if not settings.readout_depth or settings.synthetic_acceptance_length is not None:
        return ()
    counts = draft_counts(settings)
    sizes = (SPLIT_SIZES_FIXED if len(counts) == 1 else SPLIT_SIZES_ADAPTIVE) if settings.on_gpu else 1
    decode = [b for b in bucket_table(settings) if not b.prefill_tokens and b.variant == "full"]
    of_counts = [[b for b in decode if b.drafts == k] for k in {counts[0], counts[-1]}]
    return tuple(sorted(b for each in of_counts for b in _spread(each, sizes)))


def _spread(decode: list[Bucket], count: int) -> list[Bucket]:
    """So many of them, or all: the largest, and each time as many between two."""
    step = max(1, len(decode) // count)
    return decode[::-step][:count]


def parts(bucket: Bucket) -> tuple[Bucket, Bucket]:
    """The executables of a bucket's step in two parts."""
    return replace(bucket, part="forward"), replace(bucket, part="choose")


def _decode(settings: Settings, sizes: Sizes, variant: Variant, drafts: int) -> list[Bucket]:
    most = settings.max_num_seqs
    rows = {most if size is None else size for size in sizes.decode if size is None or size < most}
    return [Bucket(0, 0, each, variant, drafts) for each in rows]


def _with_prompts(settings: Settings, sizes: Sizes, variant: Variant, drafts: int) -> set[Bucket]:
    most = settings.max_num_batched_tokens
    shapes = {(most if tokens is None else min(tokens, most), rows) for tokens, rows in sizes.prompts}
    return {_beside_prompts(settings, tokens, 8, variant, drafts, rows) for tokens, rows in shapes}


def _beside_prompts(
    settings: Settings, tokens: int, prompts: int, variant: Variant, drafts: int, decode_rows: int | None = None
) -> Bucket:
    """A bucket for prompts, with decode rows (default: the most) if prompts and decode rows share steps."""
    most = settings.max_num_seqs
    decode = min(most, most if decode_rows is None else decode_rows)
    return Bucket(tokens, min(prompts, most), decode if settings.mixed else 0, variant, drafts)


def draft_choices(table: tuple[Bucket, ...], *, prompt_tokens: int, full: bool) -> tuple[int, ...]:
    """For which numbers of drafts there is a bucket for every plan of a kind, fewest first; never empty.

    Args:
        prompt_tokens: that the plan has at most. full: it needs the full sampler.
    """
    holding = {k: tokens for k, tokens in most_prompt_tokens(table, full=full).items() if tokens or not prompt_tokens}
    tokens = min(prompt_tokens, max(holding.values()))
    return tuple(sorted(k for k, most in holding.items() if most >= tokens))


def most_prompt_tokens(table: tuple[Bucket, ...], *, full: bool) -> dict[int, int]:
    """By number of drafts, for those with a bucket for every plan without prompts: the most prompt tokens of a plan, which may
    be 0, for which there always is one."""
    usable = [b for b in table if b.variant == "full" or not full]
    out = {}
    for k in {b.drafts for b in usable}:
        if not any(b.drafts == k and b.decode_rows >= _most_rows(table) for b in usable):
            continue
        beside = _most_rows([b for b in table if b.prefill_tokens])
        tokens = (b.prefill_tokens for b in usable if b.drafts == k and b.prefill_tokens and b.decode_rows >= beside)
        out[k] = max(tokens, default=0)
    return out


def _most_rows(table: Sequence[Bucket]) -> int:
    return max((b.decode_rows for b in table), default=0)


def choose_bucket(
    table: tuple[Bucket, ...],
    *,
    prefill_tokens: int,
    prefill_rows: int,
    decode_rows: int,
    full: bool,
    drafts: int,
    seconds: Mapping[Bucket, float] | None = None,
) -> Bucket:
    """The cheapest bucket that holds a plan; the scheduler only makes plans for which there is one.

    Args:
        seconds: of a step in each bucket, as measured. Without them, or where one that holds the plan is not among them,
            the cheapest has the fewest tokens.
    """
    fitting = [
        b
        for b in table
        if b.prefill_tokens >= prefill_tokens
        and b.prefill_rows >= prefill_rows
        and b.decode_rows >= decode_rows
        and b.drafts == drafts
        and (b.variant == "full" or not full)
    ]
    if not fitting:
        raise AssertionError(
            f"no bucket holds {prefill_tokens} prompt tokens of {prefill_rows} rows with {decode_rows} decode rows of "
            f"{drafts} drafts"
        )
    if seconds and all(b in seconds for b in fitting):
        return min(fitting, key=lambda b: seconds[b])
    return min(fitting, key=lambda b: (b.tokens, b.variant == "full"))
