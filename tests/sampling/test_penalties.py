"""Bias, penalties and min_tokens at every position of a window, with the masks behind them, against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.logprobs import top_logprobs
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.penalties import adjust as adjust_target
from jaxspec.sampling.penalties import changes
from jaxspec.sampling.sampler import SamplingRows, cuts_of, temperatures
from pallas_kernels.logit_rules.reference import PROMPT_BIT, LogitRules, mask_words
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.api import logits_stats
from tests.sampling.rules_reference import adjusted, probabilities, softmax

V, W, B, STOPS = 40, 96, 6, 3


@jax.jit
def adjust(logits, *args):
    """All rows [W, n, V], as plain XLA gives them."""
    return adjust_target(logits, *args).raw.reshape(logits.shape)


def transformed(logits, rows):
    kept = reference.kept(logits, cuts_of(logits, rows, logits_stats(logits, temperatures(rows))))
    return kept / temperatures(rows)[:, None]


distribution = jax.jit(lambda logits, rows: jax.nn.softmax(transformed(logits, rows), axis=1))


def random_requests(rng):
    """Parameters, prompt and output ids, stop ids; a third of the requests leave each parameter neutral."""

    def some(value, neutral):
        return value if rng.random() < 0.67 else neutral

    for _ in range(W):
        params = SamplingParams(
            max_tokens=100,
            temperature=float(rng.uniform(0.3, 2)),
            min_p=some(float(rng.uniform(0, 0.5)), 0.0),
            top_k=some(int(rng.integers(1, V)), 0),
            top_p=some(float(rng.uniform(0.2, 1)), 1.0),
            presence_penalty=some(float(rng.uniform(-2, 2)), 0.0),
            frequency_penalty=some(float(rng.uniform(-2, 2)), 0.0),
            repetition_penalty=some(float(rng.uniform(0.2, 5)), 1.0),
            logit_bias=some({int(t): float(rng.uniform(-20, 20)) for t in rng.choice(V, rng.integers(1, B + 1))}, {}),
            min_tokens=some(int(rng.integers(1, 12)), 0),
        )
        prompt = rng.integers(0, V, rng.integers(1, 20)).tolist()
        output = rng.integers(0, V // 2, rng.integers(0, 10)).tolist()
        yield params, prompt, output, rng.choice(V, rng.integers(0, STOPS + 1), replace=False).tolist()


def random_masks(rng, requests, n):
    """bool [W, n, V]: a third of the requests have none, some may only stop."""
    masks = rng.random((W, n, V)) < 0.4
    masks[:, :, 0] = True
    masks[::3] = True
    for w, (_, _, _, stops) in enumerate(requests):
        if stops and w % 3 == 1:
            masks[w, w % n] = np.isin(np.arange(V), stops)
    return masks


def packed(masks):
    """Bits, and noise after the vocabulary's end."""
    noise = np.random.default_rng(2).random((*masks.shape[:2], 32 * mask_words(V))) < 0.5
    noise[..., :V] = masks
    return jnp.asarray(np.packbits(noise, axis=2, bitorder="little").view(np.int32))


