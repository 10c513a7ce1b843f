"""The Mosaic GPU kernel of gqa_write, interpreted on the CPU with race detection, and lowered for cuda."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.gqa_decode.shapes import HEADS, Heads
from pallas_kernels.gqa_write import mosaic, reference
from pallas_kernels.gqa_write.api import write_heads
from pallas_kernels.gqa_write.reference import HeadNorms
from pallas_kernels.gqa_write.shapes import ROTATED, TOKENS
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

EPS = 1e-5
PAGES, PAGE = 3, 64


def arguments(T: int, heads: Heads, rotated: int, norm: str | None, *, bias: bool = False, pages: int = PAGES) -> tuple:
    """Of `write_heads`, after the caches. No token lies in page 0, where padding tokens go.

    Args:
        norm: over each "head", the same "centred" (factors in float32), over the "whole" token, or over a "part" of what other
            calls have too.
    """
    rng = np.random.default_rng(T)
    (K, G, D), angles = heads[:3], rng.uniform(0, 6, (T, rotated // 2))
    places = PAGE + rng.permutation((pages - 1) * PAGE)[:T]

    def bf16(*shape: int, low: float = -2.0) -> jax.Array:
        return jnp.asarray(rng.uniform(low, 2, shape), jnp.bfloat16)

    norms = None
    if norm == "head":
        norms = HeadNorms(bf16(D, low=0.5), bf16(D, low=0.5))
    elif norm == "centred":
        norms = HeadNorms(*(bf16(D, low=0.5).astype(jnp.float32) for _ in range(2)))
    elif norm == "whole":
        norms = HeadNorms(bf16(K, G, D, low=0.5), bf16(K, D, low=0.5))
    elif norm == "part":
        squares = (jnp.asarray(rng.uniform(0.5, 2, T), jnp.float32) for _ in range(2))
        norms = HeadNorms(bf16(K, G, D, low=0.5), bf16(K, D, low=0.5), *squares)
    return (
        bf16(T, K, G + 2, D),
        bf16(K, G + 2, D) if bias else None,
        norms,
        *(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)),
        *(jnp.asarray(place, jnp.int32) for place in (places // PAGE, places % PAGE)),
    )


def empty_caches(heads: Heads, pages: int = PAGES) -> tuple[jax.Array, jax.Array]:
    return (jnp.full((pages, PAGE, heads.keys, heads.columns), jnp.nan, jnp.bfloat16),) * 2


@interpreted
@pytest.mark.parametrize(
    ("T", "heads", "rotated", "norm", "bias"),
    [
        pytest.param(3, Heads(2, 4, 64), 64, None, True, id="all of 64 columns, biases"),
        pytest.param(3, Heads(2, 6, 128), 64, "part", False, id="half of 128, a norm over more heads"),
        pytest.param(3, Heads(8, 6, 128), 64, "whole", False, id="half of 128, a norm over all heads"),
        pytest.param(1, Heads(8, 6, 128), 64, "whole", True, id="the same of one token, biases"),
        pytest.param(2, Heads(2, 5, 96), 64, "whole", True, id="two thirds of 96, a norm over all heads, biases"),
        pytest.param(3, Heads(1, 5, 128), 128, "head", True, id="all of 128, a norm a head, biases"),
        pytest.param(3, Heads(2, 4, 256), 64, "centred", False, id="a quarter of 256, a norm in float32"),
    ],
)
def test_interpreted_without_races(T, heads, rotated, norm, bias):
    """The rows written and the queries are the reference's, and no other row is touched."""
    args = arguments(T, heads, rotated, norm, bias=bias)
    if T > 1:
        args = (args[0].at[1, 0, 0, 3].set(jnp.nan), *args[1:])  # stays in its head, or in its token's queries
    got = mosaic.write_heads(*empty_caches(heads), *args, eps=EPS, interpret=detect_races())
    assert_no_races(got)
    want = reference.write_heads(*empty_caches(heads), *args, eps=EPS)
    for pair in zip(got, want, strict=True):
        ours, theirs = (np.asarray(array, np.float32) for array in pair)
        # The order of a sum, or a rounding that XLA leaves out, may change the last bit before the rotation.
        np.testing.assert_allclose(ours, theirs, rtol=2**-7, atol=2**-6)
        assert np.isnan(ours).sum() == np.isnan(theirs).sum()
        assert (ours != theirs)[~np.isnan(theirs)].mean() < 0.02


