"""A line of JSON for every step: what ran, how long it took, and what came of it. `bench timeline` draws it."""

import contextlib
import json
import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.plan import StepPlan
from jaxspec.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepTimes:
    """Seconds on the clock of `time.monotonic`: planning began, dispatched, reading began, was read, was processed."""

    planned: float
    dispatched: float
    reading: float
    read: float
    processed: float


class StepObserver(Protocol):
    """Sees every step after its tokens have been processed."""

    def write(
        self, plan: StepPlan, bucket: Bucket, times: StepTimes, emitted: Any, accepted: Any, *, waiting: int
    ) -> None:
        """
        Args:
            emitted, accepted: int [rows], of the plan's rows.
            waiting: requests without a slot.
        """
        ...


class StepLog:
    """A `StepObserver` that writes a file.

    Raises:
        ConfigError: the file cannot be written.
    """

    def __init__(self, path: str):
        try:
            self._file = Path(path).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115 - open as long as the engine
        except OSError as e:
            raise ConfigError(f"log_steps: cannot write {path}: {e.strerror}") from e
        self._started = time.monotonic()
        self._last_read = self._started
        self._steps = 0
        self._failed = False

    def write(
        self, plan: StepPlan, bucket: Bucket, times: StepTimes, emitted: Any, accepted: Any, *, waiting: int
    ) -> None:
        """Appends a line.

        The device's time ends when the output has been read, and begins when the step was dispatched or the output of
        the step before it was read, whichever was later. The host's time is what it spent on this step without waiting.
        """
        first = len(plan.prefill)
        row = {
            "step": self._steps,
            "start": round(times.dispatched - self._started, 6),
            "end": round(times.read - self._started, 6),
            "bucket": str(bucket),
            "host_ms": round(1e3 * (times.dispatched - times.planned + times.processed - times.read), 3),
            "device_ms": round(1e3 * (times.read - max(times.dispatched, self._last_read)), 3),
            "prefill": [
                {
                    "request": row.request.id, "start": row.start, "tokens": row.length, "final": row.final,
                    "emitted": int(emitted[i]),
                }
                for i, row in enumerate(plan.prefill)
            ],
            "decode": [
                {"request": request.id, "emitted": int(emitted[first + i]), "accepted": int(accepted[first + i])}
                for i, request in enumerate(plan.decode)
            ],
            "waiting": waiting,
        }  # fmt: skip
        self._last_read = times.read
        self._steps += 1
        self._append(json.dumps(row) + "\n")

    def _append(self, line: str) -> None:
        """A full disk ends the log, not the engine."""
        if self._failed:
            return
        try:
            self._file.write(line)
        except OSError as e:
            self._failed = True
            logger.warning("the step log ends here: %s", e.strerror or e)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # what a full disk did not take
            self._file.close()
