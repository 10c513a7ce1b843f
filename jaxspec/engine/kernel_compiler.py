"""Compiles the kernels of steps on several threads, before the steps that have them.

XLA compiles a step's kernels one after the other, which is most of the time that a step takes it, and knows a kernel that it
has compiled before in the process. So each kernel goes to XLA by itself first, as soon as a step that has it is lowered.
"""

import concurrent.futures
import functools
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxspec.compat import compile_program
from jaxspec.engine.priority import give_way
from pallas_kernels.programs import kernel_programs

logger = logging.getLogger("jaxspec.kernels")

Kernels = Sequence[concurrent.futures.Future[None]]


class KernelCompiler:
    """
    Args:
        compile_program: compiles MLIR bytecode, for its effect on what XLA knows.
        programs: those of a step's StableHLO, by names of their kernels.
        workers: threads (default: half of the cores, as XLA needs some beside them).
    """

    def __init__(
        self,
        compile_program: Callable[[bytes], Any],
        programs: Callable[[Any], Mapping[bytes, bytes]] = kernel_programs,
        workers: int | None = None,
    ):
        self._compile_program, self._programs = compile_program, programs
        self._workers = workers or max(1, (os.cpu_count() or 1) // 2)
        self._lock = threading.Lock()
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._begun: dict[bytes, concurrent.futures.Future[None]] = {}

    def begin(self, lowered: jax.stages.Lowered) -> Kernels:
        """Threads compile the kernels of a step that are new. On the thread that lowered it."""
        try:
            programs = self._programs(lowered.compiler_ir("stablehlo"))
        except Exception:  # of jax's own representation, which other versions may change
            logger.warning("a step's kernels will be compiled one after the other", exc_info=True)
            return ()
        with self._lock:
            if self._pool is None:
                self._pool = concurrent.futures.ThreadPoolExecutor(self._workers, "kernels", give_way)
            for name, code in programs.items():
                if name not in self._begun:
                    self._begun[name] = self._pool.submit(self._compile, code)
            return [self._begun[name] for name in programs]

    def _compile(self, code: bytes) -> None:
        try:
            self._compile_program(code)
        except Exception:  # the step that has the kernel will fail, or do without
            logger.warning("a kernel did not compile by itself", exc_info=True)


def wait_for(kernels: Kernels) -> None:
    """Until XLA has them; a step would compile again what another thread is compiling."""
    concurrent.futures.wait(kernels)


@functools.cache
def kernel_compiler(device: jax.Device) -> KernelCompiler:
    """That of the process, for programs of a device."""
    return KernelCompiler(functools.partial(compile_program, device))
