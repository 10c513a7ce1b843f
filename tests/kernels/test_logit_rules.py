"""The kernel of requests' rules: interpreted beside plain XLA (oracle: `tests/sampling/test_penalties.py`), and lowered."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tuning
from pallas_kernels.logit_rules import api, mosaic, reference
from pallas_kernels.logit_rules.reference import PROMPT_BIT, LogitRules, mask_words
from pallas_kernels.sampling.shapes import VOCABULARIES
from pallas_kernels.tuning import Tuning
from tests.kernels.mosaic_interpreter import assert_no_races, detect_races, interpreted
from tests.matrices import full

B, M = 5, 3
PARAMETERS = ("repetition", "frequency", "presence", "num_bias", "constrained", "min_total")


def random_rules(rng: np.random.Generator, W: int, n: int, vocab: int) -> tuple[LogitRules, jax.Array]:
    """Of requests in other rows of the state than their own number, each with some rules; and their positions."""
    S = W + 2
    slots = rng.permutation(S)[:W].astype(np.int32)

    def some(values, neutral):
        return np.where(rng.random(W) < 0.6, values, neutral)

    counts = rng.integers(0, 3, (S, vocab)) + PROMPT_BIT * (rng.random((S, vocab)) < 0.3)
    stops = np.stack([rng.choice(vocab, M, replace=False) for _ in range(S)])
    stops[:, 2] = -1
    positions = rng.integers(5, 9, W).astype(np.int32)
    # One request may only stop, from some position on: there it may stop before min_tokens.
    masks = rng.random((S, n, mask_words(vocab) * 32)) < 0.4
    masks[slots[0], n - 1] = False
    masks[slots[0], n - 1, stops[slots[0], :2]] = True
    words = np.packbits(masks, axis=2, bitorder="little").view(np.int32)
    rules = LogitRules(
        slots=slots, counts=counts.astype(np.int32),
        repetition=some(rng.uniform(0.5, 2, W), 1).astype(np.float32),
        frequency=some(rng.uniform(-1, 1, W), 0).astype(np.float32),
        presence=some(rng.uniform(-1, 1, W), 0).astype(np.float32),
        num_bias=some(rng.integers(1, B + 1, W), 0).astype(np.int32),
        bias_ids=np.stack([rng.choice(vocab, B, replace=False) for _ in range(S)]).astype(np.int32),
        bias_values=rng.normal(size=(S, B)).astype(np.float32) * 5, stop_ids=stops.astype(np.int32),
        min_total=some(positions + 2, 0).astype(np.int32), constrained=(rng.random(W) < 0.6) | (np.arange(W) == 0), masks=words,
    )  # fmt: skip
    return jax.tree.map(jnp.asarray, rules), jnp.asarray(positions)


@interpreted
@pytest.mark.parametrize(
    ("n", "vocab", "dtype", "parts"),
    [(1, 256, jnp.bfloat16, 1), (6, 384, jnp.float32, 1), (2, 2048, jnp.bfloat16, 2)],
    ids=str,
)
def test_interpreted(n, vocab, dtype, parts):
    """Rows that are not wanted reach no other: their logits are NaN. Each part of the columns gives what the whole gives."""
    W, rng = 4, np.random.default_rng(n)
    rules, positions = random_rules(rng, W, n, vocab)
    logits = jnp.asarray(4 * rng.normal(size=(W, n, vocab)), dtype)
    drafts = jnp.asarray(rng.integers(0, vocab, (W, n - 1)), jnp.int32).at[:, : n > 1].set(7)
    wanted = jnp.asarray(rng.random((W, n)) < 0.8).at[0, n - 1].set(True).at[1, 0].set(False)
    want = np.asarray(reference.adjust(logits, drafts, rules, positions, vocab, None))
    dirty = jnp.where(wanted[..., None], logits, jnp.nan)
    V, interpret = vocab // parts, detect_races()
    for part in range(parts):
        own = slice(part * V, (part + 1) * V)
        first = None if parts == 1 else jnp.int32(part * V)
        got = mosaic.adjust(
            dirty[..., own], drafts, rules._replace(counts=rules.counts[:, own]), positions, wanted, vocab=vocab,
            first_column=first, interpret=interpret,
        )  # fmt: skip
        got = np.where(wanted[..., None], got, 0)
        np.testing.assert_allclose(got, np.where(wanted[..., None], want[..., own], 0), rtol=2e-6, atol=1e-6)
    assert_no_races(got, kernels=parts)
    assert np.isinf(want).any()
    assert (want[0, n - 1] > -np.inf).sum() == 2


@interpreted
def test_neutral_rules_are_exactly_nothing():
    W, n, vocab, rng = 2, 2, 256, np.random.default_rng(0)
    rules, positions = random_rules(rng, W, n, vocab)
    neutral = {name: jnp.zeros_like(getattr(rules, name)) for name in PARAMETERS} | {"repetition": jnp.ones(W)}
    logits = jnp.asarray(rng.normal(size=(W, n, vocab)), jnp.bfloat16)
    drafts, wanted = jnp.zeros((W, n - 1), jnp.int32), jnp.ones((W, n), bool)
    run = functools.partial(mosaic.adjust, vocab=vocab, interpret=detect_races())
    np.testing.assert_array_equal(run(logits, drafts, rules._replace(**neutral), positions, wanted), logits)


def shapes(R: int, n: int, vocab: int, slots: int = 129) -> tuple:
    S, W = jax.ShapeDtypeStruct, R // n
    i32, f32 = jnp.int32, jnp.float32
    rules = LogitRules(
        S((W,), i32), S((slots, vocab), i32), *[S((W,), f32)] * 3, S((W,), i32), S((slots, 300), i32),
        S((slots, 300), f32), S((slots, 68), i32), S((W,), i32), S((W,), jnp.bool_), S((slots, n, mask_words(vocab)), i32),
    )  # fmt: skip
    return S((W, n, vocab), jnp.bfloat16), S((W, n - 1), i32), rules, S((W,), i32), S((W, n), jnp.bool_)


@pytest.mark.parametrize(("R", "n", "vocab"), [(1, 1, "moonlight"), *full((128, 1, "qwen3")), (512, 4, "deepseek-v3")])
def test_lowers_for_the_gpu(R, n, vocab):
    vocab = VOCABULARIES[vocab]
    with tuning.use(Tuning(rule_kernel=True)):
        traced = jax.jit(functools.partial(mosaic.adjust, vocab=vocab)).trace(*shapes(R, n, vocab))
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2(") == 1
    assert f"{R}x{vocab}xf32" in text


def test_unsupported_calls_say_why():
    """And it is off where no measurement has said that it is faster."""
    logits = jax.ShapeDtypeStruct((2, 1, 1000), jnp.bfloat16)
    assert "a multiple of 128, not 1000 of 1000" in (mosaic.unsupported_reason(logits, 1000) or "")
    whole = jax.ShapeDtypeStruct((2, 1, 1024), jnp.bfloat16)
    assert "not 1024 of 3000" in (mosaic.unsupported_reason(whole, 3000) or "")
    rules, positions = random_rules(np.random.default_rng(0), 2, 1, 1024)
    arrays = jnp.zeros(whole.shape), jnp.zeros((2, 0), jnp.int32)
    _, is_whole = api.adjust(*arrays, rules, positions, jnp.ones((2, 1), bool), vocab=1024)
    assert is_whole
