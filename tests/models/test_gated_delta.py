"""The gated delta rule: token by token, in chunks, and as transformers has it, over ragged rows."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.gated_delta import convolve, unit
from pallas_kernels.gated_delta.chunks import CHUNK, chunked, cut
from pallas_kernels.gated_delta.reference import Tokens, recurrent
from tests.matrices import members

K, R, DK, DV = 2, 3, 8, 12


# One decay for a whole state, or one for each channel of its keys.
both_decays = pytest.mark.parametrize("decays", [1, DK])


def random_tokens(rng: np.random.Generator, *shape: int, decays: int = 1) -> Tokens:
    def normal(*dims: int) -> np.ndarray:
        return rng.standard_normal((*shape, *dims)).astype(np.float32)

    q, k = (unit(jnp.asarray(normal(K, DK))) for _ in range(2))
    g, beta = -np.exp(normal(K, R, decays)), 1 / (1 + np.exp(-normal(K, R)))
    return Tokens(q * DK**-0.5, k, jnp.asarray(normal(K, R, DV)), jnp.asarray(g), jnp.asarray(beta))


def random_states(rng: np.random.Generator, rows: int) -> jax.Array:
    return jnp.asarray(rng.standard_normal((rows, K, R, DV, DK)), jnp.float32)


def plain(state: np.ndarray, tokens: Tokens) -> tuple[np.ndarray, np.ndarray]:
    """The definition in float64, for one row: tokens [T, ...] from a state [K, R, dv, dk]."""
    state, read = state.astype(np.float64), []
    for q, k, v, g, beta in zip(*(np.asarray(x, np.float64) for x in tokens), strict=True):
        state = state * np.exp(g)[..., None, :]
        held = np.einsum("krvd,kd->krv", state, k)
        state = state + np.einsum("kd,krv->krvd", k, beta[..., None] * (v - held))
        read.append(np.einsum("krvd,kd->krv", state, q))
    return np.array(read).reshape(-1, K, R, DV), state


LENGTHS = ((1,), (5, 0, 2), (0, 3), (CHUNK, 1, CHUNK + 3), (2 * CHUNK - 1, 0, 7, 0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lengths", "padding", "decays"),
    members(
        [(lengths, *rest) for lengths in LENGTHS for rest in ((0, 1), (9, DK))],
        default=[(LENGTHS[1], 0, 1), (LENGTHS[3], 9, DK), (LENGTHS[4], 0, 1), (LENGTHS[0], 9, DK)],
    ),
)
def test_chunks_equal_the_definition(lengths: tuple[int, ...], padding: int, decays: int):
    """Rows of no tokens keep their state; what padding holds reaches nobody."""
    rng, T = np.random.default_rng(sum(lengths)), sum(lengths) + padding
    tokens, states = random_tokens(rng, T, decays=decays), random_states(rng, len(lengths))
    rows = np.repeat(np.arange(len(lengths) + 1), [*lengths, padding]).astype(np.int32)
    noisy = Tokens(
        *(jnp.where(jnp.asarray(rows < len(lengths)).reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan) for x in tokens)
    )
    read, after = jax.jit(chunked)(states, noisy, cut(jnp.asarray(rows), jnp.asarray(lengths, jnp.int32)))
    for row in range(len(lengths)):
        mine = Tokens(*(np.asarray(x)[rows == row] for x in tokens))
        want_read, want_state = plain(np.asarray(states[row]), mine)
        np.testing.assert_allclose(np.asarray(read)[rows == row], want_read, atol=1e-5)
        np.testing.assert_allclose(after[row], want_state, atol=1e-5)


@both_decays
def test_windows_equal_the_definition(decays: int):
    rng = np.random.default_rng(0)
    tokens, states = random_tokens(rng, 4, 6, decays=decays), random_states(rng, 4)
    read, after = recurrent(states, tokens)
    for row in range(4):
        want_read, want_state = plain(np.asarray(states[row]), Tokens(*(np.asarray(x[row]) for x in tokens)))
        np.testing.assert_allclose(read[row], want_read, atol=1e-5)
        np.testing.assert_allclose(after[row], want_state, atol=1e-5)


@both_decays
@pytest.mark.parametrize("accepted", range(6))
def test_a_repeated_token_has_the_same_bits(accepted: int, decays: int):
    """Some of a window's tokens, the others blank, leave the state that they would leave alone."""
    rng = np.random.default_rng(1)
    tokens, states = random_tokens(rng, 2, 5, decays=decays), random_states(rng, 2)
    kept = jnp.arange(5) < accepted
    blank = Tokens(*(jnp.where(kept.reshape(-1, *[1] * (x.ndim - 2)), x, 0) for x in tokens))
    step = jax.jit(recurrent)
    want = states
    for i in range(accepted):
        _, want = step(want, Tokens(*(x[:, i : i + 1] for x in tokens)))
    np.testing.assert_array_equal(step(states, blank)[1], want)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("family", ["qwen3_5", "kimi_linear"])
def test_both_forms_equal_transformers(family: str):
    import torch

    theirs = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    names, R, decays = {
        "qwen3_5": (("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"), 3, ()),
        "kimi_linear": (("chunk_kimi_delta_attention", "recurrent_kimi_delta_attention"), 1, (DK,)),
    }[family]
    rng, T = np.random.default_rng(2), CHUNK + 11
    q, k = (rng.standard_normal((1, T, K, DK)).astype(np.float32) for _ in range(2))
    v, state = (rng.standard_normal(s).astype(np.float32) for s in ((1, T, K * R, DV), (1, K * R, DK, DV)))
    g = -rng.exponential(size=(1, T, K * R, *decays)).astype(np.float32)
    beta = rng.random((1, T, K * R)).astype(np.float32)
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True, "initial_state": torch.tensor(state)}
    inputs = [torch.tensor(x) for x in (q, k, v)]
    gates = {"g": torch.tensor(g), "beta": torch.tensor(beta)}
    ours = Tokens(
        unit(jnp.asarray(q)) * DK**-0.5,
        unit(jnp.asarray(k)),
        v.reshape(1, T, K, R, DV),
        g.reshape(1, T, K, R, -1),
        beta.reshape(1, T, K, R),
    )
    start = jnp.asarray(state.reshape(1, K, R, DK, DV)).swapaxes(-1, -2)
    flat = Tokens(*(x[0] for x in ours))
    chunks = cut(jnp.zeros(T, jnp.int32), jnp.array([T], jnp.int32))
    for name in names:
        want_read, want_state = getattr(theirs, name)(*inputs, **gates, **options)
        for read, after in ((chunked(start, flat, chunks)), recurrent(start, ours)):
            np.testing.assert_allclose(np.asarray(read).reshape(T, K * R, DV), want_read[0], atol=1e-5)
            np.testing.assert_allclose(
                np.asarray(after).swapaxes(-1, -2).reshape(want_state.shape), want_state, atol=1e-5
            )


@pytest.mark.torch
def test_the_convolution_equals_transformers():
    import torch
    from transformers.models.qwen3_5 import modeling_qwen3_5 as theirs

    rng = np.random.default_rng(3)
    columns, weight = rng.standard_normal((2, 3 + 5, 10)), rng.standard_normal((10, 4))
    got = convolve(jnp.asarray(columns, jnp.float32), jnp.asarray(weight, jnp.float32))
    whole = torch.tensor(columns.transpose(0, 2, 1), dtype=torch.float32)
    want = theirs.causal_conv1d_fn(whole, torch.tensor(weight, dtype=torch.float32), activation="silu")
    np.testing.assert_allclose(got, want.numpy().transpose(0, 2, 1)[:, 3:], atol=1e-6)
