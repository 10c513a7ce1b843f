"""Reads ahead of what is placed on the devices: later parameters are read while earlier ones are copied.

What has been read and has not reached its devices is bounded, so a loader needs host memory for about one part of a
model. What has reached them leaves its memory to later parameters: memory that a process has never used is cleared first, page
by page, which takes about as long as filling it. Results come in the order of the jobs, however the threads run, and so does
the first error.
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
        shape, dtype: of the array that it is read into.
        begin: gives the work that fills this array, in any order and in any thread.
        target: where it belongs.
    """

    shape: tuple[int, ...]
    dtype: Any
    begin: Callable[[np.ndarray], Sequence[Work]]
    target: jax.ShapeDtypeStruct

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def empty(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An array of any values, aligned and C-contiguous."""
    return _shaped(_aligned(math.prod(shape) * np.dtype(dtype).itemsize), shape, dtype)


def _aligned(nbytes: int) -> np.ndarray:
    buffer = np.empty(nbytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + nbytes]


def _shaped(memory: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return memory.view(dtype).reshape(shape)


class Memory:
    """Host memory that is used again, by arrays of as many bytes.

    Args:
        most_bytes: that are held, in use or free; a larger array is there alone.
    """

    def __init__(self, most_bytes: int):
        self._most = most_bytes
        self._free: collections.deque[np.ndarray] = collections.deque()  # the first has been free for longest
        self.in_use = 0

    def has_room_for(self, nbytes: int) -> bool:
        return not self.in_use or self.in_use + nbytes <= self._most

    def take(self, nbytes: int) -> np.ndarray:
        """Bytes [nbytes], aligned, of any values."""
        self.in_use += nbytes
        for i, memory in enumerate(self._free):
            if memory.nbytes == nbytes:
                del self._free[i]
                return memory
        while self._free and self.in_use + sum(memory.nbytes for memory in self._free) > self._most:
            self._free.popleft()
        return _aligned(nbytes)

    def give_back(self, memory: np.ndarray, *, use_again: bool) -> None:
        """
        Args:
            use_again: nobody reads it any more.
        """
        self.in_use -= memory.nbytes
        if use_again:
            self._free.append(memory)


class _Reading:
    def __init__(self, unread: Unread, memory: np.ndarray, pool: ThreadPoolExecutor):
        self.memory, self.target = memory, unread.target
        self._value = _shaped(memory, unread.shape, unread.dtype)
        self._filled: list[Future[None]] = [pool.submit(each) for each in unread.begin(self._value)]

    def place(self) -> jax.Array:
        """Waits until the array is filled, and begins to copy it to the target's devices."""
        for filled in self._filled:
            filled.result()
        return _place(self._value, self.target)


def placed_in_order(parameters: Iterable[Unread], most_bytes: int) -> Iterator[jax.Array]:
    """The parameters on their devices, in order.

    Args:
        most_bytes: of arrays on the host at a time; a larger one is there alone.
    """
    memory = Memory(most_bytes)
    reading: collections.deque[_Reading] = collections.deque()
    copying: collections.deque[tuple[_Reading, jax.Array]] = collections.deque()

    def oldest() -> jax.Array:
        if not copying:
            first = reading.popleft()
            copying.append((first, first.place()))
        read, array = copying.popleft()
        if reading:  # the next copy is under way while this one ends
            first = reading.popleft()
            copying.append((first, first.place()))
        jax.block_until_ready(array)  # until then its bytes are in host memory
        memory.give_back(read.memory, use_again=_is_copied(read.target))
        return array

    pool = ThreadPoolExecutor(THREADS, "load")
    try:
        for unread in parameters:
            while not memory.has_room_for(unread.nbytes):
                yield oldest()
            reading.append(_Reading(unread, memory.take(unread.nbytes), pool))
        while reading or copying:
            yield oldest()
    finally:
        pool.shutdown(cancel_futures=True)


def _is_copied(target: jax.ShapeDtypeStruct) -> bool:
    """Whether an array there has memory of its own; a CPU may have taken the host's over."""
    return all(device.platform != "cpu" for device in target.sharding.device_set)


def _place(value: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """`value` on the target's devices; each shard is cast by itself."""
    return jax.make_array_from_callback(
        target.shape, target.sharding, lambda index: value[index].astype(target.dtype, copy=False)
    )
