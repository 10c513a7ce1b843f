"""Before the first request: every bucket's executable is loaded or compiled, and run on padding.

A server need not wait for all of them. It is ready with those that hold every plan and the usual numbers of decode rows, and
with what an earlier start compiled; another process compiles the others, threads load them while no request runs, and the
runner takes each into its table between two steps. Until then the next larger bucket serves. Loading, tracing and first runs
stop steps for tens of milliseconds and more, so under requests that never pause they begin one by one, seconds apart.
"""

import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import jax

from jaxspec.compat import compiles
from jaxspec.config import Settings
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.compile_process import CompileProcess
from jaxspec.engine.executables import Executable
from jaxspec.engine.priority import give_way
from jaxspec.errors import ConfigError, flagged
from jaxspec.progress import Progress

logger = logging.getLogger("jaxspec.warmup")

# A decode step of one request, and of a few; the largest number is always among the first.
FIRST_DECODE_ROWS = (1, 8)
# Requests that follow each other within so long are one load; also how long a server that has just become ready waits for the
# first ones.
_QUIET_SECONDS = 2.0
# Under a load that does not end: until the first executable is got and run, and from each to the next.
_PATIENCE_SECONDS, _PACE_SECONDS = 5.0, 2.0
_POLL_SECONDS = 0.05
# Most that the end of the process waits for a compilation, which cannot be interrupted.
_STOP_SECONDS = 30


def _no_smaller(a: Bucket, b: Bucket) -> bool:
    sizes = [(each.prefill_tokens, each.prefill_rows, each.decode_rows, each.drafts) for each in (a, b)]
    return all(x >= y for x, y in zip(*sizes, strict=True)) and (a.variant == "full" or b.variant == "lean")


def covers(a: Bucket, b: Bucket) -> bool:
    """Whether `a` holds every plan that `b` holds."""
    return _no_smaller(a, b) and a.drafts == b.drafts


