"""Reads ahead of what is placed on the devices: later parameters are read while earlier ones are copied.

What has been read and has not reached its devices is bounded, so a loader needs host memory for about one part of a
model. Results come in the order of the jobs, however the threads run, and so does the first error.
"""

import collections
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

# Tensors that are read at once: one thread copies a few GB/s from the page cache, and waits for a disk most of the time.
THREADS = 16

# A CPU device takes an array over, and does not copy it, if it begins at a multiple of this.
_ALIGNMENT = 64

Work = Callable[[], None]


@dataclass(frozen=True)
class Unread:
    """A parameter that is to be read.

    Attributes:
        nbytes: that `begin` allocates.
        begin: gives an array, and the work that fills it, in any order and in any thread.
        target: where it belongs.
    """

    nbytes: int
    begin: Callable[[], tuple[np.ndarray, Sequence[Work]]]
    target: jax.ShapeDtypeStruct


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array for `Unread.begin`, C-contiguous."""
    nbytes = math.prod(shape) * np.dtype(dtype).itemsize
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes].view(dtype).reshape(shape)


class _Reading:
    def __init__(self, unread: Unread, pool: ThreadPoolExecutor):
        self.nbytes, self._target = unread.nbytes, unread.target
        self._value, work = unread.begin()
        self._filled: list[Future[None]] = [pool.submit(each) for each in work]

    def place(self) -> jax.Array:
        """Waits until the array is filled, and begins to copy it to the target's devices."""
        for filled in self._filled:
            filled.result()
        return _place(self._value, self._target)


def placed_in_order(parameters: Iterable[Unread], most_bytes: int) -> Iterator[jax.Array]:
    """The parameters on their devices, in order.

    Args:
        most_bytes: of arrays on the host at a time; a larger one is there alone.
    """
    reading: collections.deque[_Reading] = collections.deque()
    copying: collections.deque[tuple[int, jax.Array]] = collections.deque()
    held = 0

    def oldest() -> jax.Array:
        nonlocal held
        if not copying:
            first = reading.popleft()
            copying.append((first.nbytes, first.place()))
        nbytes, array = copying.popleft()
        if reading:  # the next copy is under way while this one ends
            first = reading.popleft()
            copying.append((first.nbytes, first.place()))
        held -= nbytes
        return jax.block_until_ready(array)  # until then its bytes are in host memory

    pool = ThreadPoolExecutor(THREADS, "load")
    try:
        for unread in parameters:
            while held and held + unread.nbytes > most_bytes:
                yield oldest()
            held += unread.nbytes
            reading.append(_Reading(unread, pool))
        while reading or copying:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)


def _place(value: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """`value` on the target's devices; each shard is cast by itself."""
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: value[index].astype(target.dtype, copy=False)
    )
