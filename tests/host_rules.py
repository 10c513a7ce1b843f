"""Host rules for tests of the engine."""

from jaxspec.engine.host_rule import RuleResult


class StopAfter:
    """Ends the output after its `count`-th id, as a stop string may; without a count it ends nothing."""

    def __init__(self, count: int | None = None, *, needs_readback: bool = False):
        self.count, self.needs_readback = count, needs_readback
        self.fed: list[int] = []

    def feed(self, ids, ended):  # noqa: ARG002
        before = len(self.fed)
        self.fed += ids
        stops = self.count is not None and len(self.fed) >= self.count
        return RuleResult(keep=self.count - before if stops else None)
