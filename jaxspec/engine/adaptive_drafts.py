"""The number of drafts of each step, chosen for throughput: from what steps cost and from what was accepted lately.

A step with k drafts a row costs c(k) seconds, by its rows and the length of their contexts, and yields, of each row,
1 + p_1 + p_1 p_2 + ... + p_1 .. p_k tokens, where p_i is the probability that draft i is accepted if those before it are. The k
with the most tokens a second is chosen. p_i is estimated for each request, from its own windows and from those of all requests
lately. Whoever gets more tokens a step is over sooner and leaves its slot to another, so of rows that differ the slow ones are
many: what counts is not the tokens of the rows as they are, but in how many steps requests are done (`_tokens`).

With few drafts or none nothing is learned about the others. So from time to time, at the cost of a fixed small part of all
time, some steps have more: a probe. It ends as soon as it shows that more drafts do not pay, or that they do. A part of what
its drafts gain counts against its cost: where the two are nearly equal, a probe shows little and another follows sooner.
Where far more or far fewer first drafts are accepted than was expected, requests have changed, and what was known is forgotten.

What steps cost was measured once, with texts of its own, on a host that did nothing else. So steps that run are timed too, and
where fewer drafts would be about as fast by what is known, a check runs a few steps with them (`StepPace`).
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.change import Change
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.draft_control import Load, at_least
from jaxspec.engine.probe import Probe
from jaxspec.engine.step_pace import FIRST, StepPace

# Windows, and windows of all requests, after which what was seen counts for 1/e.
HORIZON, SHARED_HORIZON = 128.0, 512.0
# A request's estimate begins with that of all requests, as if from so many windows of its own.
SHARED_WEIGHT = 8.0
# The estimate of all requests begins with this probability, as if from so many windows. At later positions it begins with
# the estimate one position earlier.
PRIOR, PRIOR_WEIGHT = 0.7, 4.0
# So many standard errors are added to what is known of all running requests' drafts. Drafts that are given up are not seen any
# more, so giving them up by chance costs more than keeping them by chance.
OPTIMISM = 0.7
# Another number of drafts must promise so much more, lest estimates that are nearly equal change it in every step.
MARGIN = 0.01
# The part of all time that probes may cost, and the steps that a probe usually takes: one that proposes, one that verifies,
# and what is in flight by then.
PROBE_SHARE, PROBE_STEPS = 0.007, 3
# The part of a probe's gains that the next one may cost. With all of it, probes would change drafts that pay alike in turn.
GAIN_SHARE = 0.5
# Windows that what a probe saw counts for at most.
PROBE_WEIGHT = 32.0
# So many windows are learned from at once, unless a probe waits for them: it takes the host a part of a step of few rows.
ENOUGH_TO_LEARN = 8
# Fewer drafts are checked where they promise a rate within this factor of the best, by what is known or by what was measured,
# each bucket of theirs at most once in so many steps: a check costs what drafts would have gained in its steps, and those that
# the next step would have verified.
CHECK_WITHIN, CHECK_EVERY = 1.25, 512


class Latest:
    """Keeps what follows from the latest key."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._value: Any = None

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What `make` returns, or returned if the key is the latest one."""
        if key != self._key:
            self._key, self._value = key, make()
        return self._value


class AdaptiveDrafts:
    """A `DraftControl` that maximises expected tokens a second.

    Args:
        most: drafts of a step at most.
        slots: of the engine's state, padding slots included.
        costs: of steps; until they are known every step has the most drafts.

    Attributes:
        costs: may be set later.
    """

    def __init__(self, most: int, slots: int, costs: StepCosts | None = None):
        self.costs = costs
        self._most = most
        # Of each slot's windows, and of all, by position: how often the position was reached, how often accepted.
        self._reached, self._hits = np.zeros((slots, most)), np.zeros((slots, most))
        self._all_reached, self._all_hits = np.zeros(most), np.zeros(most)
        self._shared = self._shared_estimate()
        self._change = Change(most)
        self._current: int | None = None  # drafts of decode steps, probes left out
        self._probe: Probe | None = None
        self._allowance = 0.0  # seconds that the next probe may cost
        self._pace = StepPace()
        self._chosen = 0  # steps
        # The host has little time in steps of few rows: what was seen waits until it is enough, and what is expected of
        # requests is kept until more is known.
        self._unlearned = list[tuple[int, int, int]]()
        self._learned, self._expected = 0, Latest()
        # Of a check: its drafts and the steps that are left of it; and of each bucket the step of its latest one.
        self._check, self._check_left, self._checked_at = 0, 0, dict[Bucket, int]()

    def admitted(self, slot: int) -> None:
        self._learn()  # of the slot's last request
        self._reached[slot] = self._hits[slot] = 0.0
        self._learned += 1

    def choose(self, load: Load) -> int:
        ceiling = at_least(load.most, load.choices)
        choices = [k for k in load.choices if k <= ceiling]
        self._chosen += 1
        if self._probe is not None or len(self._unlearned) >= ENOUGH_TO_LEARN:
            self._learn()
        buckets = self._buckets(load, choices)
        if len(choices) == 1 or len(buckets) < len(choices):
            return choices[-1]
        seconds = {k: self._seconds(load, bucket) for k, bucket in buckets.items()}
        follows_from = (self._learned, self._current, tuple(load.slots), tuple(load.wanted))
        tokens: list[float] = self._expected.get(follows_from, lambda: self._tokens(load).tolist())
        drafts = self._best(load, tokens, seconds)
        if load.prompts and drafts != self._current:  # there may be no such step with so many prompt tokens
            return drafts
        fewer = self._checked(load, drafts, buckets, seconds, tokens)
        return self._probed(load, drafts, choices, seconds, tokens) if fewer is None else fewer

    def took(self, bucket: Bucket, rows: int, tokens: int, seconds: float) -> None:
        """A step without prompts was read so long after the one before it, when it had been planned already.

        The one before must have run in the same bucket: a step verifies what that one proposed, so the first with more drafts
        takes less than those after it, and prompts keep the host.

        Args:
            rows, tokens: its decode rows, and those of their contexts together, of the rank with the most.
        """
        expected = self.costs and self.costs.seconds_in(bucket, rows, tokens)
        if expected and seconds > 0:  # a clock may be coarse
            self._pace.observe(bucket, seconds / expected)

    def _buckets(self, load: Load, choices: Sequence[int]) -> dict[int, Bucket]:
        """Those that such steps run in, of the numbers of drafts of which one was measured."""
        if self.costs is None:
            return {}
        found = {k: self.costs.bucket(max(load.rows, 1), k, full=load.full) for k in choices}
        return {k: bucket for k, bucket in found.items() if bucket is not None}

    def _seconds(self, load: Load, bucket: Bucket) -> float:
        """Of such a step, as steps in its bucket are lately.

        Prompts beside its decode rows are left out: they take about as long beside any number of drafts.
        """
        seconds = self.costs and self.costs.seconds_in(bucket, max(load.rows, 1), load.tokens)
        assert seconds  # it is one of those that were measured
        return seconds * self._pace.factor(bucket)

    def observe(self, windows: Sequence[tuple[int, int, int]]) -> None:
        self._unlearned += windows

    def _learn(self) -> None:
        if not self._unlearned:
            return
        self._learned += 1
        slots, verified, accepted = np.array(self._unlearned).T
        self._unlearned.clear()
        position = np.arange(self._most)
        reached = (verified[:, None] > position) & (accepted[:, None] >= position)
        hits = reached & (accepted[:, None] > position)
        self._change.add(reached, hits, self._estimates(slots)[:, 0])
        counts, sums = np.zeros_like(self._reached), np.zeros_like(self._hits)
        np.add.at(counts, slots, reached)
        np.add.at(sums, slots, hits)
        self._reached, self._hits = _counted(self._reached, self._hits, counts, sums, HORIZON)
        counts, sums = counts.sum(axis=0), sums.sum(axis=0)
        self._all_reached, self._all_hits = _counted(self._all_reached, self._all_hits, counts, sums, SHARED_HORIZON)
        if self._probe is not None:
            self._allowance += GAIN_SHARE * self._probe.add(verified, reached, hits)
            self._judge(self._probe)
        if self._change.is_evident:
            self._start_anew()
        self._shared = self._shared_estimate()

    def _start_anew(self) -> None:
        """What requests are like has changed: only what was seen lately counts."""
        self._all_reached, self._all_hits = self._change.reached.copy(), self._change.hits.copy()
        self._reached[:] = self._hits[:] = 0.0
        self._change.accept()
        self._probe = None

    def _shared_estimate(self) -> np.ndarray:
        """Probabilities [most] of a request of which nothing is known."""
        out, before = np.empty(self._most), PRIOR
        for i in range(self._most):
            weight = self._all_reached[i] + PRIOR_WEIGHT
            before = out[i] = (self._all_hits[i] + PRIOR_WEIGHT * before) / weight
        return out

    def _estimates(self, slots: np.ndarray) -> np.ndarray:
        """Probabilities [requests, most] that a draft is accepted if those before it are."""
        return (self._hits[slots] + SHARED_WEIGHT * self._shared) / (self._reached[slots] + SHARED_WEIGHT)

    def _tokens(self, load: Load) -> np.ndarray:
        """Expected tokens of a decode step with 0 to `most` drafts, [most + 1], if all steps had as many.

        With the drafts of now they are those of the running requests. With others they are those of the rows that there would
        be: of requests that come as often as those of now end, each stays for as many steps as its tokens take.
        """
        if not load.slots:  # the prompts' own first drafts
            return 1 + np.concatenate([[0.0], np.cumsum(np.cumprod(self._shared))])
        slots, wanted = np.asarray(load.slots), np.asarray(load.wanted)
        reached, p = self._reached[slots], self._estimates(slots)
        mean = p.mean(axis=0)
        seen = 1 + reached.sum(axis=0) + np.minimum(SHARED_WEIGHT * len(slots), self._all_reached)
        p = np.minimum(p + OPTIMISM * np.sqrt(mean * (1 - mean) / seen), 1.0)
        accepted = np.cumprod(p, axis=1)
        if wanted.min() < self._most:
            accepted = np.where(np.arange(self._most) < wanted[:, None], accepted, 0.0)
        each = 1 + np.pad(np.cumsum(accepted, axis=1), ((0, 0), (1, 0)))  # [rows, most + 1]
        if self._current is None:
            return each.sum(axis=0)
        now = each[:, self._current, None]
        return len(slots) * now.sum() / (now / each).sum(axis=0)

    def _best(self, load: Load, tokens: Sequence[float], seconds: dict[int, float]) -> int:
        """The drafts with the most tokens, less what could be had elsewhere in the same time."""
        current = self._current
        rate = max(tokens[k] / value for k, value in seconds.items())
        worth = {k: tokens[k] - rate * value for k, value in seconds.items()}
        best = max(worth, key=lambda k: worth[k])
        if current in worth and worth[best] - worth[current] < MARGIN * tokens[current]:
            best = current
        if not load.prompts:
            self._current = best
        return best

    def _checked(
        self,
        load: Load,
        drafts: int,
        buckets: dict[int, Bucket],
        seconds: dict[int, float],
        tokens: Sequence[float],
    ) -> int | None:
        """Fewer drafts than `drafts`, where a check of them runs or begins."""
        if load.prompts or not load.slots:
            return None
        if self._check_left and self._check in seconds and self._check < drafts:
            self._check_left -= 1
            return self._check
        self._check_left = 0
        if drafts == min(seconds) or self._probe is not None or not self._pace.is_steady:
            return None
        rates = {k: tokens[k] / value for k, value in seconds.items() if k <= drafts}
        fewer = _best_of_fewer(drafts, rates)
        if fewer is None:
            as_measured = {k: rate * self._pace.factor(buckets[k]) for k, rate in rates.items()}
            fewer = _best_of_fewer(drafts, as_measured)
        if fewer is None:
            return None
        bucket = buckets[fewer]
        if bucket in self._checked_at and self._chosen - self._checked_at[bucket] < CHECK_EVERY:
            return None
        self._checked_at[bucket] = self._chosen
        self._check, self._check_left = fewer, FIRST  # after the first, which does not count
        return fewer

    def _probed(
        self, load: Load, drafts: int, choices: list[int], seconds: dict[int, float], tokens: Sequence[float]
    ) -> int:
        """`drafts`, or more of them where a probe runs or begins."""
        probe = self._probe
        if probe is not None and probe.base != drafts:
            probe = self._probe = None
        more = [k for k in choices if k > drafts]
        if not more:  # nor is anything saved up for later
            return drafts
        self._allowance += PROBE_SHARE * seconds[drafts]
        if probe is None:
            if not load.slots:
                return drafts
            if self._allowance < PROBE_STEPS * (seconds[more[0]] - seconds[drafts]):
                return drafts
            self._learn()  # what was seen before is none of the probe's
            later = {k: value for k, value in seconds.items() if k >= drafts}
            token_seconds = seconds[drafts] / tokens[drafts]
            probe = self._probe = Probe(drafts, more[0], self._shared, later, MARGIN, token_seconds)
        if probe.drafts not in choices:
            return drafts
        chosen = probe.step(len(load.slots))
        self._allowance -= seconds[chosen] - seconds[drafts]
        return chosen

    def _judge(self, probe: Probe) -> None:
        """Ends a probe that has seen enough. Where more drafts pay, what it saw takes the place of what was known."""
        verdict = probe.verdict
        if verdict is None:
            return
        self._probe = None
        if verdict:
            at = slice(probe.base, None)
            scale = min(1.0, PROBE_WEIGHT / probe.reached[probe.base])
            self._all_reached[at], self._all_hits[at] = scale * probe.reached[at], scale * probe.hits[at]
            self._reached[:, at] = self._hits[:, at] = 0.0
            self._change.accept()


def _counted(
    reached: np.ndarray, hits: np.ndarray, more_reached: np.ndarray, more_hits: np.ndarray, horizon: float
) -> tuple[np.ndarray, np.ndarray]:
    """Both with what was seen since, of one shape. Only positions that were reached forget: what is known of the others is all
    there is."""
    kept = np.exp(-more_reached / horizon)
    weight = horizon * (1 - kept) / np.maximum(more_reached, 1)
    return reached * kept + weight * more_reached, hits * kept + weight * more_hits


def _best_of_fewer(drafts: int, rates: dict[int, float]) -> int | None:
    """The best of fewer than `drafts`, if its rate is near theirs."""
    fewer = max((k for k in rates if k < drafts), key=lambda k: rates[k])
    return fewer if CHECK_WITHIN * rates[fewer] >= rates[drafts] else None
