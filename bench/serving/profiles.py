"""Loads of `bench serve` that stand for a kind of use.

- reasoning: long prompts and long answers at a low rate, 8192 tokens in and 3072 out, 0.3 requests a second for 300 s.
- agentic: sessions of many turns that begin in bursts. All share the beginning of their prompts (instructions and tools);
  each turn sends the whole conversation again, with the answer and some new tokens (a tool's output), after a pause.

`--scale` shortens all lengths, for a smoke test on a CPU.
"""

import argparse
import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.serving.client import Session, Turn
from bench.serving.serve import body_of, make_arrivals


@dataclass(frozen=True)
class Profile:
    """
    Attributes:
        shared: tokens that all prompts begin with.
        first, later: least and most new tokens of a session's first turn and of each later one.
        output: least and most tokens of an answer.
        turns: of a session. pause: most seconds between an answer and the next turn.
        rate: sessions (or bursts of them) a second. duration: seconds in which they begin. burst: sessions that begin
            at once.
    """

    shared: int
    first: tuple[int, int]
    later: tuple[int, int]
    output: tuple[int, int]
    turns: int
    pause: float
    rate: float
    duration: float
    burst: int

    @property
    def longest(self) -> int:
        """Most tokens of a conversation."""
        return self.shared + self.first[1] + (self.turns - 1) * self.later[1] + self.turns * self.output[1]

    def scaled(self, scale: float) -> "Profile":
        """With lengths multiplied by `scale`."""

        def both(bounds: tuple[int, int]) -> tuple[int, int]:
            return max(round(bounds[0] * scale), 1), max(round(bounds[1] * scale), 1)

        return dataclasses.replace(
            self,
            shared=round(self.shared * scale),
            first=both(self.first),
            later=both(self.later),
            output=both(self.output),
        )


PROFILES = {
    "reasoning": Profile(
        shared=0, first=(8192, 8192), later=(1, 1), output=(3072, 3072), turns=1, pause=0.0, rate=0.3, duration=300.0,
        burst=1,
    ),
    "agentic": Profile(
        shared=2048, first=(256, 1024), later=(64, 1024), output=(64, 256), turns=12, pause=1.0, rate=0.1,
        duration=120.0, burst=4,
    ),
}  # fmt: skip


def make_profile(arguments: argparse.Namespace) -> Profile:
    """The profile that the options name, as they change it."""
    profile = PROFILES[arguments.profile].scaled(arguments.scale)
    given = {"rate": arguments.request_rate, "duration": arguments.duration, "turns": arguments.turns}
    return dataclasses.replace(profile, **{name: value for name, value in given.items() if value is not None})


def make_sessions(profile: Profile, arguments: argparse.Namespace, model: str) -> list[Session]:
    """At least one burst. New tokens, lengths and times depend only on the options and the seed."""
    seed = arguments.seed
    times = make_arrivals(max(round(2 * profile.rate * profile.duration), 8), profile.rate, seed)
    bursts = [time for time in times if time < profile.duration]
    rng = np.random.default_rng([seed, 4])

    def ids(count: int) -> list[int]:
        return rng.integers(0, arguments.vocab_size, count).tolist()

    shared = ids(profile.shared)

    def session(number: int, arrival: float) -> Session:
        turns = []
        for turn in range(profile.turns):
            least, most = profile.later if turn else profile.first
            new = ids(int(rng.integers(least, most, endpoint=True)))
            output = int(rng.integers(*profile.output, endpoint=True))
            pause = float(rng.uniform(0, profile.pause)) if turn else 0.0
            turns.append(Turn(shared + new if turn == 0 else new, output, pause))
        body: dict[str, Any] = body_of(arguments, model, seed + number) | {"ignore_eos": True}
        return Session(arrival, body, tuple(turns))

    return [session(number, bursts[number // profile.burst]) for number in range(len(bursts) * profile.burst)]