@pytest.mark.parametrize("T", TOKENS)
@pytest.mark.parametrize("name", HEADS)
def test_lowers_for_cuda(name, T):
    heads = HEADS[name]
    norms = {"qwen3-30b-a3b": "head", "qwen3-235b-a22b": "head", "minimax-m2": "whole", "qwen3.5-35b-a3b": "centred"}
    norm = norms.get(name)
    if norm == "whole" and T > mosaic.SUMMED_TOKENS:
        norm = "part"
    args = arguments(T, heads, ROTATED.get(name, heads.columns), norm, bias=norm is None, pages=1 + -(-T // PAGE))
    f = jax.jit(functools.partial(mosaic.write_heads, eps=EPS), donate_argnums=(0, 1))
    text = f.trace(*empty_caches(heads), *args).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert "output_operand_alias" in text  # in place


@pytest.mark.parametrize("bias", [False, True])
def test_squares_are_summed_once_where_the_kernel_would_sum_them_too_often(monkeypatch, bias):
    """Of many tokens, or of many heads, the kernel is given the means, and those are right."""
    monkeypatch.setattr(mosaic, "hopper_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(mosaic, "write_heads", lambda *args, **_: args[4])

    def given(T: int, heads: Heads, norm: str) -> HeadNorms:
        args = arguments(T, heads, 64, norm, bias=bias, pages=2 + T // PAGE)
        with tuning.use(dataclasses.replace(tuning.Tuning(), head_kernel_tokens=512)):
            norms = write_heads(*empty_caches(heads), *args, eps=EPS)
        if norm == "whole" and norms.q_square is not None:
            qkv = np.asarray(args[0] if args[1] is None else args[0] + args[1], np.float64)
            for got, x in ((norms.q_square, qkv[:, :, :-2]), (norms.k_square, qkv[:, :, -2])):
                np.testing.assert_allclose(got, (x**2).reshape(T, -1).mean(axis=1), rtol=1e-5)
        return norms

    assert given(256, Heads(8, 6, 128), "whole").q_square is None
    assert given(257, Heads(8, 6, 128), "whole").q_square is not None
    assert given(2, Heads(8, 12, 128), "whole").q_square is not None
    assert given(257, Heads(2, 4, 64), "head").q_square is None
    part = arguments(257, Heads(2, 4, 64), 64, "part", pages=6)[2]
    np.testing.assert_array_equal(given(257, Heads(2, 4, 64), "part").q_square, part.q_square)


def test_what_is_not_supported_runs_on_the_reference(monkeypatch):
    monkeypatch.setattr(mosaic, "hopper_unsupported_reason", lambda *_: None)
    monkeypatch.setattr(mosaic, "write_heads", lambda *_, **__: "kernel")

    def run(heads: Heads, rotated: int, T: int = 2) -> object:
        with tuning.use(dataclasses.replace(tuning.Tuning(), head_kernel_tokens=2)):
            return write_heads(*empty_caches(heads), *arguments(T, heads, rotated, None), eps=EPS)

    assert run(Heads(2, 4, 64), 64) == "kernel"
    for heads, rotated, T in ((Heads(2, 4, 64), 64, 3), (Heads(2, 3, 64), 64, 2), (Heads(2, 4, 64), 32, 2)):
        args = arguments(T, heads, rotated, None)
        want = reference.write_heads(*empty_caches(heads), *args, eps=EPS)
        for got, theirs in zip(run(heads, rotated, T), want, strict=True):
            np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(theirs, np.float32))


@pytest.mark.parametrize("norm", ["head", "whole"])
def test_reference_is_each_step_by_itself(norm):
    """Norm, rotation and writes of the model's own definition, head by head, in float64."""
    heads, T, rotated = Heads(2, 3, 64), 5, 32
    qkv, bias, norms, cos, sin, pages, offsets = arguments(T, heads, rotated, norm, bias=True)
    as_f32 = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    keys, values, queries = reference.write_heads(
        *as_f32(empty_caches(heads)),
        *as_f32((qkv, bias)),
        as_f32(norms),
        cos,
        sin,
        pages,
        offsets,
        eps=EPS,
    )
    exact = np.asarray(qkv, np.float64) + np.asarray(bias, np.float64)
    c, s, half = np.asarray(cos, np.float64), np.asarray(sin, np.float64), rotated // 2

    def placed(of_token: np.ndarray, index: tuple[int, ...], factor: jax.Array, t: int) -> np.ndarray:
        """One head of all queries or keys of a token."""
        x = of_token[index]
        normed_over = of_token if norm == "whole" else x
        x = x / np.sqrt((normed_over**2).mean() + EPS)
        x *= np.broadcast_to(np.asarray(factor, np.float64), of_token.shape)[index]
        a, b = x[:half].copy(), x[half:rotated].copy()
        x[:half], x[half:rotated] = a * c[t] - b * s[t], b * c[t] + a * s[t]
        return x

    for t in range(T):
        for head in range(heads.keys):
            at = int(pages[t]), int(offsets[t]), head
            np.testing.assert_allclose(values[at], exact[t, head, -1], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(keys[at], placed(exact[t, :, -2], (head,), norms.k, t), rtol=1e-4, atol=1e-5)
            for g in range(heads.group):
                want = placed(exact[t, :, :-2], (head, g), norms.q, t)
                np.testing.assert_allclose(queries[t, head, g], want, rtol=1e-4, atol=1e-5)
