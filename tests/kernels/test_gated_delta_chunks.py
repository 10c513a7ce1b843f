"""Prompts of gated_delta: plain XLA by its definition; the Mosaic GPU walk over chunks interpreted, and lowered for cuda."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.backend import Backends, use
from pallas_kernels.gated_delta import chunk_walk
from pallas_kernels.gated_delta.api import read_prompts
from pallas_kernels.gated_delta.chunks import CHUNK, cut
from pallas_kernels.gated_delta.reference import Tokens
from pallas_kernels.gated_delta.shapes import HEADS, Heads
from tests.kernels.gated_delta_cases import prompts_by_definition, random_prompts
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

# Rows that end within a chunk, at its end and after one token of it, and rows of nothing, the first and the last one too.
LENGTHS = ((0, 70, 0, 2 * CHUNK, 1), (3 * CHUNK + 1, 0))
CASES = [
    (Heads(1, 2, 64, 64, 1), LENGTHS[0], 9),
    (Heads(1, 1, 64, 128, 64), LENGTHS[0], 0),
    (Heads(1, 1, 128, 64, 128), LENGTHS[1], 70),
]
WITH_KERNEL = dataclasses.replace(tuning.Tuning(), delta_chunk_kernel=True)


def assert_by_definition(got, prompts, error):
    """The root mean square of the errors is below `error` of that of the results: one wrong value shows."""
    for ours, want in zip(got, prompts_by_definition(prompts), strict=True):
        known = ~np.isnan(want)
        np.testing.assert_array_equal(np.isnan(ours), ~known)
        assert np.linalg.norm((ours - want)[known]) < error * np.linalg.norm(want[known])


@pytest.mark.parametrize(("heads", "lengths", "padding"), CASES)
def test_plain_xla_is_the_definition(heads, lengths, padding):
    prompts = random_prompts(heads, lengths, padding)
    states, tokens, *where = prompts
    assert_by_definition(jax.jit(read_prompts)(states, tokens, cut(*where)), prompts, 1e-6)


@interpreted
@pytest.mark.parametrize(("heads", "lengths", "padding"), CASES)
def test_interpreted_without_races(heads, lengths, padding):
    """With operands of one part in bfloat16, errors would be 300 times the bound."""
    prompts = random_prompts(heads, lengths, padding)
    states, tokens, *where = prompts
    got = chunk_walk.chunked(states, tokens, cut(*where), interpret=detect_races())
    assert_by_definition(got, prompts, 1e-5)
    assert_no_races(got)


def call_shapes(heads: Heads, E: int, P: int) -> tuple:
    K, R, dk, dv, fades = heads

    def shape(*dims, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(dims, dtype)

    tokens = Tokens(shape(P, K, dk), shape(P, K, dk), shape(P, K, R, dv), shape(P, K, R, fades), shape(P, K, R))
    where = shape(P, dtype=jnp.int32), shape(E, dtype=jnp.int32)
    return shape(E, K, R, dv, dk), tokens, jax.eval_shape(cut, *where)


@pytest.mark.parametrize("heads", HEADS.values(), ids=list(HEADS))
@pytest.mark.parametrize(("rows", "tokens"), [(1, CHUNK), (4, 8192)])
def test_lowers_for_cuda(heads, rows, tokens):
    f = jax.jit(chunk_walk.chunked)
    text = f.trace(*call_shapes(heads, rows, tokens)).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1


def chosen_for(heads: Heads, P: int, choices: tuning.Tuning, attention: str) -> set[str]:
    with tuning.use(choices), use(Backends(attention=attention)) as chosen:
        jax.eval_shape(functools.partial(read_prompts), *call_shapes(heads, 1, P))  # a new function: traced again
    (implementations,) = chosen.values()
    return implementations


def test_the_kernel_runs_where_it_is_chosen_and_supports_the_call(monkeypatch):
    """Off by default. Short prompts run on plain XLA beside attention on "mosaic", and all where that was asked for."""
    heads = HEADS["Qwen3.5-35B-A3B"]
    assert "GPU" in chunk_walk.unsupported_reason(*call_shapes(heads, 1, CHUNK)[::2])
    monkeypatch.setattr(chunk_walk, "hopper_unsupported_reason", lambda: None)
    for attention in ("auto", "mosaic", "triton"):
        assert chosen_for(heads, CHUNK, tuning.Tuning(), attention) == {"reference"}
        assert chosen_for(heads, CHUNK, WITH_KERNEL, attention) == {"mosaic"}
        assert chosen_for(heads, CHUNK - 1, WITH_KERNEL, attention) == {"reference"}
    assert chosen_for(heads, CHUNK, WITH_KERNEL, "reference") == {"reference"}
    assert chosen_for(heads._replace(dk=96), CHUNK, WITH_KERNEL, "auto") == {"reference"}
    assert chosen_for(heads._replace(dv=96), CHUNK, WITH_KERNEL, "auto") == {"reference"}
