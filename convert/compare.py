"""PyTorch and jaxspec on the same prompts, layer by layer and token by token.

jaxspec runs through its real engine: once continuing each prompt greedily (chunked prefill, then decode steps over the
paged cache), and once prefilling prompt and reference continuation together. Both are compared with one PyTorch run.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from convert.compare_drafts import DraftRow, DraftsReport, compare_drafts
from convert.differences import Errors
from convert.reference import ReferenceRun, log_softmax
from jaxspec.errors import ConfigError


@dataclass(frozen=True)
class Divergence:
    """The first new token that differs; `gap` is PyTorch's logit of its own choice minus its logit of ours."""

    prompt: int
    position: int
    expected: int
    got: int
    gap: float


@dataclass
class Report:
    """All figures of one comparison. `layers[0]` is the embedding, `layers[i]` the residual stream after i layers."""

    layers: list[Errors] = field(default_factory=list)
    logits: Errors = field(default_factory=Errors)
    kl_mean: float = 0.0
    kl_max: float = 0.0
    top1_agreement: float = 1.0
    positions: int = 0
    prompts: int = 0
    identical: int = 0
    tokens: int = 0
    max_logprob_error: float = 0.0
    divergences: list[Divergence] = field(default_factory=list)
    drafts: DraftsReport | None = None

    def failures(self, *, max_logit_error: float, min_top1: float, require_identical: bool) -> list[str]:
        """Each threshold that is not met, one line each. Written so that NaN fails."""
        out = []
        if self.positions and not self.logits.maximum <= max_logit_error:
            out.append(f"max logit error {self.logits.maximum:.3g} is over {max_logit_error:g}")
        if self.positions and not self.top1_agreement >= min_top1:
            out.append(f"top-1 agreement {self.top1_agreement:.4f} is under {min_top1:g}")
        if require_identical and self.identical < self.prompts:
            out.append(f"{self.prompts - self.identical} of {self.prompts} greedy continuations differ")
        if self.drafts is not None:
            out += self.drafts.failures(
                max_logit_error=max_logit_error, min_top1=min_top1, require_identical=require_identical
            )
        return out

    def summary(self) -> str:
        """The main figures in one line."""
        text = f"{self.identical} of {self.prompts} continuations identical"
        drafts = f", {self.drafts.summary()}" if self.drafts else ""
        if not self.positions:
            return f"{text}, max logprob error {self.max_logprob_error:.2e}{drafts}"
        agreement = 100 * self.top1_agreement
        return f"{text}, max logit error {self.logits.maximum:.2e}, top-1 agreement {agreement:.2f} %{drafts}"

    def as_json(self) -> dict[str, Any]:
        figures = asdict(self)
        figures["layers"] = [errors.as_json() for errors in self.layers]
        figures["logits"] = self.logits.as_json()
        if self.drafts is None:
            del figures["drafts"]
        else:
            figures["drafts"] = self.drafts.as_json()
        return figures


class Collector:
    """An engine observer that keeps residual streams and logits of every position of every request.

    Attributes:
        rows: of each request, residual streams and logits by position.
        inputs: of each request, what a draft read of the target, by position.
        drafts: of each request, what a draft said after the token at a position, by that position.
        on_positions: called after each step with its number of positions.
    """

    def __init__(self, on_positions: Callable[[int], None] = lambda _count: None):
        self.rows: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {}
        self.inputs: dict[str, dict[int, np.ndarray]] = {}
        self.drafts: dict[str, dict[int, DraftRow]] = {}
        self.on_positions = on_positions

    def __call__(self, step: Any) -> None:
        prefill_at, decode_at = step.token_offsets()
        spans = [(r.request.id, r.start, at, r.length) for r, at in zip(step.plan.prefill, prefill_at, strict=True)]
        # A window holds the newest token, then its drafts: as many as the request gained tokens were of its text.
        windows = step.emitted[len(step.plan.prefill) :].tolist()
        decode = zip(step.plan.decode, decode_at, windows, strict=True)
        spans += [(r.id, len(r.tokens) - 1, at, gained) for r, at, gained in decode]
        drafted = step.probe.drafted
        for request_id, position, at, length in spans:
            rows = self.rows.setdefault(request_id, {})
            inputs = self.inputs.setdefault(request_id, {})
            for i in range(length):
                rows[position + i] = (step.probe.residuals[:, at + i], step.probe.logits[at + i])
                if drafted is not None:
                    inputs[position + i] = drafted.inputs[at + i]
        if drafted is not None:
            self._keep_drafts(step, drafted)
        self.on_positions(sum(length for *_, length in spans))

    def _keep_drafts(self, step: Any, drafted: Any) -> None:
        """What follows the newest token of each row: on the device that is the last accepted one and the target's own,
        although a request may end before it."""
        prefill, first = step.plan.prefill, step.bucket.prefill_rows
        newest = [(i, i, row.request.id, row.start + row.length) for i, row in enumerate(prefill) if row.final]
        for i, request in enumerate(step.plan.decode):
            row = len(prefill) + i
            if step.emitted[row]:
                newest.append((row, first + i, request.id, len(request.tokens) + int(step.accepted[row])))
        for row, at, request_id, position in newest:
            self.drafts.setdefault(request_id, {})[position] = DraftRow(
                step.drafts[row, : len(drafted.hidden)],
                np.stack([hidden[at] for hidden in drafted.hidden]),
                np.stack([logits[at] for logits in drafted.logits]),
            )

    def clear(self) -> None:
        for kept in (self.rows, self.inputs, self.drafts):
            kept.clear()

    def arrays(self, request_id: str) -> tuple[np.ndarray, np.ndarray]:
        """Residual streams [layers + 1, T, H] and logits [T, V] by position."""
        rows = self.rows[request_id]
        ordered = [rows[p] for p in range(len(rows))]
        return np.stack([r for r, _ in ordered], axis=1), np.stack([g for _, g in ordered])


