"""Threads for what takes long on a long text: encoding, decoding, templates. Long texts do not delay short ones."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from serve.byte_budget import ByteBudget
from serve.errors import rate_limited

T = TypeVar("T")

# A text of so many bytes takes a few tens of milliseconds.
LONG_BYTES = 64 * 2**10
# Texts that are being encoded or wait for that; a token takes several times the memory of its text.
MAX_BYTES = 64 * 2**20
# What a job costs however short its text is.
_LEAST_BYTES = 4 * 2**10
_SHORT_THREADS = 2
_LONG_THREADS = 1
_ID_BYTES = 8


class TextPool:
    """Short texts have threads of their own. Long ones take turns, and there may be only so many bytes of all."""

    def __init__(self, max_bytes: int = MAX_BYTES):
        self._budget = ByteBudget(max_bytes)
        self._short = ThreadPoolExecutor(_SHORT_THREADS, thread_name_prefix="tokenizer")
        self._long = ThreadPoolExecutor(_LONG_THREADS, thread_name_prefix="long-tokenizer")

    @property
    def num_bytes(self) -> int:
        """Of the texts that are in work or wait."""
        return self._budget.held

    async def run(self, function: Callable[[], T], size: int) -> T:
        """Runs the function on a thread. Cancelling takes it out of the queue; one that runs goes on.

        Args:
            size: bytes of the text that it works on.

        Raises:
            ApiError: 429: too much text is in work.
        """
        loop = asyncio.get_running_loop()
        cost = max(size, _LEAST_BYTES)
        self._budget.take(
            cost,
            lambda: rate_limited(f"{self.num_bytes} bytes of text wait to be tokenised; try again later"),
        )
        pool = self._long if size > LONG_BYTES else self._short
        try:
            job = pool.submit(function)
        except BaseException:
            self._budget.give_back(cost)
            raise

        def ended(_job: Future[T]) -> None:  # on the thread
            try:
                loop.call_soon_threadsafe(self._budget.give_back, cost)
            except RuntimeError:  # the event loop has closed
                return

        job.add_done_callback(ended)
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        """Drops what waits; what runs goes on, for a thread cannot be interrupted."""
        for pool in (self._short, self._long):
            pool.shutdown(wait=False, cancel_futures=True)


def text_bytes(value: Any) -> int:
    """About how many bytes of text (as UTF-8, for which tokens are as many at most), or of ids, the arguments of a job hold."""
    if isinstance(value, str):
        return len(value) if value.isascii() else len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(text_bytes, value.values())) + sum(len(name) for name in value if isinstance(name, str))
    if isinstance(value, Sequence):
        return _ID_BYTES * len(value) if value and isinstance(value[0], int) else sum(map(text_bytes, value))
    return 0
