"""Rows of logits whose columns lie on several devices: what is chosen is what one device chooses."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.engine.on_mesh import on_mesh
from jaxspec.models.params import TENSOR_AXIS
from jaxspec.sampling.columns import PADDING, Columns
from jaxspec.sampling.logprobs import logprobs_of, top_logprobs
from jaxspec.sampling.penalties import adjust
from jaxspec.sampling.rejection import DraftLogits, sample_draft, verify
from jaxspec.sampling.sampler import SamplingRows, sample
from pallas_kernels.logit_rules.reference import LogitRules
from tests.sampling.test_penalties import V as MOST
from tests.sampling.test_penalties import W, random_masks, random_requests, rules_of

K = 3
WHOLE, BY_ID = PartitionSpec(), PartitionSpec(None, TENSOR_AXIS)
IN_WINDOW = PartitionSpec(None, None, TENSOR_AXIS)
# Of the requests' rules, the counts have a column for each id.
RULES = LogitRules(*[WHOLE] * len(LogitRules._fields))._replace(counts=BY_ID)


def choose(logits, drafts, q, one_hot, held, rows, positions, rules, vocab):
    """Everything that is chosen from a step's logits [W, K + 1, columns], and from the first of each window as a draft's."""
    columns = Columns(vocab)
    logits = columns.padded(logits)
    raw, window = logits.reshape(-1, columns.width), jax.tree.map(lambda a: jnp.repeat(a, K + 1, axis=0), rows)
    stats = columns.stats(raw, window.temperature + 1)
    changed = adjust(logits, drafts, rules, positions, columns).raw.reshape(logits.shape)
    windows = verify(changed, drafts, q, one_hot, held, rows, positions, full=True, columns=columns)
    single = sample(changed[:, 0], rows, positions, full=True, columns=columns)
    draft = sample_draft(logits[:, 0], rows, positions, columns)
    top = top_logprobs(raw, stats.log_z, 5, jnp.ones(len(raw), bool), columns)
    return windows, single, stats, draft, logprobs_of(raw, windows.ids.reshape(-1, 1), stats.log_z, columns), *top


@functools.cache
def chooser(devices, vocab):
    """`choose`, jitted, and how its arguments lie."""
    mesh = Mesh(np.array(jax.devices()[:devices]), (TENSOR_AXIS,))
    specs = (IN_WINDOW, WHOLE, DraftLogits(IN_WINDOW, WHOLE), WHOLE, WHOLE, WHOLE, WHOLE, RULES)
    function = on_mesh(functools.partial(choose, vocab=vocab), mesh, specs, WHOLE)
    return jax.jit(function), jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)


def chosen(devices, vocab, logits, drafts, q, one_hot, held, rows, positions, rules):
    """On so many devices, as NumPy arrays; what is whole has the same bits on each."""
    columns = -(-vocab // devices) * devices

    def widened(x, value):
        return np.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, columns - vocab)), constant_values=value)

    rules = rules._replace(counts=widened(rules.counts, 7))
    logits, q = widened(logits, np.nan), q._replace(logits=widened(q.logits, PADDING))
    run, shardings = chooser(devices, vocab)
    given = (logits, drafts, q, one_hot, held, rows, positions, rules)
    out = run(*jax.tree.map(jax.device_put, given, jax.tree.broadcast(shardings, given)))
    for array in jax.tree.leaves(out):
        first, *others = (np.asarray(shard.data) for shard in array.addressable_shards)
        assert len(others) == devices - 1
        for other in others:
            np.testing.assert_array_equal(first.view(np.int8), other.view(np.int8))
    return jax.tree.map(np.asarray, out)


def some_rows(rng, count):
    """Every parameter in some of the rows, and each of greedy, seeded and other random requests."""
    return SamplingRows(
        rng.choice([0.0, 0.0, 0.6, 1.0, 1.7], count).astype(np.float32),
        rng.choice([1.0, 1.0, 0.9, 0.3], count).astype(np.float32),
        rng.choice([0.0, 0.0, 0.05, 0.5], count).astype(np.float32),
        rng.choice([0, -1, 1, 3, 15], count).astype(np.int32),
        rng.integers(0, 2**32, (count, 2), np.uint32),
        rng.random(count) < 0.2,
        rng.random(count) < 0.3,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "vocab"),
    [
        (2, MOST - 1),
        *(
            pytest.param(devices, vocab, marks=pytest.mark.full)
            for devices, vocab in ((2, MOST), (3, MOST), (4, MOST), (4, MOST - 3))
        ),
    ],
)
def test_vocab_shards_draw_the_tokens_of_one_device(devices, vocab):
    """All ids, for every sampling parameter, penalty, bias and mask, with ties within shards and across them."""

    @given(st.integers(0, 2**32 - 1))
    @settings(max_examples=8)
    def check(seed):
        rng = np.random.default_rng(seed)
        logits = (3 * rng.normal(size=(W, K + 1, vocab))).astype(np.float32)
        logits[::2] = np.round(logits[::2])
        drafts = np.where(rng.random((W, K)) < 0.6, logits[:, :K].argmax(axis=2), rng.integers(0, vocab, (W, K)))
        drafts = drafts.astype(np.int32)
        # Of a third of the rows q is p, so that nothing is left of it where a draft is rejected.
        rows, of_drafts = some_rows(rng, W), 3 * rng.normal(size=(W, K, vocab)).astype(np.float32)
        of_drafts[::3] = logits[::3, :K]
        temperature = np.where(rows.temperature == 0, 1, rows.temperature)[:, None, None]
        q = DraftLogits(of_drafts, np.logaddexp.reduce(of_drafts / temperature, axis=2))
        requests = [
            (params, prompt, output, [stop for stop in stops if stop < vocab])
            for params, prompt, output, stops in random_requests(rng)
        ]
        positions = np.array([len(prompt) + len(output) for _, prompt, output, _ in requests], np.int32)
        rules = jax.tree.map(np.asarray, rules_of(requests, random_masks(rng, requests, K + 1)))
        rules = rules._replace(counts=rules.counts[:, :vocab])
        given = (
            logits, drafts, q, rng.random(W) < 0.3, rng.integers(0, K + 1, W).astype(np.int32), rows, positions, rules,
        )  # fmt: skip
        one, several = chosen(1, vocab, *given), chosen(devices, vocab, *given)
        for want, got in zip(jax.tree.leaves(one), jax.tree.leaves(several), strict=True):
            if want.dtype == np.float32:
                np.testing.assert_allclose(got, want, rtol=2e-6, atol=2e-6)
            else:
                np.testing.assert_array_equal(got, want)
        accepted.update(one[0].accepted.tolist())

    accepted: set[int] = set()
    check()
    assert accepted == set(range(K + 1))