class Comparison:
    """Compares group after group of reference runs with an LLM; `report` holds what came out so far.

    The LLM must have been built with `probe=True` and the collector as its observer.

    Raises:
        ConfigError: the LLM accepts drafts at random.
    """

    def __init__(self, llm: Any, collector: Collector):
        if llm.engine.settings.synthetic_acceptance_length is not None:
            raise ConfigError("synthetic_acceptance_length makes the text worthless: there is nothing to compare")
        self.report = Report()
        self._llm = llm
        self._collector = collector
        self._agreements = 0
        self._kl_sum = 0.0

    def add(self, runs: Sequence[ReferenceRun]) -> None:
        """Runs the LLM on the prompts of some runs and compares."""
        from jaxspec.sampling.params import SamplingParams

        def requests(prompts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[Any]:
            params = [SamplingParams(max_tokens=n, temperature=0, ignore_eos=True, logprobs=0) for n in lengths]
            return [self._llm.make_request(ids, each) for ids, each in zip(prompts, params, strict=True)]

        decode = requests([run.prompt_ids for run in runs], [len(run.new_ids) for run in runs])
        completions = self._llm.run(decode)
        with_arrays = [run for run in runs if run.logits is not None]
        prefill = requests([(*run.prompt_ids, *run.new_ids[:-1]) for run in with_arrays], [1] * len(with_arrays))
        self._llm.run(prefill)
        prefilled = iter(prefill)
        for run, request, completion in zip(runs, decode, completions, strict=True):
            same = self._compare_text(run, completion)
            if run.logits is not None:
                # The decode run is comparable as long as it was fed the same tokens: up to its first different one.
                self._compare_arrays(run, request.id, min(len(run.prompt_ids) + same, len(run.logits)))
                self._compare_arrays(run, next(prefilled).id, len(run.logits))
            if run.drafts is not None:
                self._compare_drafts(run, request.id, same)
        self._collector.clear()

    def _compare_text(self, run: ReferenceRun, completion: Any) -> int:
        """Counts one continuation; returns how many of its tokens are the reference's."""
        report, got = self.report, completion.ids
        same = next((j for j, (a, b) in enumerate(zip(run.new_ids, got, strict=True)) if a != b), len(got))
        if same:
            logprobs = np.array(completion.logprobs[:same], np.float32)
            report.max_logprob_error = max(report.max_logprob_error, float(abs(logprobs - run.logprobs[:same]).max()))
        if same < len(got):
            gap = float(run.gaps[same])
            if run.logits is not None:
                row = run.logits[len(run.prompt_ids) - 1 + same]
                gap = float(row[run.new_ids[same]] - row[got[same]])
            report.divergences.append(Divergence(report.prompts, same, run.new_ids[same], got[same], gap))
        report.prompts += 1
        report.tokens += len(got)
        report.identical += same == len(got)
        return same

    def _compare_drafts(self, run: ReferenceRun, request_id: str, same: int) -> None:
        """What was drafted after each of the first `same` new tokens, which are the reference's."""
        assert run.drafts is not None
        report = self.report.drafts = self.report.drafts or DraftsReport(
            self._llm.engine.settings.num_speculative_tokens
        )
        rows = self._collector.drafts.get(request_id, {})
        inputs = self._collector.inputs.get(request_id, {})
        first = len(run.prompt_ids)
        said = {p - first: row for p, row in rows.items() if 0 <= p - first < same}
        compare_drafts(report, self.report.prompts - 1, run.drafts, said, inputs, fed=first + same - 1)

    def _compare_arrays(self, run: ReferenceRun, request_id: str, length: int) -> None:
        """Residual streams and logits of a request's first `length` positions."""
        report = self.report
        assert run.logits is not None
        assert run.residuals is not None
        residuals, logits = self._collector.arrays(request_id)
        report.layers = report.layers or [Errors() for _ in residuals]
        for layer, errors in enumerate(report.layers):
            errors.add(residuals[layer, :length] - run.residuals[layer, :length])
        want, have = run.logits[:length], logits[:length]
        report.logits.add(have - want)
        report.positions += length
        self._agreements += int((want.argmax(axis=1) == have.argmax(axis=1)).sum())
        p, q = log_softmax(want), log_softmax(have)
        kl = (np.exp(p) * (p - q)).sum(axis=1)
        self._kl_sum += float(kl.sum(dtype=np.float64))
        report.kl_mean = self._kl_sum / report.positions
        report.kl_max = float(np.maximum(report.kl_max, kl.max()))
        report.top1_agreement = self._agreements / report.positions


def compare(llm: Any, collector: Collector, reference: Sequence[ReferenceRun]) -> Report:
    """The report of all runs at once; see `Comparison`."""
    comparison = Comparison(llm, collector)
    comparison.add(reference)
    return comparison.report
