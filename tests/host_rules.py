"""Host rules for tests of the engine."""

import numpy as np

from jaxspec.engine.host_rule import Constraint, RuleResult


class StopAfter:
    """Ends the output after its `count`-th id, as a stop string may; without a count it ends nothing."""

    constraint = None

    def __init__(self, count: int | None = None, *, needs_readback: bool = False):
        self.count, self.needs_readback = count, needs_readback
        self.fed: list[int] = []

    def feed(self, ids, ended):  # noqa: ARG002
        before = len(self.fed)
        self.fed += ids
        stops = self.count is not None and len(self.fed) >= self.count
        return RuleResult(keep=self.count - before if stops else None)


class Counting(StopAfter, Constraint):
    """Its masks say how many ids it has been fed."""

    needs_readback = True

    @property
    def constraint(self):
        return self

    def fill_masks(self, drafts, words):
        assert len(drafts) < len(words)
        words[:] = len(self.fed)


class RandomConstraint(Constraint):
    """Allows a third of all ids at each position, drawn from the text before it, and after `length` ids only `end`.

    What it is fed has to be what it allowed. Rows that nobody may read are noise.
    """

    needs_readback = True

    def __init__(self, vocab_size: int, end: int, *, seed: int = 0, length: int = 30):
        self.vocab_size, self.end, self.seed, self.length = vocab_size, end, seed, length
        self.fed: list[int] = []

    @property
    def constraint(self):
        return self

    def allowed(self, output):
        """bool [V] after an output."""
        if len(output) >= self.length:
            return np.arange(self.vocab_size) == self.end
        rng = np.random.default_rng([self.seed, len(output), *output[-2:]])
        allowed = rng.random(self.vocab_size) < 1 / 3
        allowed[self.end] = False
        return allowed

    def feed(self, ids, ended):  # noqa: ARG002
        for token in ids:
            assert self.allowed(self.fed)[token], f"{token} is not allowed after {self.fed}"
            self.fed.append(token)
        return RuleResult()

    def fill_masks(self, drafts, words):
        output, legal = list(self.fed), True
        for row in range(len(words)):
            bits = np.random.default_rng(row).random(32 * words.shape[1]) < 0.5
            if legal:
                bits[: self.vocab_size] = self.allowed(output)  # bits after the vocabulary stay noise
            words[row] = np.packbits(bits, bitorder="little").view(np.int32)
            if row < len(drafts):
                legal = legal and bool(self.allowed(output)[drafts[row]])
                output.append(drafts[row])
