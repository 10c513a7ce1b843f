"""What jaxspec uses of jax that is not in its stable interface and may differ between versions: compilation events."""

import threading

import jax.monitoring

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compilations of this process, from any thread, and those after `mark_warm`."""

    def __init__(self):
        self._lock = threading.Lock()
        self.total = 0
        self.seconds = 0.0
        self._warm_total: int | None = None
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.total += 1
                self.seconds += duration_secs

    def mark_warm(self) -> None:
        """Every later compilation is one that warm-up missed."""
        self._warm_total = self.total

    @property
    def after_warmup(self) -> int:
        return 0 if self._warm_total is None else self.total - self._warm_total


# jax keeps listeners for the life of the process, so there is one counter.
compiles = CompileCounter()
