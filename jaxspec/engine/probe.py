"""A few steps with more drafts than seem to pay, to find out whether they do by now."""

from collections.abc import Mapping

import numpy as np

# Windows that decide a probe: those in which the first draft past `base` was verified, or, where it hardly ever is, all.
ENOUGH, ENOUGH_OF_ALL = 12, 48


class Probe:
    """Counts what windows of `drafts` drafts accept where `base` drafts are thought best.

    Args:
        shared: probabilities [most] that a draft is accepted if those before it are, as they are known.
        seconds: of a step, by number of drafts: of `base` and of more.
        margin: by what part more drafts must be better.
        token_seconds: what a token takes with `base` drafts.

    Attributes:
        reached, hits: int [most] how often the draft at each position was verified, those before it being accepted, and
            how often it was accepted too.
    """

    def __init__(
        self,
        base: int,
        drafts: int,
        shared: np.ndarray,
        seconds: Mapping[int, float],
        margin: float,
        token_seconds: float,
    ):
        self.base, self.drafts, self._token_seconds = base, drafts, token_seconds
        self._shared, self._seconds, self._margin = shared, seconds, margin
        self.reached, self.hits = np.zeros(len(shared), int), np.zeros(len(shared), int)

    def add(self, reached: np.ndarray, hits: np.ndarray) -> None:
        """Counts [most] of one step."""
        self.reached += reached
        self.hits += hits

    def gained(self, hits: np.ndarray) -> float:
        """Seconds that the drafts past `base` have saved in a step in which `hits` [most] were accepted."""
        return self._token_seconds * float(hits[self.base :].sum())

    @property
    def verdict(self) -> bool | None:
        """Whether more drafts pay; None until enough has been seen. It is soon clear where hardly any is accepted."""
        windows = self.reached[self.base]
        is_enough = windows >= ENOUGH or self.reached[0] >= ENOUGH_OF_ALL
        if not windows:
            return False if is_enough else None
        if not self._pays(1.0):
            return False
        return self._pays(0.5) if is_enough else None

    def _pays(self, optimism: float) -> bool:
        """Whether some number of drafts gives more tokens a second, if one window more had accepted so much of a draft."""
        tokens, reached, before, rates = 1.0, 1.0, 1.0, {0: 1.0}
        for i, known in enumerate(self._shared):
            p = known
            if i >= self.base:
                p = (self.hits[i] + optimism) / (self.reached[i] + 1) if self.reached[i] else before
            reached, before = reached * p, p
            tokens += reached
            rates[i + 1] = tokens
        rates = {k: rates[k] / seconds for k, seconds in self._seconds.items()}
        return max(rates.values()) > (1 + self._margin) * rates[self.base]
