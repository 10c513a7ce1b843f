"""What a draft proposed in the engine beside its PyTorch reference: its input, hidden states, logits and ids."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from convert.differences import Errors
from convert.torch_drafts import DraftRun

# A stage is off where its error is more than this part of its values, RMS. Rounding in float32 is far below.
_OFF = 1e-3


class DraftRow(NamedTuple):
    """k drafts after one token: ids [k], hidden states [k, H], logits [k, V]."""

    ids: np.ndarray
    hidden: np.ndarray
    logits: np.ndarray


@dataclass
class Stage:
    """Errors of one stage of a draft, with the size of the reference's values.

    Attributes:
        parts: the weights that decide it, in words.
    """

    name: str
    parts: str
    errors: Errors = field(default_factory=Errors)
    values: Errors = field(default_factory=Errors)

    def add(self, have: np.ndarray, want: np.ndarray) -> None:
        """-inf stands for a token that cannot be proposed: equal on both sides, or an infinite error."""
        with np.errstate(invalid="ignore"):
            self.errors.add(np.where(have == want, 0.0, have - want))
        self.values.add(want[np.isfinite(want)])

    @property
    def is_off(self) -> bool:
        """Written so that NaN is."""
        return not self.errors.rms <= _OFF * self.values.rms


@dataclass(frozen=True)
class DraftDivergence:
    """The first drafted id that differs after a new token; `gap` as in `Divergence`, None without logits."""

    prompt: int
    new_token: int
    step: int
    expected: int
    got: int
    gap: float | None


class DraftsReport:
    """All figures of the drafts of one comparison.

    Attributes:
        stages: in the order in which they are computed.
        windows, identical: how often k ids were drafted, and how often all of them were the reference's.
        tokens, agreed: drafted ids whose predecessors were the reference's, and those that were too.
    """

    def __init__(self, steps: int):
        self.input = Stage("draft input", "what the draft reads of the target: fc and its norms, if it has them")
        self.hidden = [
            Stage(f"draft step {i + 1}, hidden", "embeddings, the projection or norms of the pair, the draft's layer")
            for i in range(steps)
        ]
        self.logits = [Stage(f"draft step {i + 1}, logits", "the final norm, the head, d2t") for i in range(steps)]
        self.windows = self.identical = self.tokens = self.agreed = 0
        self.divergences: list[DraftDivergence] = []

    @property
    def stages(self) -> list[Stage]:
        pairs = zip(self.hidden, self.logits, strict=True)
        return [self.input, *(stage for pair in pairs for stage in pair)]

    @property
    def max_logit_error(self) -> float:
        return float(np.max([stage.errors.maximum for stage in self.logits]))

    @property
    def agreement(self) -> float:
        return self.agreed / self.tokens if self.tokens else 1.0

    def failures(self, *, max_logit_error: float, min_top1: float, require_identical: bool) -> list[str]:
        """As `Report.failures`; in float32, whose rounding is below any error, one line more names the first wrong stage."""
        out = []
        if not self.windows:
            out.append("nothing was drafted after the reference's tokens")
        if not self.max_logit_error <= max_logit_error:
            out.append(f"max draft logit error {self.max_logit_error:.3g} is over {max_logit_error:g}")
        if not self.agreement >= min_top1:
            out.append(f"drafted ids agree at {self.agreement:.4f}, under {min_top1:g}")
        if require_identical and self.identical < self.windows:
            out.append(f"{self.windows - self.identical} of {self.windows} drafts differ")
        off = next((stage for stage in self.stages if stage.is_off), None)
        if out and off is not None and require_identical:
            out.append(f"the first stage of the draft that is off: {off.name} ({off.parts})")
        return out

    def summary(self) -> str:
        text = f"{self.identical} of {self.windows} drafts identical"
        return f"{text}, max draft logit error {self.max_logit_error:.2e}" if self.input.errors.count else text

    def as_json(self) -> dict[str, Any]:
        return {
            "stages": {stage.name: stage.errors.as_json() for stage in self.stages},
            "windows": self.windows,
            "identical": self.identical,
            "tokens": self.tokens,
            "agreed": self.agreed,
            "divergences": [asdict(divergence) for divergence in self.divergences],
        }


def compare_drafts(
    report: DraftsReport,
    prompt: int,
    run: DraftRun,
    said: Mapping[int, DraftRow],
    inputs: Mapping[int, np.ndarray],
    *,
    fed: int,
) -> None:
    """Adds what was drafted in one request.

    Args:
        said: by new token; all of them follow the reference's text.
        inputs: what the draft read of the target, by position; those below `fed` are of the reference's text.
    """
    if run.inputs is not None:
        common = sorted(p for p in inputs if p < fed)
        report.input.add(np.stack([inputs[p] for p in common]), run.inputs[common])
    for new_token, row in sorted(said.items()):
        want = run.ids[new_token]
        same = next((i for i, (a, b) in enumerate(zip(want, row.ids, strict=False)) if a != b), len(row.ids))
        for i in range(min(same + 1, len(row.ids))):  # the first different id still has comparable logits
            if run.hidden is not None and run.logits is not None:
                report.hidden[i].add(row.hidden[i], run.hidden[new_token, i])
                report.logits[i].add(row.logits[i], run.logits[new_token, i])
            report.tokens += 1
        report.agreed += same
        report.windows += 1
        report.identical += same == len(row.ids)
        if same < len(row.ids):
            gap = None
            if run.logits is not None:
                logits = run.logits[new_token, same]
                gap = float(logits[want[same]] - logits[row.ids[same]])
            report.divergences.append(
                DraftDivergence(prompt, new_token, same + 1, int(want[same]), int(row.ids[same]), gap)
            )
