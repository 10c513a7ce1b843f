"""A few steps with more drafts than seem to pay, to find out whether they do by now."""

from collections.abc import Mapping

import numpy as np

# Windows that decide a probe: those in which the first draft past `base` was verified, or, where it hardly ever is, all.
ENOUGH, ENOUGH_OF_ALL = 12, 48
# Steps without windows of its own that end a probe: more than are on their way when it begins.
MOST_WITHOUT = 8


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
        self._without = 0
        # Windows of its steps that will verify its drafts, whether one has proposed any, and steps since there were enough.
        self._sent, self._proposed, self._waited = 0, False, 0

    def step(self, rows: int) -> int:
        """Drafts of the next step, which has so many rows: `base` again once enough windows are on their way."""
        enough = ENOUGH_OF_ALL if self.base else ENOUGH
        if self._sent >= enough and self._waited < MOST_WITHOUT:
            self._waited += 1
            return self.base
        if self._sent >= enough:  # some of them never came: their requests are over
            self._sent, self._proposed, self._waited = 0, False, 0
        if self._proposed:  # the first step only proposes
            self._sent += rows
        self._proposed = True
        return self.drafts

    def add(self, verified: np.ndarray, reached: np.ndarray, hits: np.ndarray) -> float:
        """Counts the windows of one step that verify more than `base` drafts; those on their way when it began do not.

        Args:
            verified: int [windows] drafts.
            reached, hits: bool [windows, most], see the attributes.

        Returns:
            Seconds that drafts past `base` have saved in this step.
        """
        own = verified > self.base
        self._without += not own.any()
        accepted = hits[own].sum(axis=0)
        self.reached += reached[own].sum(axis=0)
        self.hits += accepted
        return self._token_seconds * float(accepted[self.base :].sum())

    @property
    def verdict(self) -> bool | None:
        """Whether more drafts pay; None until enough has been seen. It is soon clear where hardly any is accepted."""
        windows = self.reached[self.base]
        is_enough = windows >= ENOUGH or self.reached[0] >= ENOUGH_OF_ALL or self._without >= MOST_WITHOUT
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
