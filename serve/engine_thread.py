"""The one thread that owns the engine: it loads it, feeds it and steps it. The event loop never waits for a step.

Towards the engine: commands, run between two steps. Back to the event loop: one call a step, with its outputs.
"""

import asyncio
import enum
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence

from jaxspec.engine.output import RequestOutput
from jaxspec.engine.request import Request
from jaxspec.errors import InvalidRequestError, JaxspecError
from serve.admission import Reservation
from serve.errors import ApiError, server_error, unavailable
from serve.generation import Choice, Generation, Submission
from serve.metrics import EngineSnapshot, Metrics
from serve.model import Progress, ServedModel

logger = logging.getLogger("jaxspec.serve")

# After warm-up nothing compiles, so a step that takes this long is stuck, not busy.
STALL_SECONDS = 120.0


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
        stall_seconds: float = STALL_SECONDS,
    ):
        self._load = load
        self._metrics = metrics
        self._on_phase = on_phase
        self._stall_seconds = stall_seconds
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[str, tuple[Generation, Choice]] = {}  # touched by the engine thread only
        # Touched by the event loop only; the future is done once the engine has accepted or refused the generation.
        self._generations: dict[Generation, asyncio.Future[None]] = {}
        self._stopping = False
        self._step_started: float | None = None
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

    @property
    def healthy(self) -> bool:
        """The thread runs, and no step is stuck."""
        started = self._step_started
        stuck = started is not None and time.monotonic() - started > self._stall_seconds
        return self.phase in (Phase.LOADING, Phase.READY) and not stuck

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

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    async def stop(self, timeout: float) -> None:
        """Asks the thread to end after its current step, and waits for that at most `timeout` seconds."""
        self._stopping = True
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
        for generation, choice, output in outputs:
            self._metrics.record(choice, output)
            generation.put(choice, output)

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if phase is Phase.DEAD:
            self.fail_all(server_error("the engine has failed"))
        self._on_phase(phase)

    # --- on the engine thread ---

    def _run(self) -> None:
        try:
            self.model = self._load(self._on_progress)
            self._publish()
            self._call(self._enter, Phase.READY)
            self._serve()
        except JaxspecError as e:  # while loading: the user can fix it, so no traceback
            self.failure = e
        except BaseException as e:
            logger.exception("the engine thread has failed")
            self.failure = e
        self._step_started = None
        self._call(self._enter, Phase.DEAD if self.failure else Phase.STOPPED)

    def _serve(self) -> None:
        assert self.model is not None
        engine = self.model.engine
        while not self._stopping:
            self._run_commands(wait=not engine.has_work)
            if not engine.has_work:
                self._publish()
                continue
            self._step_started = time.monotonic()
            outputs = engine.step()
            self._step_started = None
            delivered = []
            for output in outputs:
                if output.request_id in self._running:
                    delivered.append((*self._running[output.request_id], output))
                    if output.finish_reason is not None:
                        del self._running[output.request_id]
            self._publish()
            if delivered:
                self._call(self._deliver, delivered)

    def _run_commands(self, *, wait: bool) -> None:
        try:
            self._commands.get(block=wait)()
            while True:
                self._commands.get_nowait()()
        except queue.Empty:
            pass

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