def rules_of(requests, masks=None) -> LogitRules:
    """As the device holds them; what no entry covers is garbage, as a slot's former request would leave it."""
    rng = np.random.default_rng(1)
    counts = np.zeros((W, V), np.int32)
    bias_ids, bias_values = rng.integers(0, V, (W, B)), rng.normal(size=(W, B)) * 50
    stop_ids = np.full((W, STOPS), -1)
    for w, (params, prompt, output, stops) in enumerate(requests):
        counts[w, prompt] = PROMPT_BIT
        np.add.at(counts[w], output, 1)
        for index, (token, value) in enumerate(params.logit_bias.items()):
            bias_ids[w, index], bias_values[w, index] = token, value
        stop_ids[w, : len(stops)] = stops

    def column(of, dtype=np.float32):
        return jnp.asarray([of(*request) for request in requests], dtype)

    constrained = np.zeros(W, bool) if masks is None else np.arange(W) % 3 > 0
    no_masks = np.zeros((W, 8, V), bool)  # of unconstrained requests whatever was left there
    return LogitRules(
        slots=jnp.arange(W, dtype=jnp.int32),
        constrained=jnp.asarray(constrained),
        masks=packed(no_masks if masks is None else masks),
        counts=jnp.asarray(counts),
        repetition=column(lambda p, *_: p.repetition_penalty),
        frequency=column(lambda p, *_: p.frequency_penalty),
        presence=column(lambda p, *_: p.presence_penalty),
        num_bias=column(lambda p, *_: len(p.logit_bias), np.int32),
        bias_ids=jnp.asarray(bias_ids, jnp.int32),
        bias_values=jnp.asarray(bias_values, jnp.float32),
        stop_ids=jnp.asarray(stop_ids, jnp.int32),
        min_total=column(lambda p, prompt, *_: len(prompt) + p.min_tokens, np.int32),
    )


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4, pytest.param(8, marks=pytest.mark.full)])
def test_all_transforms_at_every_window_position(n):
    rng = np.random.default_rng(n)
    requests = list(random_requests(rng))
    raw = (rng.normal(size=(W, n, V)) * 4).astype(np.float32)
    drafts = rng.integers(0, V // 2, (W, n - 1)).astype(np.int32)  # few ids, so that drafts repeat the output
    positions = np.array([len(prompt) + len(output) for _, prompt, output, _ in requests], np.int32)
    masks = random_masks(rng, requests, n)
    rules = rules_of(requests, masks)
    got, may_change = np.asarray(adjust(raw, drafts, rules, positions)), np.asarray(changes(rules, positions))
    assert may_change[(got != raw).any(axis=(1, 2))].all()

    def column(name, dtype):
        return jnp.repeat(jnp.asarray([getattr(p, name) for p, *_ in requests], dtype), n)

    rows = SamplingRows(
        column("temperature", np.float32), column("top_p", np.float32), column("min_p", np.float32),
        column("top_k", np.int32), jnp.zeros((W * n, 2), jnp.uint32), *[jnp.zeros(W * n, bool)] * 2,
    )  # fmt: skip
    drawn_from = np.asarray(distribution(got.reshape(W * n, V), rows)).reshape(W, n, V)
    masked = 0
    for w, (params, prompt, output, stops) in enumerate(requests):
        for i in range(n):
            want = adjusted(raw[w, i], prompt, [*output, *drafts[w, :i].tolist()], params, stops, masks[w, i])
            np.testing.assert_allclose(got[w, i], want, rtol=1e-5, atol=1e-4)
            p = probabilities(want, params)
            # Two tokens may lie as close to a border as rounding; no border of these draws is that close.
            np.testing.assert_allclose(drawn_from[w, i], p, atol=1e-4)
            masked += int((p == 0).sum())
    assert masked > W * n


@pytest.mark.slow
def test_neutral_rules_are_exactly_nothing():
    """Whatever counts and biases the slot's former requests have left."""
    rng = np.random.default_rng(0)
    raw = (rng.normal(size=(W, 4, V)) * 4).astype(np.float32)
    neutral = [(SamplingParams(), [1], [2] * 9, [3])] * W
    rules = rules_of(neutral)._replace(counts=jnp.asarray(rng.integers(0, 2**31 - 1, (W, V)), jnp.int32))
    rules = rules._replace(masks=rules.masks[:, :4])
    got = adjust(raw, rng.integers(0, V, (W, 3)).astype(np.int32), rules, jnp.zeros(W, jnp.int32) + 10)
    np.testing.assert_array_equal(got, raw)
    assert not changes(rules, jnp.zeros(W, jnp.int32) + 10).any()
    rows = SamplingRows(
        jnp.ones(W),
        jnp.ones(W),
        jnp.zeros(W),
        jnp.zeros(W, jnp.int32),
        jnp.zeros((W, 2), jnp.uint32),
        jnp.zeros(W, bool),
        jnp.zeros(W, bool),
    )
    np.testing.assert_array_equal(transformed(raw[:, 0], rows), raw[:, 0])


@pytest.mark.parametrize("size", [20, 160, 1500])
def test_top_logprobs_against_a_sort(size):
    """Ties go to the lowest id, within a block of the search and across blocks."""
    rng = np.random.default_rng(size)
    logits = rng.normal(size=(64, size)).astype(np.float32)
    logits[::2] = rng.integers(-3, 3, logits[::2].shape)  # many ties
    log_z = jax.nn.logsumexp(logits, axis=1)
    ids, values = jax.jit(top_logprobs, static_argnums=2)(logits, log_z, 20, jnp.ones(64, bool))
    want = np.argsort(-logits, axis=1, kind="stable")[:, :20]
    np.testing.assert_array_equal(ids, want)
    for r in range(64):
        np.testing.assert_allclose(values[r], np.log(softmax(logits[r].astype(np.float64)))[want[r]], atol=1e-5)


def test_nothing_here_breaks_a_cuda_graph(monkeypatch):
    """No sort and no control flow in what a GPU is given: a decode step must be one CUDA graph."""
    monkeypatch.setattr("pallas_kernels.unrolling.unrolls", lambda: True)
    logits, positions = jax.ShapeDtypeStruct((W, 4, V), jnp.float32), jax.ShapeDtypeStruct((W,), jnp.int32)
    drafts = jax.ShapeDtypeStruct((W, 3), jnp.int32)
    rules = rules_of(list(random_requests(np.random.default_rng(0))))
    rules = rules._replace(masks=rules.masks[:, :4])
    rows = SamplingRows(
        jnp.ones(W),
        jnp.ones(W),
        jnp.zeros(W),
        jnp.zeros(W, jnp.int32),
        jnp.zeros((W, 2), jnp.uint32),
        jnp.zeros(W, bool),
        jnp.zeros(W, bool),
    )

    def everything(logits, drafts, rules, positions, rows):
        x = adjust(logits, drafts, rules, positions)[:, 0]
        return transformed(x, rows), top_logprobs(logits[:, 0], rows.temperature, 20, rows.seeded)

    traced = jax.jit(everything).trace(logits, drafts, rules, positions, rows)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    for breaker in ("sort", "while", "case", "if", "custom_call"):
        assert f"stablehlo.{breaker}" not in text, breaker
