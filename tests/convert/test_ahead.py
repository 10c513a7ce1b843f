"""Reading ahead: results and errors come in order, within the memory that is allowed, whatever the threads do."""

import contextlib
import threading
from unittest import mock

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from jaxspec.errors import ModelFormatError
from jaxspec.loading import ahead
from jaxspec.loading.ahead import Memory, Unread, placed_in_order

MOST = 4000


def copied(value: np.ndarray, target: jax.ShapeDtypeStruct) -> jax.Array:
    """As a GPU does: the array has memory of its own."""
    return jax.device_put(value.astype(target.dtype), target.sharding, may_alias=False)


@pytest.mark.parametrize("on_gpu", [False, True])
@settings(max_examples=20, deadline=None)
@given(sizes=st.lists(st.integers(0, 700), min_size=1, max_size=12), rng=st.randoms(use_true_random=False))
def test_in_order_within_the_limit(sizes: list[int], rng, on_gpu: bool):
    """Each array is filled by pieces that end in another order than they began, on a GPU in memory of earlier ones."""
    begun, taken = [], []
    target = SingleDeviceSharding(jax.devices()[0])

    def unread(number: int, size: int) -> Unread:
        def begin(value: np.ndarray):
            held = sum(begun[len(taken) :])
            assert not held or held + 8 * size <= MOST
            begun.append(8 * size)
            first = threading.Event()

            def fill(start: int) -> None:
                if start == 0 and size > 1:
                    first.wait(1)
                value[start::2] = np.arange(start, size, 2) + 1000 * number
                if start == 1:
                    first.set()

            return [lambda start=start: fill(start) for start in (0, 1)]

        dtype = rng.choice([np.int32, np.float32])
        return Unread((size,), np.int64, begin, jax.ShapeDtypeStruct((size,), dtype, sharding=target))

    jobs, arrays = [unread(number, size) for number, size in enumerate(sizes)], []
    with contextlib.ExitStack() as stack:
        if on_gpu:
            stack.enter_context(mock.patch.object(ahead, "_is_copied", return_value=True))
            stack.enter_context(mock.patch.object(ahead, "_place", copied))
        for number, array in enumerate(placed_in_order(jobs, MOST)):
            taken.append(number)
            arrays.append(array)
            assert array.dtype == jobs[number].target.dtype
    for number, array in enumerate(arrays):  # what came later has changed none
        np.testing.assert_array_equal(array, np.arange(sizes[number]) + 1000 * number)
    assert len(taken) == len(sizes)
    assert len(begun) == len(sizes)


@given(st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.integers(0, 9)), max_size=30))
def test_memory_is_used_again_within_the_limit(steps: list[tuple[int, bool, int]]):
    """What is in use is nobody else's; what is free makes way for what does not fit beside it."""
    memory, in_use, free = Memory(1000), [], []
    for size, use_again, which in steps:
        if memory.has_room_for(100 * size):
            new = memory.take(100 * size)
            assert not any(np.shares_memory(new, other) for other in in_use)
            assert any(new is other for other in free) == any(other.nbytes == new.nbytes for other in free)
            free = [other for other in free if other is not new]
            in_use.append(new)
            while free and sum(each.nbytes for each in in_use + free) > 1000:
                free.pop(0)
        elif in_use:
            old = in_use.pop(which % len(in_use))
            memory.give_back(old, use_again=use_again)
            free += [old] * use_again
        assert memory.in_use == sum(each.nbytes for each in in_use) <= 1000


def test_the_first_error_in_order_is_raised_and_the_rest_is_not_read():
    """The later parameter fails first."""
    failed, begun = threading.Event(), []
    target = jax.ShapeDtypeStruct((1,), np.float32, sharding=SingleDeviceSharding(jax.devices()[0]))

    def work(number: int) -> None:
        if number == 1:
            failed.wait(10)
        if number in (1, 2):
            failed.set()
            raise ModelFormatError(f"tensor {number}")

    def unread(number: int) -> Unread:
        def begin(_):
            begun.append(number)
            return [lambda: work(number)]

        return Unread((1,), np.float32, begin, target)

    results = placed_in_order(map(unread, range(9)), most_bytes=12)
    with pytest.raises(ModelFormatError, match="tensor 1"):
        list(results)
    assert begun == [0, 1, 2]
