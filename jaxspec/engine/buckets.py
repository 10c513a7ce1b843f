"""The fixed shapes that a step may have. One table drives the batch builder, the warm-up and the compile cache."""

from dataclasses import dataclass
from typing import Literal

from jaxspec.config import Settings

Variant = Literal["lean", "full"]


@dataclass(frozen=True, order=True)
class Bucket:
    """Shape of one executable: up to P prompt tokens of E rows, D decode rows, and what its sampler can do.

    Variant "lean" samples greedily or by temperature; "full" knows every sampling parameter and the likeliest
    alternatives. The tokens of a row that needs no more than "lean" are the same in both.
    """

    prefill_tokens: int
    prefill_rows: int
    decode_rows: int
    variant: Variant

    @property
    def rows(self) -> int:
        return self.prefill_rows + self.decode_rows

    def tokens(self, window: int) -> int:
        """T: tokens of the flat arrays, for decode windows of `window` tokens."""
        return self.prefill_tokens + self.decode_rows * window

    @property
    def words(self) -> str:
        """For people who wait for it to be compiled."""
        if not self.prefill_rows:
            text = f"decode, {_count(self.decode_rows, 'row')}"
        else:
            text = f"prefill, {self.prefill_tokens} tokens of up to {_count(self.prefill_rows, 'prompt')}"
            text += f", beside {_count(self.decode_rows, 'decode row')}" if self.decode_rows else ""
        return text if self.variant == "full" else f"{text}, greedy or by temperature"

    def __str__(self) -> str:
        return f"prefill {self.prefill_tokens}x{self.prefill_rows}, decode {self.decode_rows}, {self.variant}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


DECODE_ROWS = (1, 4, 8, 16, 32, 64, 128)


def bucket_table(settings: Settings) -> tuple[Bucket, ...]:
    """All buckets of an engine, smallest first; at most 24 on a GPU and 4 on a CPU.

    A CPU compiles for seconds a bucket and gains little from an exact fit or a lean sampler, so it gets few.
    """
    most_rows = settings.max_num_seqs
    beside_prompts = most_rows if settings.mixed else 0
    budget = settings.max_num_batched_tokens
    if not settings.on_gpu:
        decode = sorted({1, most_rows})
        table = [Bucket(0, 0, rows, "full") for rows in decode]
        table += [
            Bucket(tokens, min(4, most_rows), beside_prompts, "full") for tokens in sorted({min(64, budget), budget})
        ]
        return tuple(sorted(table))
    decode = sorted({rows for rows in DECODE_ROWS if rows < most_rows} | {most_rows})
    variants: tuple[Variant, ...] = ("lean", "full")
    table = [Bucket(0, 0, rows, variant) for rows in decode for variant in variants]
    prefill = sorted({min(size, budget) for size in (256, budget)})
    table += [Bucket(tokens, min(8, most_rows), beside_prompts, variant) for tokens in prefill for variant in variants]
    return tuple(sorted(table))


def choose_bucket(
    table: tuple[Bucket, ...], *, prefill_tokens: int, prefill_rows: int, decode_rows: int, full: bool
) -> Bucket:
    """The smallest bucket that holds a plan; the scheduler only makes plans for which there is one."""
    fitting = [
        b
        for b in table
        if b.prefill_tokens >= prefill_tokens
        and b.prefill_rows >= prefill_rows
        and b.decode_rows >= decode_rows
        and (b.variant == "full" or not full)
    ]
    if not fitting:
        raise AssertionError(
            f"no bucket holds {prefill_tokens} prompt tokens of {prefill_rows} rows with {decode_rows} decode rows"
        )
    return min(fitting, key=lambda b: (b.prefill_tokens + b.decode_rows, b.variant == "full"))
