"""What jaxspec uses of jax that is not in its stable interface and may differ between versions: compilation events, and
compiling a program that jax has not traced.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax
import jax.monitoring
import numpy as np
from jax._src import compiler
from jaxlib import xla_client

_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class CompileCounter:
    """Counts XLA compilations of this process, from any thread, and those after `mark_warm`.

    Attributes:
        total: all; num_apart: those inside `apart`, which no warm-up could have missed.
    """

    def __init__(self):
        self._lock = threading.Lock()
        self.total = 0
        self.num_apart = 0
        self.seconds = 0.0
        self._warm_total: int | None = None
        self._warm_apart = 0
        self._thread = threading.local()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **_kwargs: str | int) -> None:
        if event == _COMPILE_EVENT:
            with self._lock:
                self.total += 1
                self.seconds += duration_secs
                self.num_apart += getattr(self._thread, "apart", False)

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Compilations of this thread are known to come after warm-up."""
        self._thread.apart = True
        try:
            yield
        finally:
            self._thread.apart = False

    def mark_warm(self) -> None:
        """Every later compilation is one that warm-up missed, unless it is one apart."""
        with self._lock:
            self._warm_total, self._warm_apart = self.total, self.num_apart

    @property
    def after_warmup(self) -> int:
        with self._lock:
            apart = self.num_apart - self._warm_apart
            return 0 if self._warm_total is None else self.total - self._warm_total - apart


# jax keeps listeners for the life of the process, so there is one counter.
compiles = CompileCounter()


def compile_program(device: jax.Device, code: bytes) -> Any:
    """Compiles a program of one device, MLIR bytecode. jax counts no compilation, and keeps nothing."""
    client: Any = device.client
    options = compiler.get_compile_options(
        num_replicas=1, num_partitions=1, device_assignment=np.array([[device.id]]), backend=client
    )
    return client.compile_and_load(code, executable_devices=xla_client.DeviceList((device,)), compile_options=options)
