"""Memory of the host that steps write into, and how the host finds what they have written."""

import ctypes
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

ENTRY_WORDS = 3
# Seconds between two looks. A step takes a hundred times as long.
_POLL = 20e-6
# Flags of `cuMemHostAlloc`: for every context, and with an address for the devices.
_PORTABLE, _DEVICE_MAP = 1, 2


@dataclass(frozen=True)
class Entry:
    """Where one step writes.

    Attributes:
        place: in the ring. number: travels with each word; never 0.
        addresses: of each rank's words.
    """

    place: int
    number: int
    addresses: tuple[int, ...]

    def words(self, rank: int) -> np.ndarray:
        """int32 [ENTRY_WORDS], what the step is told: the address of a rank's words, low and high, and the number."""
        return np.array([self.addresses[rank], self.number], np.uint64).view(np.uint32)[:ENTRY_WORDS].view(np.int32)


class HostMemory:
    """A ring of entries. A step that was given one is read before as many others as there are entries have begun.

    Attributes:
        memory: int32 [entries, ranks, words, 2].

    Args:
        entries: of the ring.
        words: that a rank writes at most.
        memory: int32 [entries, ranks, words, 2], zeros, that devices reach under its own address (default: page-locked memory,
            which stays until the process ends, since a step may still run).

    Raises:
        RuntimeError: the driver gives no such memory.
    """

    def __init__(self, entries: int, ranks: int, words: int, memory: np.ndarray | None = None):
        shape = (entries, ranks, words, 2)
        self.memory = _page_locked(shape) if memory is None else memory
        assert self.memory.shape == shape
        self._taken = self._read = 0

    @staticmethod
    def bytes_of_entry(ranks: int, words: int) -> int:
        return ranks * words * 2 * np.dtype(np.int32).itemsize

    def take(self) -> Entry:
        """The next entry, with a number that none has had for two thousand million steps."""
        assert self._taken - self._read < len(self.memory), "more steps are unread than there are entries"
        place = self._taken % len(self.memory)
        number = self._taken % (2**31 - 1) + 1
        self._taken += 1
        address, of_entry, of_rank, *_ = self.memory.ctypes.data, *self.memory.strides
        first = address + place * of_entry
        return Entry(place, number, tuple(first + rank * of_rank for rank in range(self.memory.shape[1])))

    def wait(self, entry: Entry, words: int, after: Any) -> np.ndarray:
        """What a step has written there, once it has.

        Args:
            words: of a rank.
            after: array of this step or of a later one; fails if the step does.

        Returns:
            int32 [ranks, words].

        Raises:
            jax.errors.JaxRuntimeError: the step has failed.
            RuntimeError: it has ended without writing, which is a fault of ours.
        """
        pairs = self.memory[entry.place, :, :words]
        while True:
            over = after.is_ready()  # asked first: what a step has written by its end is found below
            if (pairs[..., 1] == entry.number).all():
                self._read += 1
                return pairs[..., 0].copy()
            if over:
                after.block_until_ready()  # tells what went wrong on the device
                raise RuntimeError("a step has ended without writing its output")
            time.sleep(_POLL)


def _page_locked(shape: tuple[int, ...]) -> np.ndarray:
    """int32 zeros that all devices of this process reach under the host's address."""
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name: str, *args: object) -> None:
        if code := getattr(cuda, name)(*args):
            raise RuntimeError(f"the CUDA driver gives no memory for steps' output: {name} returned {code}")

    context, before, address = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    size = 4 * int(np.prod(shape))
    # The context that XLA uses.
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(jax.local_devices()[0].local_hardware_id))
    call("cuCtxPushCurrent_v2", context)
    try:
        flags = ctypes.c_uint(_PORTABLE | _DEVICE_MAP)
        call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), flags)
    finally:
        call("cuCtxPopCurrent_v2", ctypes.byref(before))
    assert address.value
    memory: np.ndarray = np.ctypeslib.as_array((ctypes.c_int32 * (size // 4)).from_address(address.value))
    memory[:] = 0
    return memory.reshape(shape)
