"""The one thread that owns the engine: it loads it, feeds it and steps it. The event loop never waits for a step.

Towards the engine: commands, run between two steps. Back to the event loop: one call a step, with its outputs.
"""

import asyncio
import contextlib
import enum
import gc
import logging
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence

from jaxspec.engine.output import FinishReason, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.errors import GroupError, InvalidRequestError, JaxspecError
from serve.admission import Reservation
from serve.deadlines import NO_DEADLINES, Deadlines
from serve.errors import ApiError, server_error, unavailable
from serve.generation import Choice, Generation, Submission
from serve.limits import ENGINE_TIMEOUT
from serve.log_limit import LimitedLogger
from serve.metrics import EngineSnapshot, Metrics
from serve.model import Progress, ServedModel
from serve.step_watch import StepWatch, stack_of

logger = logging.getLogger("jaxspec.serve")

# Output that a client has not read: of one stream, and of all.
MAX_UNREAD_BYTES = 16 * 2**20
MAX_ALL_UNREAD_BYTES = 256 * 2**20
_UNREAD_CHECK_SECONDS = 1.0
# An engine that has had no work for so long looks after steps that have been compiled since its start, and again after as
# long: not between two requests of a client that sends one after the other.
_PREPARE_SECONDS = 0.1
# And so long, what makes structured outputs quicker and holds all of Python up meanwhile, for half a second.
_GROW_SECONDS = 2.0

# Python gives its lock to a waiting thread after this long (5 ms by default). A step must wait neither for a thread that
# traces another nor for the event loop.
_SWITCH_SECONDS = 0.0001

_News = list[tuple[Generation, Choice, RequestOutput]]


