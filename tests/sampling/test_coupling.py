"""Requests with a seed: whatever is drafted, each emitted token is the one that plain sampling draws at its position."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.sampling.rejection import verify
from jaxspec.sampling.sampler import sample
from tests.sampling.test_rejection import (
    CHI2_999,
    V,
    chains,
    chi2,
    cycle,
    greedy_drafter,
    random_q,
    sampling_rows,
    softmax,
)

N, POSITION = 4000, 100


@partial(jax.jit, static_argnames=("count", "full"))
def plain_chain(target, last, rows, *, count, full):
    """Tokens [R, count] of plain sampling, one after the other."""
    out = []
    for i in range(count):
        last = sample(target[last], rows, jnp.full(last.shape, POSITION + i), full=full)
        out.append(last)
    return jnp.stack(out, axis=1)


def many_kinds(R, **options):
    """Rows of every temperature and, for a full sampler, every mask."""
    rows = sampling_rows(R, np.resize([0.0, 0.7, 1.0, 1.5], R).astype(np.float32), seeded=True, **options)
    return rows._replace(
        top_p=np.resize([1.0, 0.8, 1.0, 1.0, 0.9], R).astype(np.float32),
        top_k=np.resize([0, 0, 3], R).astype(np.int32),
        min_p=np.resize([0.0, 0.2, 0.0, 0.0, 0.0, 0.0, 0.0], R).astype(np.float32),
    )


def random_drafter(logits, rows, positions):
    ids = (rows.seeds[:, 0].astype(jnp.int32) * 7 + positions * 3) % V
    return ids, jax.nn.logsumexp(logits, axis=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("k", "full", "options"),
    [
        (3, True, {}),
        (1, False, {"drafter": greedy_drafter}),
        pytest.param(7, True, {}, marks=pytest.mark.full),
        pytest.param(2, False, {"drafter": random_drafter}, marks=pytest.mark.full),
        pytest.param(1, True, {"drafter": random_drafter}, marks=pytest.mark.full),
    ],
)
def test_emitted_tokens_are_those_of_plain_sampling(k, full, options):
    target, draft = chains(0.5)
    rows = many_kinds(N)
    rng = np.random.default_rng(0)
    counted = rng.integers(0, k + 1, N)
    verified, drafts = cycle(target, draft, rows, POSITION, k=k, num_drafts=counted, full=full, **options)
    last = np.full(N, 3, np.int32)
    plain = np.asarray(plain_chain(target, last, rows, count=k + 1, full=full))
    emitted = np.arange(k + 1) <= verified.accepted[:, None]
    np.testing.assert_array_equal(np.where(emitted, verified.ids, 0), np.where(emitted, plain, 0))
    # As many drafts are accepted as are equal to plain sampling's tokens and count.
    equal = (drafts == plain[:, :k]) & (np.arange(k) < counted[:, None])
    np.testing.assert_array_equal(verified.accepted, np.cumprod(equal, axis=1).sum(axis=1))
    assert set(verified.accepted) == set(range(k + 1))


def test_acceptance_of_the_coupling():
    """Equal models agree always; others at least as often as (1 - d) / (1 + d), d their distance in total variation."""
    target, draft = chains(0.7)
    rows = sampling_rows(40_000, seeded=True)
    same, _ = cycle(target, target, rows, POSITION, k=3)
    assert (same.accepted == 3).all()
    verified, _ = cycle(target, draft, rows, POSITION, k=3)
    distance = 0.5 * np.abs(softmax(target[3]) - softmax(draft[3])).sum()
    rate = (verified.accepted > 0).mean()
    assert (1 - distance) / (1 + distance) - 0.01 < rate < 1 - distance + 0.01
    # Over seeds, the text is distributed as the target says.
    assert chi2(np.bincount(verified.ids[:, 0], minlength=V), softmax(target[3])) < CHI2_999[7]


def test_seeded_rows_leave_the_others_alone():
    """Greedy, seeded and unseeded rows in one batch: each row is what it is among its own kind."""
    rng = np.random.default_rng(4)
    R, k = 512, 3
    logits = rng.normal(size=(R, k + 1, V)).astype(np.float32)
    rows = sampling_rows(R, rng.choice([0.0, 0.7, 1.3], R))
    q = random_q(rng, rows, k)
    rest = (rng.integers(0, V, (R, k)).astype(np.int32), q, rng.random(R) < 0.3, np.full(R, k, np.int32))
    positions = rng.integers(0, 1000, R).astype(np.int32)
    compiled = jax.jit(partial(verify, full=False))

    def run(seeded):
        return jax.tree.map(np.asarray, compiled(logits, *rest, rows._replace(seeded=seeded), positions))

    some = rng.random(R) < 0.5
    none, every, mixed = run(np.zeros(R, bool)), run(np.ones(R, bool)), run(some)
    np.testing.assert_array_equal(mixed.accepted, np.where(some, every.accepted, none.accepted))
    np.testing.assert_array_equal(mixed.ids, np.where(some[:, None], every.ids, none.ids))
    greedy = rows.temperature == 0
    np.testing.assert_array_equal(none.ids[greedy], every.ids[greedy])
    assert (none.ids != every.ids)[~greedy].any()