def largest_buckets(table: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Those that need the most memory: one, where prompts and decodes share steps."""
    return tuple(b for b in table if not any(_no_smaller(a, b) for a in table if a != b))


def first_buckets(table: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Those that a server is ready with: the largest, one for a quarter of its prompt tokens, and of decode steps those of
    1, 8 and the most rows.

    Of buckets of equal sizes the one that covers the others: together they hold every plan that the table holds. Without the
    quarter the first prompts of a cold server would take the time of 4096 tokens each.
    """
    decode = [b for b in table if not b.prefill_rows]
    most = max((b.decode_rows for b in decode), default=0)
    first = {b for b in decode if b.decode_rows in (*FIRST_DECODE_ROWS, most)}
    first = {b for b in first if not any(covers(a, b) and a.rows == b.rows for a in first - {b})}
    largest = {b for b in table if not any(covers(a, b) for a in table if a != b)}
    # Where the number of drafts changes there are largest ones enough.
    quarters = {_quarter(table, b) for b in largest if b.prefill_rows} if len({b.drafts for b in table}) == 1 else set()
    return tuple(b for b in table if b in first | largest | quarters)


def _quarter(table: Sequence[Bucket], bucket: Bucket) -> Bucket | None:
    """The largest of a quarter of a bucket's prompt tokens, otherwise of its sizes; None if the table has none."""
    smaller = [
        b
        for b in table
        if 0 < 4 * b.prefill_tokens <= bucket.prefill_tokens
        and (b.prefill_rows, b.decode_rows, b.variant) == (bucket.prefill_rows, bucket.decode_rows, bucket.variant)
    ]
    return max(smaller, key=lambda b: b.prefill_tokens, default=None)


class Preparation:
    """Gets executables of buckets: those that are kept, else newly compiled ones, which are then kept.

    Where executables are kept on a CPU, nothing compiles meanwhile: see `run`.

    Args:
        load: what is kept for a bucket, or None.
        make: a new executable; it may also be given what returns once tracing may begin.
        save: keeps one.
        compile_beside: a process that compiles and keeps those of buckets that are not kept; None: this process does it.

    Attributes:
        num_kept: buckets whose executables an earlier start had compiled, of those that `run` prepared.
        num_pending: buckets that the threads that `go_on` starts have still to prepare, and those that `take` has not given.
    """

    def __init__(
        self,
        load: Callable[[Bucket], Executable | None],
        make: Callable[..., Executable],
        save: Callable[[Bucket, Executable], None],
        compile_beside: Callable[[Sequence[Bucket]], CompileProcess | None] | None = None,
    ):
        self._load, self._make, self._save = load, make, save
        self._compile_beside = compile_beside
        self._beside: CompileProcess | None = None
        self._stopping = threading.Event()
        self._counting = threading.Lock()
        self._prepared: queue.SimpleQueue[tuple[Bucket, Executable]] = queue.SimpleQueue()
        self._unsaved: list[tuple[Bucket, Executable]] = []
        self._threads: list[threading.Thread] = []
        self._begun: dict[concurrent.futures.Future[tuple[Executable, bool]], Bucket] = {}
        self.num_kept = self._num_preparing = 0
        # Since when no request runs, None while one does; and when an executable was last got, or taken, under load.
        self._quiet_since: float | None = time.monotonic()
        self._last_got = self._last_taken = time.monotonic()
        self._turns = threading.Lock()

    @property
    def num_pending(self) -> int:
        with self._counting:
            return self._num_preparing + self._prepared.qsize()

    def working(self, *, busy: bool) -> None:
        """Says whether steps of requests run: threads begin nothing then but at long intervals."""
        if busy:
            self._quiet_since = None
        elif self._quiet_since is None:
            self._quiet_since = time.monotonic()

    def begin(self, buckets: Sequence[Bucket]) -> None:
        """Threads get these already; `run` takes them when they are there. Not on a CPU: see `run`."""
        pool = concurrent.futures.ThreadPoolExecutor(max(1, len(buckets)), "ahead")
        self._begun = {pool.submit(self._get, bucket): bucket for bucket in _longest_first(buckets)}
        pool.shutdown(wait=False)

    def begin_beside(self, buckets: Sequence[Bucket]) -> None:
        """Another process begins to compile those that are not kept, where there may be one; `go_on` has what it keeps."""
        if self._compile_beside is not None and self._beside is None and not self._stopping.is_set():
            self._beside = self._compile_beside(_longest_first(buckets))

    def _get(self, bucket: Bucket) -> tuple[Executable, bool]:
        """An executable, and whether it was kept."""
        kept = self._load(bucket)
        return (self._make(bucket), False) if kept is None else (kept, True)

    def run(
        self,
        buckets: Sequence[Bucket],
        use: Callable[[Bucket, Executable], None],
        progress: Progress | None = None,
        announce: Progress | None = None,
    ) -> None:
        """Loads what is kept, then compiles the rest, each in parallel threads; takes what has begun last, here and beside.

        Args:
            use: gets one executable at a time, on this thread.
            progress, announce: see `Runner.warm_up`.
        """
        started = time.monotonic()
        done, told = itertools.count(1), threading.Lock()
        # What is no longer wanted, because the table was cut since, ends by itself.
        begun = {future: bucket for future, bucket in self._begun.items() if bucket in buckets}
        self._begun = {}

        def used(bucket: Bucket, executable: Executable) -> None:
            use(bucket, executable)
            with told:
                if progress:
                    progress(next(done), len(buckets), f"{bucket}: {time.monotonic() - started:.1f} s")

        missing, self.num_kept = [], 0
        for bucket, kept in _in_threads(self._load, [b for b in buckets if b not in begun.values()]):
            if kept is None:
                missing.append(bucket)
            else:
                self.num_kept += 1
                used(bucket, kept)
        compiling = [bucket for future, bucket in begun.items() if not future.done()]
        numbers = itertools.count(len(buckets) - len(missing) - len(compiling) + 1)
        beside = [bucket for bucket in missing if self._beside is not None and bucket in self._beside.buckets]
        if announce:
            for bucket in (*compiling, *beside):
                announce(next(numbers), len(buckets), bucket.words)

        def make_told(bucket: Bucket) -> Executable:
            with told:
                if announce:
                    announce(next(numbers), len(buckets), bucket.words)
            return self._make(bucket)

        for bucket, executable in _in_threads(make_told, _longest_first(set(missing) - set(beside))):
            used(bucket, executable)
            self._unsaved.append((bucket, executable))
        for future in concurrent.futures.as_completed(begun):
            executable, was_kept = future.result()
            used(begun[future], executable)
            self.num_kept += was_kept
            self._unsaved += [] if was_kept else [(begun[future], executable)]
        for bucket in self._in_time(beside):
            if (found := self._load(bucket)) is None:
                found = self._make(bucket)
                self._unsaved.append((bucket, found))
            used(bucket, found)
        if self.num_kept:
            logger.info("%d of %d steps were compiled by an earlier start", self.num_kept, len(buckets))

    def save(self) -> None:
        """Keeps what `run` has compiled."""
        while not self._stopping.is_set():
            try:
                unsaved = self._unsaved.pop()
            except IndexError:  # this thread or another took the last
                return
            self._save(*unsaved)

    def go_on(self, buckets: Sequence[Bucket]) -> None:
        """Prepares more buckets, and keeps all, on threads that give way to this one; `take` has what is prepared.

        Not on a CPU, where what is kept may not be written while something compiles.
        """
        self._num_preparing = len(buckets)
        self.begin_beside(buckets)
        waiting: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        started, numbers = time.monotonic(), itertools.count(1)
        self._last_got = self._last_taken = started + _PATIENCE_SECONDS - _PACE_SECONDS
        self._quiet_since = started

        def work() -> None:
            give_way()
            with compiles.apart():
                while (bucket := waiting.get()) is not None and not self._stopping.is_set():
                    turn = self._await_turn()
                    if self._stopping.is_set():
                        return
                    self.save()
                    how = self._prepare(bucket, turn)
                    numbered = f"{how} {next(numbers)} of {len(buckets)} while serving"
                    logger.info("%s, after %.1f s: %s", numbered, time.monotonic() - started, bucket)

        # Half of the cores: XLA compiles a step for tens of seconds, most of it without Python's lock.
        count = max(1, min(len(buckets), (os.cpu_count() or 1) // 2))

        def feed() -> None:
            for bucket in self._in_time(buckets):
                waiting.put(bucket)
            for _ in range(count):
                waiting.put(None)

        self._threads = [threading.Thread(target=work, name=f"warm-up {i}", daemon=True) for i in range(count)]
        self._threads.append(threading.Thread(target=feed, name="warm-up", daemon=True))
        atexit.register(self.stop)
        for thread in self._threads:
            thread.start()

    def _in_time(self, buckets: Sequence[Bucket]) -> Iterator[Bucket]:
        """The buckets: those that another process compiles when it has kept them, or when it has ended without."""
        missing = [bucket for bucket in buckets if self._beside is not None and bucket in self._beside.buckets]
        yield from (bucket for bucket in buckets if bucket not in missing)
        if self._beside is not None:
            for bucket in self._beside.finished(missing):
                missing.remove(bucket)
                yield bucket
        if missing and not self._stopping.is_set():
            logger.warning("the process that compiles steps ended early: %d are compiled by this one", len(missing))
        yield from missing

    def _await_turn(self, own: float | None = None) -> float | None:
        """Until no request has run for a while, or one thread after the other has waited long enough.

        Args:
            own: a turn of this thread, which it keeps while no other has one.

        Returns:
            The turn; None where it needed none, since no request runs.
        """
        with self._turns:
            while own is None or own != self._last_got:
                now, quiet_since = time.monotonic(), self._quiet_since
                if quiet_since is not None and now - quiet_since >= _QUIET_SECONDS:
                    return None
                if now - self._last_got >= _PACE_SECONDS:
                    self._last_got = now
                    return now
                if self._stopping.wait(_POLL_SECONDS):
                    return None
        return own

    def _prepare(self, bucket: Bucket, turn: float | None) -> str:
        kept = self._load(bucket)
        try:
            # Steps are traced one after the other: since this thread had its turn, requests may have come.
            executable = kept or self._make(bucket, lambda: self._await_turn(turn))
        except Exception:
            logger.exception("a step could not be compiled while serving: larger ones go on serving in its place")
            with self._counting:
                self._num_preparing -= 1
            return "failed"
        with self._counting:
            self._prepared.put((bucket, executable))
            self._num_preparing -= 1
        if kept is None:
            self._save(bucket, executable)
        return "loaded" if kept else "compiled"

    def stop(self) -> None:
        """Waits for the compilations that run, and begins no other: the process may not end while XLA compiles."""
        self._stopping.set()
        if self._beside is not None:
            self._beside.stop()
        for future in self._begun:
            future.cancel()
        deadline = time.monotonic() + _STOP_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def take(self, most: int = sys.maxsize) -> list[tuple[Bucket, Executable]]:
        """What has been prepared and not taken."""
        out: list[tuple[Bucket, Executable]] = []
        while len(out) < most and not self._prepared.empty():
            out.append(self._prepared.get())
        return out

    def take_under_load(self) -> list[tuple[Bucket, Executable]]:
        """One of these at most, and none again for a while: its first runs will be steps of requests."""
        if self._prepared.empty() or (now := time.monotonic()) - self._last_taken < _PACE_SECONDS:
            return []
        self._last_taken = now
        return self.take(1)


def _longest_first(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Those that compile for longest: steps are traced one after the other, and the last should not be the longest."""
    return sorted(buckets, key=lambda bucket: bucket.tokens, reverse=True)


T = TypeVar("T")


def _in_threads(work: Callable[[Bucket], T], buckets: Sequence[Bucket]) -> Iterator[tuple[Bucket, T]]:
    pool = concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(len(buckets), os.cpu_count() or 1)))
    try:
        working = {pool.submit(work, bucket): bucket for bucket in buckets}
        for future in concurrent.futures.as_completed(working):
            yield working[future], future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def naming_what_does_not_fit(settings: Settings) -> Iterator[None]:
    """Makes the user's error of a device's that is out of memory."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        raise ConfigError(
            f"the weights and {settings.num_pages} KV pages leave too little memory for a step of max_num_batched_tokens "
            f"{settings.max_num_batched_tokens} and max_num_seqs {settings.max_num_seqs}; lower them, max_model_len or "
            f"{flagged('num_gpu_blocks_override')}, or raise {flagged('gpu_memory_utilization')}"
        ) from error
