"""How many rows, tokens and steps `bench step` and `bench cycle` measure, and how long requests grow meanwhile."""

import argparse
from dataclasses import dataclass

from bench.step.step_vllm import CONTEXT, DRAFTED, OUTPUT_TOKENS, ROWS
from jaxspec.config import PAGE_SIZE
from jaxspec.errors import ConfigError

# Steps that are not counted at the start of each measurement.
WARMUP_STEPS = 3
DEFAULT_TOKENS = DRAFTED["mtp"]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        rows: ascending row counts; context: tokens of each prompt.
        steps: of `read` and `ahead`; loops: of the engine's own loop, of plain steps and of cycles.
        budget: tokens of a step.
        tokens: drafted a cycle; 0 for none.
    """

    rows: tuple[int, ...]
    context: int
    steps: int
    loops: tuple[int, int]
    budget: int
    tokens: int

    def loop(self, k: int) -> int:
        return self.loops[k > 0]

    def longest(self, k: int, budget: int) -> int:
        """Most tokens that a request can reach, if every draft is accepted."""
        most_rows = self.rows[-1]
        # The first requests decode while the last ones prefill; measurements start again from the prompts.
        filling = -(-most_rows * self.context // (budget - most_rows * (k + 1))) + most_rows
        decoding = max(2 * (self.steps + WARMUP_STEPS), self.loop(k) + 2 * WARMUP_STEPS)
        return self.context + (max(filling, decoding) + 2) * (k + 1) + PAGE_SIZE


def choose_sizes(arguments: argparse.Namespace, *, gpu: bool, has_draft: bool) -> Sizes:
    """Those of `bench step`."""
    tokens = arguments.tokens
    if tokens is None:
        tokens = DEFAULT_TOKENS if has_draft else 0
    if tokens and not has_draft:
        raise ConfigError(f"--tokens {tokens}: {arguments.model} has no MTP layer that could draft; use --tokens 0")
    loops = (OUTPUT_TOKENS["plain"], OUTPUT_TOKENS["mtp"]) if gpu else (16, 16)
    return Sizes(
        rows=tuple(arguments.rows or (ROWS if gpu else (1, 4))),
        context=arguments.context or (CONTEXT if gpu else 128),
        steps=max(arguments.steps, 4),
        loops=(arguments.loop, arguments.loop) if arguments.loop else loops,
        budget=arguments.prefill_budget or default_budget(gpu),
        tokens=tokens,
    )


def default_budget(gpu: bool) -> int:
    return 8192 if gpu else 256
