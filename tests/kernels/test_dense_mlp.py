"""The MLP of a dense layer on kernels: interpreted, lowered, and what it does not support."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import dense_mlp, reference
from pallas_kernels.norm_linear.split_linear import split_linear
from pallas_kernels.stream_linear import TERMS, Cut, cut_in_parts, even_cut, ring
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted

# Hidden and inner size of GLM-4.5-Air's dense layers, whose inner size is no multiple of 128, and of Moonlight's.
SIZES = [(4096, 10944), (2048, 11264)]


def sized(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16) / shape[-1] ** 0.5


@interpreted
@pytest.mark.parametrize(
    ("T", "blocks", "parts"), [(3, 5, 1), (24, 12, 3), pytest.param(72, 7, 1, marks=pytest.mark.slow)]
)
def test_interpreted(T: int, blocks: int, parts: int):
    """A token that is NaN reaches no other. Of five and of seven blocks the last has fewer outputs than the others."""
    H, inner = 512, 192
    gate_up, down, x = sized(2, inner, H), sized(H, inner, seed=1), sized(T, H, seed=2) * H**0.5
    broken = np.arange(T) == 1
    dirty = jnp.where(broken[:, None], jnp.nan, x)
    got = dense_mlp.mlp_to_add(dirty, gate_up, down, blocks=blocks, interpret=detect_races())
    assert_no_races(got, kernels=2)
    assert got.shape == (2 * parts, T, H)
    want = np.asarray(reference.swiglu(*(a.astype(jnp.float32) for a in (x, gate_up, down))))
    summed = np.asarray(got, np.float32).sum(axis=0)
    assert np.isnan(summed[broken]).all()
    assert np.abs(summed - want)[~broken].mean() <= 5e-3 * np.abs(want[~broken]).mean()


def shapes(T: int, H: int, inner: int) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, H), (2, inner, H), (H, inner))]


@pytest.mark.parametrize("T", [4, pytest.param(32, marks=pytest.mark.slow), 128])
def test_lowers_for_the_gpu(T: int):
    for H, inner in SIZES:
        text = jax.jit(dense_mlp.mlp_to_add).trace(*shapes(T, H, inner)).lower(lowering_platforms=("cuda",)).as_text()
        assert text.count("custom_call @mosaic_gpu") == 2
        assert "dot_general" not in text


@pytest.mark.parametrize(
    ("T", "H", "inner", "reason"),
    [
        (12, 4096, 10944, "from 8 on in multiples of 8, not 12"),
        (136, 4096, 10944, "up to 128 tokens"),
        (8, 4096, 10950, "sizes that are multiples of 64, not 4096 and 10950"),
        (8, 8192, 28672, "an inner size of up to 21120 with 8 tokens, not 28672"),
        (72, 7168, 18432, "an inner size of up to 14784 with 72 tokens, not 18432"),
        (8, 512, 10944, "no even parts of 512 outputs and 10944 columns for 132 blocks"),
        (8, 4096, 10944, "an NVIDIA GPU"),
    ],
)
def test_says_what_it_does_not_support(T: int, H: int, inner: int, reason: str):
    assert reason in dense_mlp.unsupported_reason(*shapes(T, H, inner))


def test_small_mlps_are_left_to_xla():
    assert dense_mlp.worthwhile(4224)
    assert not dense_mlp.worthwhile(2816)


@pytest.mark.parametrize("blocks", [1, 7, 132])
def test_blocks_share_outputs(blocks: int):
    for outputs in (64, 704, 10944, 11264, 18432):
        cut = even_cut(outputs, blocks)
        assert cut.outputs % 8 == 0
        assert cut.outputs * (blocks - 1) < outputs + 8 * blocks
        assert -(-outputs // cut.outputs) <= blocks


@pytest.mark.parametrize("rows", [64, 128])
def test_rings_have_stages_enough(rows: int):
    """Of MLPs up to DeepSeek-V3's dense layers."""
    for H, inner in (*SIZES, (2560, 6400), (7168, 18432)):
        down = cut_in_parts(H, inner, 132)
        assert down is not None
        for found in (ring(rows, 2, 1, even_cut(inner, 132), H), ring(rows, 1, 2, down, inner)):
            assert found[1] >= 3
    assert ring(64, 2, 1, even_cut(10944, 132), 4096) == (128, 3)


def test_output_projections_have_even_blocks_where_tiles_are_few():
    """MiniMax-M2's has three parts of the columns, each as two numbers, and with more tokens two of them."""

    def parts(T: int, outputs: int, columns: int) -> int:
        abstract = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((T, columns), (outputs, columns)))
        return jax.eval_shape(split_linear, *abstract).shape[0] // TERMS

    assert [parts(T, 3072, 6144) for T in (8, 64, 72)] == [3, 3, 2]
    assert [parts(T, 4096, 12288) for T in (8, 128)] == [2, 2]


@pytest.mark.parametrize(
    ("outputs", "columns", "cut"),
    [
        (4096, 10944, Cut(96, 3)),  # the down projections of GLM-4.5-Air and Moonlight
        (2048, 11264, Cut(64, 4)),
        (3072, 6144, Cut(72, 3)),  # the output projection of MiniMax-M2
        (512, 10944, None),
    ],
)
def test_parts_of_columns(outputs: int, columns: int, cut: Cut | None):
    assert cut_in_parts(outputs, columns, 132) == cut
