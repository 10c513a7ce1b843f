"""`bench step` beside vLLM's figures (`bench step_vllm`), and whether the engine's gates are met."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxspec.errors import JaxspecError


@dataclass(frozen=True)
class Bound:
    """What is asked of a figure, and what is hoped for; of rates at least that, of all others at most."""

    gate: float
    goal: float


RATIO = Bound(0.88, 0.8)
MS_OF_ONE_ROW = Bound(2.1, 1.8)
PREFILL_RATIO = Bound(1.0, 1.0)
# Of plain steps, by layers; fewer rows have kernels of their own.
KERNELS_PER_LAYER, KERNELS_FROM_ROWS = Bound(12.0, 12.0), 4


class PeerError(JaxspecError):
    """A file without figures to compare with."""


def read_peers(files: Iterable[Path], *, tokens: int, context: int) -> dict[str, dict[str, Any]]:
    """The results in `files`, by what they are compared with: "plain" steps or "cycle".

    Args:
        tokens, context: this run's drafted tokens and prompt length, which must be theirs.

    Raises:
        PeerError: a file is not such a result, or has other sizes.
    """
    peers: dict[str, dict[str, Any]] = {}
    for file in files:
        try:
            peer = json.loads(file.read_text())
            drafted, theirs = peer["num_speculative_tokens"], peer["context"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise PeerError(f"{file} is no result of bench step_vllm: {e}") from e
        if theirs != context:
            raise PeerError(f"{file} is of prompts of {theirs} tokens, and this run's have {context}")
        if drafted not in (0, tokens):
            raise PeerError(f"{file} drafts {drafted} tokens a cycle, and this run {tokens}")
        kind = "cycle" if drafted else "plain"
        if kind in peers:
            raise PeerError(f"{file} is a second result of the same kind")
        peers[kind] = peer
    return peers


def beside(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, float]:
    """One row count's figures over the peer's: of times, below 1 is faster; of the prompts' rate, above 1 is."""
    return {
        "step_ms": theirs["step_ms"],
        "ratio": round(ours["step_ms"] / theirs["step_ms"], 4),
        "ratio_alternating": round(ours["step_alternating_ms"] / theirs["step_ms"], 4),
        "prefill_tokens_per_s": theirs["prefill_tokens_per_s"],
        "prefill_ratio": round(ours["prefill_tokens_per_s"] / theirs["prefill_tokens_per_s"], 4),
    }


def add_peers(rows: Sequence[dict[str, Any]], peers: Mapping[str, Mapping[str, Any]]) -> None:
    """Adds "peer" to the plain and to the cycle's figures of each row count that the peer has too."""
    for kind, peer in peers.items():
        theirs = {row["rows"]: row for row in peer["rows"]}
        for row in rows:
            if row["rows"] in theirs:
                ours = row if kind == "plain" else row["cycle"]
                ours["peer"] = beside(ours, theirs[row["rows"]])


def gates(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each gate with figures: the worst one, its row count, and whether the gate is met.

    The bounds are for the shape that the peer was timed on, so without a peer there are no gates. Kernels are known after
    steps were traced.
    """
    out = []

    def judge(gate: str, figures: Sequence[tuple[float, int]], bound: Bound, *, at_least: bool = False) -> None:
        if figures:
            figure, worst = (min if at_least else max)(figures)
            met = figure >= bound.gate if at_least else figure <= bound.gate
            of_rows = {"worst": figure, "at_rows": worst, "row_counts": len(figures)}
            out.append({"gate": gate, **of_rows, "bound": bound.gate, "goal": bound.goal, "met": met})

    compared = [row for row in rows if "peer" in row]
    one = [row for row in compared if row["rows"] == 1]
    judge("plain step at 1 row, ms", [(row["step_ms"], 1) for row in one], MS_OF_ONE_ROW)
    judge("the same, alternating, ms", [(row["step_alternating_ms"], 1) for row in one], MS_OF_ONE_ROW)
    kinds = {"plain step": rows, "cycle": [row["cycle"] | {"rows": row["rows"]} for row in rows if "cycle" in row]}
    for name, each in kinds.items():
        for suffix, key in (("", "ratio"), (", alternating", "ratio_alternating")):
            figures = [(row["peer"][key], row["rows"]) for row in each if "peer" in row]
            judge(f"{name} over the peer's{suffix}", figures, RATIO)
    judge(
        "prompt tokens/s over the peer's",
        [(row["peer"]["prefill_ratio"], row["rows"]) for row in compared],
        PREFILL_RATIO,
        at_least=True,
    )
    traced = [row for row in compared if "kernels_per_layer" in row and row["rows"] >= KERNELS_FROM_ROWS]
    judge(
        "kernels of a plain step a layer",
        [(row["kernels_per_layer"], row["rows"]) for row in traced],
        KERNELS_PER_LAYER,
    )
    return out
