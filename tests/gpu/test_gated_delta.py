"""The Mosaic GPU kernels of gated_delta on the GPU, by definition. Slots and tokens that they may not read are NaN."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.gated_delta.api import read_prompts, replay_and_read
from pallas_kernels.gated_delta.chunks import CHUNK, cut
from pallas_kernels.gated_delta.shapes import HEADS
from tests.kernels.gated_delta_cases import by_definition, prompts_by_definition, random_call, random_prompts

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("rows", "n", "replayed"), [(1, 1, 0), (5, 1, 1), (5, 4, 4), (33, 2, 8)])
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
def test_windows(heads, rows, n, replayed):
    """Three times on, because the third run is that of a recorded graph."""
    heads = heads._replace(K=2)
    call = random_call(heads, rows, n, replayed=replayed)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(states, *rest):
        with use(Backends(attention="mosaic")):
            read, states = replay_and_read(states, *rest, replayed=replayed)
        return read, states

    states, want = call.states + 0, call
    for _ in range(3):
        read, states = run(states, *call[1:])
        exact = by_definition(want, replayed)
        want = want._replace(states=exact[1])
    np.testing.assert_allclose(read, exact[0], atol=2e-5)
    np.testing.assert_allclose(states, exact[1], atol=2e-5)


@pytest.mark.parametrize(
    ("lengths", "padding"), [((CHUNK,), 0), ((0, 70, 0, 2 * CHUNK, 1), 9), ((1500, 3 * CHUNK + 1, 0), 70)]
)
@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
def test_prompts(heads, lengths, padding):
    """Three times the same call, because the third run is that of a recorded graph. Operands are not one bfloat16."""
    prompts = random_prompts(heads._replace(K=2), lengths, padding)
    states, tokens, *where = prompts

    @jax.jit
    def run(states, tokens, rows, lengths):
        choices = dataclasses.replace(tuning.current(), delta_chunk_kernel=True)
        with use(Backends()) as chosen, tuning.use(choices):
            results = read_prompts(states, tokens, cut(rows, lengths))
        assert chosen == {"gated_delta_prompts": {"mosaic"}}
        return results

    for _ in range(3):
        got = run(states, tokens, *where)
    for ours, want in zip(got, prompts_by_definition(prompts), strict=True):
        np.testing.assert_allclose(ours, want, atol=5e-5)
