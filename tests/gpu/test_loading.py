"""Weights on a GPU are what was read, though each leaves its host memory to later ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jaxspec.loading.ahead import Unread, placed_in_order

pytestmark = pytest.mark.gpu
SIZES = (6_000_000, 3_000_000, 6_000_000, 100)
NUMBER = 40


def test_memory_is_used_again_only_when_it_has_been_copied():
    target = SingleDeviceSharding(jax.devices()[0])
    filled: list[int] = []

    def unread(number: int, dtype: type) -> Unread:
        size = SIZES[number % len(SIZES)]

        def begin(value: np.ndarray):
            filled.append(value.ctypes.data)

            def fill(part: slice) -> None:
                value[part] = np.arange(size, dtype=np.int32)[part] * 3 + number

            return [lambda half=half: fill(half) for half in (slice(size // 2), slice(size // 2, None))]

        return Unread((size,), np.int32, begin, jax.ShapeDtypeStruct((size,), dtype, sharding=target))

    jobs = [unread(number, np.float32 if number % 3 == 0 else np.int32) for number in range(NUMBER)]
    arrays = list(placed_in_order(jobs, most_bytes=80_000_000))
    assert len(set(filled)) < NUMBER / 2
    for number, (job, array) in enumerate(zip(jobs, arrays, strict=True)):
        expected = (jnp.arange(job.shape[0], dtype=jnp.int32) * 3 + number).astype(array.dtype)
        assert bool((array == expected).all()), number
