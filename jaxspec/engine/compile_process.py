"""A process that compiles steps for this one, and keeps them where this one finds them.

Tracing and lowering a step takes seconds of Python, in which a server's other threads wait for Python's lock. The process is
sent shapes, not parameters: besides what XLA needs to try out matmuls, it takes no memory of the device.
"""

import concurrent.futures
import contextlib
import io
import logging
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import jax

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.compiler import Compiler
from jaxspec.engine.fingerprint import jax_options
from jaxspec.engine.priority import give_way

logger = logging.getLogger("jaxspec.warmup")

# What XLA tries out is given back at once: the process that serves has most of the memory already.
_ALLOCATOR = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}


class CompileProcess:
    """
    Args:
        compiler: the steps'; its store keeps them.
        buckets: in the order in which they are begun.
    """

    def __init__(self, compiler: Compiler, buckets: Sequence[Bucket]):
        self.buckets = tuple(buckets)
        self._changed = threading.Condition()
        self._kept: set[Bucket] = set()
        self._has_ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "jaxspec.engine.compile_process"],
            env=os.environ | _ALLOCATOR,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            process_group=0,  # what is typed at a terminal to stop the server is for the server
        )
        job = jax_options(), to_bytes((compiler, self.buckets))
        threading.Thread(target=self._attend, args=(job,), name="compile process", daemon=True).start()

    def _attend(self, job: tuple[dict[str, Any], bytes]) -> None:
        try:
            with contextlib.suppress(OSError), self._process as process:  # an error if it ends before it has read all
                assert process.stdin is not None
                assert process.stdout is not None
                pickle.dump(job, process.stdin)
                process.stdin.flush()  # and it stays open: the process ends when it closes
                for line in process.stdout:
                    with self._changed:
                        self._kept.add(self.buckets[int(line)])
                        self._changed.notify_all()
        finally:  # whatever happens, nobody waits for it any more
            with self._changed:
                self._has_ended = True
                self._changed.notify_all()

    def finished(self, buckets: Iterable[Bucket]) -> Iterator[Bucket]:
        """Each of these when its executable is kept; ends when all are, or with the process."""
        waiting, has_ended = set(buckets), False
        while waiting and not has_ended:
            with self._changed:
                while not (self._has_ended or waiting & self._kept):
                    self._changed.wait()
                found, has_ended = waiting & self._kept, self._has_ended
            waiting -= found
            yield from found

    def stop(self) -> None:
        """At once: what it writes is whole or absent."""
        self._process.kill()


def compile_beside(compiler: Compiler, buckets: Sequence[Bucket]) -> CompileProcess | None:
    """A process for those buckets whose steps are not kept; None if all are."""
    missing = [bucket for bucket in buckets if not compiler.store.has(compiler.key("step", bucket))]
    return CompileProcess(compiler, missing) if missing else None


def to_bytes(value: Any) -> bytes:
    """A pickle, in which devices have their ids."""
    out = io.BytesIO()
    _Pickler(out).dump(value)
    return out.getvalue()


def from_bytes(data: bytes) -> Any:
    return _Unpickler(io.BytesIO(data)).load()


class _Pickler(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.id if isinstance(obj, jax.Device) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return next(device for device in jax.devices() if device.id == pid)


def main() -> None:
    finished = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)  # what libraries print is for people
    give_way()
    options, job = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    for name, value in options.items():
        if getattr(jax.config, name, value) != value:
            jax.config.update(name, value)
    compiler, buckets = from_bytes(job)
    # Half of the cores, as where one process does both.
    pool = concurrent.futures.ThreadPoolExecutor(max(1, min(len(buckets), (os.cpu_count() or 1) // 2)))
    numbers = {pool.submit(_compile, compiler, bucket): i for i, bucket in enumerate(buckets)}
    for made in concurrent.futures.as_completed(numbers):
        if made.exception() is None:
            finished.write(b"%d\n" % numbers[made])
        else:  # the other process will try it again, and say why it fails
            logger.warning("a step did not compile beside the server: %s", made.exception())


def _compile(compiler: Compiler, bucket: Bucket) -> None:
    compiler.store.save(compiler.key("step", bucket), compiler.compile(bucket))


def _end_with_parent(stdin: BinaryIO) -> None:
    stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
