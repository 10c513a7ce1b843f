"""Reading ahead: results and errors come in order, within the memory that is allowed, whatever the threads do."""

import threading

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import SingleDeviceSharding

from jaxspec.errors import ModelFormatError
from jaxspec.loading.ahead import Unread, empty, placed_in_order

MOST = 4000


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 700), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_in_order_within_the_limit(sizes: list[int], rng):
    """Each array is filled by pieces that end in another order than they began."""
    begun, taken = [], []
    target = SingleDeviceSharding(jax.devices()[0])

    def unread(number: int, size: int) -> Unread:
        def begin():
            held = sum(begun[len(taken) :])
            assert not held or held + 8 * size <= MOST
            begun.append(8 * size)
            value = empty((size,), np.int64)
            first = threading.Event()

            def fill(start: int) -> None:
                if start == 0 and size > 1:
                    first.wait(1)
                value[start::2] = np.arange(start, size, 2) + 1000 * number
                if start == 1:
                    first.set()

            return value, [lambda start=start: fill(start) for start in (0, 1)]

        dtype = rng.choice([np.int32, np.float32])
        return Unread(8 * size, begin, jax.ShapeDtypeStruct((size,), dtype, sharding=target))

    jobs = [unread(number, size) for number, size in enumerate(sizes)]
    for number, array in enumerate(placed_in_order(jobs, MOST)):
        taken.append(number)
        assert array.dtype == jobs[number].target.dtype
        np.testing.assert_array_equal(array, np.arange(sizes[number]) + 1000 * number)
    assert len(taken) == len(sizes)
    assert len(begun) == len(sizes)


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
        def begin():
            begun.append(number)
            return np.zeros(1, np.float32), [lambda: work(number)]

        return Unread(4, begin, target)

    results = placed_in_order(map(unread, range(9)), most_bytes=12)
    with pytest.raises(ModelFormatError, match="tensor 1"):
        list(results)
    assert begun == [0, 1, 2]