class Phase(enum.Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"  # asked to
    DEAD = "dead"


class EngineThread:
    """Owns the engine and runs its loop.

    Args:
        load: makes the model; it runs on the thread.
        on_phase: called on the event loop when loading has ended and when the thread has ended.
        on_started: called on the event loop with the number of choices whose first step has been planned.
        engine_timeout: seconds; a step that takes longer is the engine's death. None: no limit.
        cause: of an error on the thread; see `Group`.

    Attributes:
        model: None until loaded.
        progress: (done, total, what) of the loading.
        failure: what ended the thread, unless it was asked to end.
    """

    def __init__(
        self,
        load: Callable[[Progress], ServedModel],
        metrics: Metrics,
        *,
        on_phase: Callable[[Phase], None] = lambda _phase: None,
        on_started: Callable[[int], None] = lambda _count: None,
        deadlines: Deadlines = NO_DEADLINES,
        engine_timeout: float | None = ENGINE_TIMEOUT,
        cause: Callable[[BaseException], BaseException] = lambda error: error,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
        max_all_unread_bytes: int = MAX_ALL_UNREAD_BYTES,
    ):
        self._load = load
        self._metrics = metrics
        self._on_phase = on_phase
        self._on_started = on_started
        self._deadlines = deadlines
        self._cause = cause
        self._watch = StepWatch(engine_timeout, lambda: self.model.compile_counts()[0] if self.model else 0)
        self._max_unread = max_unread_bytes
        self._max_all_unread = max_all_unread_bytes
        self._unread_checked = 0.0
        self._log = LimitedLogger(logger)
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[Generation, Choice]] = {}  # touched by the engine thread only
        # Touched by the event loop only; the future is done once the engine has accepted or refused the generation.
        self._generations: dict[Generation, asyncio.Future[None]] = {}
        self._stopping = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A daemon: a compilation cannot be interrupted when the process is told to end during start-up.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self.phase = Phase.LOADING
        self.model: ServedModel | None = None
        self.progress: tuple[int, int, str] | None = None
        self.failure: BaseException | None = None

    # --- on the event loop ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._watcher = self._loop.create_task(self._watch.run(self._stuck))

    @property
    def healthy(self) -> bool:
        """The thread runs, and no step is slow enough to be suspected of being stuck."""
        return self.phase in (Phase.LOADING, Phase.READY) and not self._watch.suspicious

    @property
    def num_generations(self) -> int:
        """HTTP requests whose choices have been submitted and not released."""
        return len(self._generations)

    @property
    def num_queued(self) -> int:
        """Submitted choices that the engine has not scheduled yet."""
        return sum(not c.scheduled for g in self._generations for c in g.choices)

    async def submit(self, choices: Sequence[Choice], reservation: Reservation) -> Generation:
        """Hands all choices to the engine, or none: returns once it has accepted them.

        They count in `num_queued` from the moment when their `reservation` does not count any more.

        Raises:
            ApiError, InvalidRequestError: the engine cannot serve them.
        """
        if self.phase is not Phase.READY:
            raise unavailable(f"the engine is {self.phase.value}")
        generation = Generation(choices, self._abort)
        accepted = self._generations[generation] = asyncio.get_running_loop().create_future()
        reservation.release()
        generation.timers = self._deadlines.watch(
            choices[0].submission.arrival_time,
            has_started=lambda: generation.has_started,
            fail=lambda error: self._drop(generation, error),
        )
        try:
            self._commands.put(lambda: self._add(generation, accepted))
            await accepted
        except BaseException:
            self.release(generation)
            raise
        return generation

    def release(self, generation: Generation) -> None:
        """The other end of `submit`: aborts the choices that still run."""
        unfinished = generation.close()
        accepted = self._generations.pop(generation, None)
        refused = accepted is not None and accepted.done() and not accepted.cancelled() and accepted.exception()
        if accepted is not None and not refused:
            self._metrics.record_unfinished(unfinished, failed=generation.failed)

    def fail_all(self, error: ApiError) -> None:
        for generation, accepted in self._generations.items():
            generation.fail(error)
            _settle(accepted, error)

    def _drop(self, generation: Generation, error: ApiError) -> None:
        """Ends one HTTP request: its choices leave the engine even if its client reads nothing."""
        generation.drop(error)
        if (accepted := self._generations.get(generation)) is not None:
            _settle(accepted, error)

    def _stuck(self, seconds: float) -> None:
        """A step does not end: nobody can interrupt it, so this process is of no more use."""
        logger.error(
            "an engine step has not ended within %g s (--engine-timeout); the engine thread is at\n%s",
            seconds,
            stack_of(self._thread),
        )
        self.fail(self._cause(RuntimeError("an engine step is stuck")))

    def fail(self, error: BaseException) -> None:
        """The engine is of no more use, whatever its thread is doing."""
        if self.phase is not Phase.DEAD:
            self.failure = error
            self._stopping = True
            self._enter(Phase.DEAD)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def stop(self, timeout: float) -> None:
        """Asks the thread to end after its current step, and waits for that at most `timeout` seconds."""
        self._stopping = True
        self._watcher.cancel()
        self._commands.put(lambda: None)  # wakes it up
        await asyncio.to_thread(self._thread.join, timeout)

    def _abort(self, request_ids: Sequence[str]) -> None:
        def abort() -> None:
            assert self.model is not None
            for request_id in request_ids:
                self._running.pop(request_id, None)
                self.model.engine.abort(request_id)

        self._commands.put(abort)

    def _deliver(self, outputs: Sequence[tuple[Generation, Choice, RequestOutput]]) -> None:
        waited = [choice for _, choice, _ in outputs if not choice.scheduled]
        behind: set[Generation] = set()
        for generation, choice, output in outputs:
            if choice.pending is not None:
                behind.add(generation)
            self._metrics.record(choice, output)
            if output.finish_reason is FinishReason.ERROR:
                self._metrics.record_failure()
                self._log.warning("the engine failed a request: %s, id=%s", output.error, generation.http_id)
            generation.put(choice, output)
        self._on_started(sum(choice.scheduled for choice in waited))
        self._bound_unread(behind)

    def _bound_unread(self, behind: set[Generation]) -> None:
        """Clients that do not read their streams may not hold more than so much memory, each and together.

        Args:
            behind: those that had not read what they had when more came.
        """
        slow = [generation for generation in behind if generation.unread > self._max_unread]
        now = time.monotonic()
        if now - self._unread_checked > _UNREAD_CHECK_SECONDS:
            self._unread_checked = now
            unread = {generation: generation.unread for generation in self._generations}
            while sum(unread.values()) > self._max_all_unread:
                slow.append(max(unread, key=lambda g: unread[g]))
                del unread[slow[-1]]
        for generation in slow:
            self._log.warning("a client does not read its stream: request ended, id=%s", generation.http_id)
            self._drop(generation, server_error("the client does not read its stream"))

    def _ended(self) -> None:
        if self.phase is not Phase.DEAD:
            self._enter(Phase.DEAD if self.failure else Phase.STOPPED)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.DEAD:
            # Another process of the group has: a router may find a group that is whole.
            gone = isinstance(self.failure, GroupError)
            self.fail_all(
                unavailable("a process of the server has ended") if gone else server_error("the engine has failed")
            )
        self._on_phase(phase)

    # --- on the engine thread ---

    def _run(self) -> None:
        try:
            self.model = self._load(self._on_progress)
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_SECONDS))
            # What loading made stays. To look through it for garbage stops every thread for 0.1 s and more.
            gc.freeze()
            self._publish()
            self._call(self._enter, Phase.READY)
            self._serve()
        except BaseException as error:
            e = error if isinstance(error, JaxspecError) else self._cause(error)
            if not isinstance(e, JaxspecError):  # else the user can fix it, so no traceback
                logger.exception("the engine thread has failed")
            if self.failure is None:
                self.failure = e
        self._watch.step_ends()
        self._call(self._ended)

    def _serve(self) -> None:
        assert self.model is not None
        engine, preparing = self.model.engine, True
        grow = self.model.grammars.grow if self.model.grammars else None
        news: _News = []  # not delivered yet
        while not self._stopping:
            if not engine.steps_in_flight:
                news = self._hand_over(news)
            if engine.has_work:
                self._run_commands(0)
            elif preparing:
                if not self._run_commands(_PREPARE_SECONDS):
                    preparing = engine.prepare()
            elif not self._run_commands(_GROW_SECONDS if grow else None) and not (grow and grow()):
                grow = None
            if not engine.has_work:
                self._publish()
                continue
            self._watch.step_begins()
            try:
                engine.dispatch_ahead()
            finally:
                # Only now, where a step runs: both threads want Python's lock, and while the event loop writes to its clients
                # this one should wait for the device, not the device for this one.
                news = self._hand_over(news)
            outputs = engine.read_oldest()
            self._watch.step_ends()
            for output in outputs:
                if output.request_id in self._running:
                    news.append((*self._running[output.request_id], output))
                    if output.finish_reason is not None:
                        del self._running[output.request_id]
            self._publish()
        self._hand_over(news)

    def _hand_over(self, news: _News) -> _News:
        """Delivers these outputs. Returns what is left to deliver: nothing."""
        if news:
            self._call(self._deliver, news)
        return []

    def _run_commands(self, seconds: float | None) -> bool:
        """Runs what waits, after waiting up to so long for the first command; None: as long as it takes.

        Returns:
            Whether there was any.
        """
        found = False
        with contextlib.suppress(queue.Empty):
            self._commands.get(block=seconds != 0, timeout=seconds)()
            found = True
            while True:
                self._commands.get_nowait()()
        return found

    def _add(self, generation: Generation, accepted: asyncio.Future[None]) -> None:
        """Adds all requests or none. A request that trips over a bug in validation fails alone."""
        assert self.model is not None
        try:
            self.model.engine.add(*(_request(choice.submission) for choice in generation.choices))
        except Exception as e:
            if not isinstance(e, InvalidRequestError):
                logger.exception("the engine did not accept a request")
            self._call(_settle, accepted, e if isinstance(e, InvalidRequestError) else server_error())
        else:
            self._running |= {c.submission.request_id: (generation, c) for c in generation.choices}
            self._call(_settle, accepted, None)

    def _publish(self) -> None:
        assert self.model is not None
        model = self.model
        self._metrics.publish(
            EngineSnapshot(
                model.engine.stats(), *model.compile_counts(), model.synthetic_acceptance_length, model.cache_config
            )
        )

    def _on_progress(self, done: int, total: int, what: str) -> None:
        self.progress = (done, total, what)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the event loop has closed
            logger.debug("the event loop is gone")


def _request(submission: Submission) -> Request:
    """The engine's own request; it never leaves the engine thread."""
    return Request(
        submission.request_id,
        submission.prompt_ids,
        submission.params,
        submission.rule,
        priority=submission.priority,
        cache_salt=submission.cache_salt,
        arrival_time=submission.arrival_time,
    )


def _settle(future: asyncio.Future[None], error: Exception | None) -> None:
    if future.done():  # the client has gone meanwhile
        return
    if error is None:
        future.set_result(None)
    else:
        future.set_exception(error)
