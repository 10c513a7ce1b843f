"""Words that a kernel writes into the host's memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.readback import mosaic
from pallas_kernels.readback.host_memory import HostMemory

pytestmark = pytest.mark.gpu


def test_the_host_finds_every_word_of_every_step():
    """Of sizes that fill no block, in a ring that many steps go round, while later ones run; beside them nothing changes."""
    shapes = [(1, 4), (3, 13), (32, 4), (129, 13), (520, 13), (1, 1)]
    most = max(rows * columns for rows, columns in shapes)
    ring = HostMemory(4, 1, most + 1)
    write = jax.jit(lambda words, to: mosaic.write(words * 3, to))
    rng = np.random.default_rng(0)
    waiting = []
    for turn in range(300):
        words = rng.integers(-(2**31), 2**31, shapes[turn % len(shapes)], dtype=np.int32)
        entry = ring.take()
        to = np.zeros(64, np.int32)
        to[:3] = entry.words(0)
        waiting.append((entry, words, write(words, to)))
        if len(waiting) == 3:
            check(ring, *waiting.pop(0))
    for each in waiting:
        check(ring, *each)
    assert not ring.memory[:, 0, most].any()


def check(ring: HostMemory, entry, words, written) -> None:
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(ring.wait(entry, words.size, written)[0], words.reshape(-1) * np.int32(3))
    assert int(written[0]) == entry.number


def test_nothing_is_written_where_nobody_waits():
    ring = HostMemory(1, 1, 64)
    written = mosaic.write(jnp.arange(64, dtype=jnp.int32), jnp.zeros(64, jnp.int32))
    assert int(written[0]) == 0
    assert not ring.memory.any()
