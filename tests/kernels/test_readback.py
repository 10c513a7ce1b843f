"""Output written into the host's memory: the kernel as far as it can be seen without a GPU, and how the host waits for it."""

import dataclasses
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.readback import api, host_memory, mosaic
from pallas_kernels.readback.host_memory import HostMemory


class Step:
    """Stands in for an array of a step."""

    def __init__(self, *, over: bool = False, error: str = ""):
        self.over, self.error = over, error

    def is_ready(self) -> bool:
        return self.over

    def block_until_ready(self) -> None:
        if self.error:
            raise jax.errors.JaxRuntimeError(self.error)


def memory(entries: int = 3, ranks: int = 1, words: int = 12) -> tuple[HostMemory, np.ndarray]:
    array = np.zeros((entries, ranks, words, 2), np.int32)
    return HostMemory(entries, ranks, words, array), array


def written_at(array: np.ndarray, words: np.ndarray) -> np.ndarray:
    """The memory int32 [words, 2] at the address that a step was told."""
    low, high, _ = words.view(np.uint32).tolist()
    first = (low | high << 32) - array.ctypes.data
    assert first % 8 == 0
    return array.reshape(-1, 2)[first // 8 :]


@pytest.mark.parametrize("shape", [(1, 4), (32, 13), (160, 13)])
def test_lowers_for_cuda_to_one_kernel(shape):
    words, to = jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct((64,), jnp.int32)
    text = jax.jit(mosaic.write).trace(words, to).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


def test_is_used_where_it_was_measured_to_pay_and_kernels_run(monkeypatch):
    assert not api.is_used()
    monkeypatch.setattr(api, "hopper_unsupported_reason", lambda: None)
    assert not api.is_used()
    with tuning.use(dataclasses.replace(tuning.current(), host_readback=True)):
        assert api.is_used()
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        assert not api.is_used()


def test_each_rank_of_each_step_has_a_place_of_its_own():
    ring, array = memory(entries=3, ranks=2, words=5)
    seen = set()
    for step in range(3):
        entry = ring.take()
        assert entry.number > 0
        for rank in range(2):
            place = written_at(array, entry.words(rank))[:5]
            assert not place.any()
            place[:] = 1 + step
            seen.add(entry.addresses[rank])
    assert len(seen) == 6
    assert array.all()


def test_waits_for_the_last_word_of_this_step_and_none_of_an_earlier_one():
    """Words of the steps before lie in the memory; a thread writes the new ones one after the other, in any order."""
    ring, array = memory(words=12)
    rng = np.random.default_rng(0)
    for _ in range(8):
        entry, want = ring.take(), rng.integers(-(2**31), 2**31, (4, 3), dtype=np.int32)
        pairs = written_at(array, entry.words(0))

        def write(pairs=pairs, want=want, number=entry.number):
            for i in rng.permutation(12):
                time.sleep(2e-4)
                pairs[i] = want.flat[i], number

        writer = threading.Thread(target=write)
        writer.start()
        got = ring.wait(entry, 12, Step())
        np.testing.assert_array_equal(got, want.reshape(1, 12))
        pairs[:] = 0, entry.number
        np.testing.assert_array_equal(got, want.reshape(1, 12))  # a copy
        writer.join()


def test_words_of_all_ranks_come_one_after_the_other():
    ring, array = memory(ranks=2, words=12)
    entry = ring.take()
    for rank in range(2):
        pairs = written_at(array, entry.words(rank))
        pairs[:6] = np.stack([np.arange(6) + 10 * rank, np.full(6, entry.number)], axis=1)
    got = ring.wait(entry, 6, Step(over=True))
    np.testing.assert_array_equal(got, [range(6), range(10, 16)])


def test_a_step_that_failed_tells_why_and_one_that_wrote_nothing_is_a_fault():
    ring, _ = memory()
    with pytest.raises(jax.errors.JaxRuntimeError, match="out of order"):
        ring.wait(ring.take(), 3, Step(over=True, error="out of order"))
    with pytest.raises(RuntimeError, match="without writing its output"):
        ring.wait(ring.take(), 3, Step(over=True))


def test_no_entry_is_given_away_that_is_not_read():
    ring, _ = memory(entries=2)
    ring.take(), ring.take()
    with pytest.raises(AssertionError, match="unread"):
        ring.take()


def test_numbers_come_round_before_they_leave_32_bits(monkeypatch):
    ring, _ = memory()
    monkeypatch.setattr(ring, "_taken", 2**31 - 2)
    monkeypatch.setattr(ring, "_read", 2**31 - 2)
    assert [ring.take().number for _ in range(2)] == [2**31 - 1, 1]


def test_a_driver_without_memory_is_named(monkeypatch):
    class Driver:
        def __getattr__(self, name):
            return lambda *_: 2 if name == "cuMemHostAlloc" else 0

    monkeypatch.setattr(host_memory.ctypes, "CDLL", lambda _: Driver())
    monkeypatch.setattr(jax, "local_devices", lambda: [type("Device", (), {"local_hardware_id": 0})])
    with pytest.raises(RuntimeError, match="cuMemHostAlloc returned 2"):
        HostMemory(2, 1, 4)
