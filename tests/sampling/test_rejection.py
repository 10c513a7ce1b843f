"""Losslessness of speculative verification, on the production functions with the production drafter in the loop.

The toy target and draft are Markov chains: p and q depend on the last token, so that errors at later positions show.
Each broken sampler that is known from the field is kept as a test of the tests.
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.engine.acceptance import probability_for
from jaxspec.sampling import columns, rejection
from jaxspec.sampling.rejection import DraftLogits, Verified, sample_draft, verify
from jaxspec.sampling.sampler import SamplingRows, Stream, noise_keys, sample
from pallas_kernels.sampling import reference
from pallas_kernels.sampling.keys import LEAST_KEY

V, N = 8, 40_000
CHI2_999 = {7: 24.3, 63: 103.4}  # 0.999 quantiles


def chains(distance: float = 1.0):
    """Target and draft logits [V, V], given the last token."""
    rng = np.random.default_rng(0)
    target = rng.normal(size=(V, V)).astype(np.float32) * 1.5
    return target, (target + distance * rng.normal(size=(V, V))).astype(np.float32)


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True), dtype=np.float64)
    return e / e.sum(axis=-1, keepdims=True)


def sampling_rows(R, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, salt=0, greedy_drafts=False, seeded=False):
    """As NumPy arrays, like all inputs here: outside of `jax.jit` every operation would compile by itself."""
    seeds = np.stack([np.arange(R), np.full(R, salt)], axis=1).astype(np.uint32)
    return SamplingRows(
        np.broadcast_to(np.float32(temperature), (R,)),
        np.full(R, top_p, np.float32),
        np.full(R, min_p, np.float32),
        np.full(R, top_k, np.int32),
        seeds,
        np.broadcast_to(greedy_drafts, (R,)),
        np.broadcast_to(seeded, (R,)),
    )


def random_q(rng, rows, k):
    """Of k drafts of each row, at its temperature."""
    logits = rng.normal(size=(len(rows.temperature), k, V)).astype(np.float32)
    tempered = logits / np.where(rows.temperature == 0, 1, rows.temperature)[:, None, None]
    return DraftLogits(logits, np.logaddexp.reduce(tempered, axis=2))


@partial(jax.jit, static_argnames=("k", "full", "drafter", "verifier"))
def compiled_cycle(
    target, draft, last, rows, position, *,
    k, num_drafts=None, full=False, one_hot=False, drafter=sample_draft, verifier=verify,
):  # fmt: skip
    """One speculative cycle from last tokens [R]: drafts k tokens, then verifies them, or the first `num_drafts` [R]."""
    R = last.shape[0]
    ids, log_zs, token = [], [], last
    for i in range(k):
        token, log_z = drafter(draft[token], rows, jnp.full(R, position + i))
        ids.append(token)
        log_zs.append(log_z)
    drafts = jnp.stack(ids, axis=1) if k else jnp.zeros((R, 0), jnp.int32)
    of_drafts = draft[jnp.concatenate([last[:, None], drafts], axis=1)[:, :k]]
    q = DraftLogits(of_drafts, jnp.stack(log_zs, axis=1) if k else jnp.zeros((R, 0)))
    logits = target[jnp.concatenate([last[:, None], drafts], axis=1)]
    point_mass = rows.greedy_drafts | one_hot
    num_drafts = jnp.full(R, k) if num_drafts is None else num_drafts
    return verifier(logits, drafts, q, point_mass, num_drafts, rows, jnp.full(R, position), full=full), drafts


def cycle(target, draft, rows, position=100, *, last=3, **options):
    """`compiled_cycle` from one last token for every row of `rows`, as NumPy arrays."""
    tokens = np.full(len(rows.temperature), last, np.int32)
    return jax.tree.map(np.asarray, compiled_cycle(target, draft, tokens, rows, position, **options))


def chi2(counts, p):
    counts, p = np.asarray(counts, np.float64), np.asarray(p)
    assert counts[p == 0].sum() == 0, "a token of probability zero was emitted"
    p, counts = p[p > 0], counts[p > 0]
    expected = counts.sum() * p
    return float(((counts - expected) ** 2 / expected).sum())


def first_token_chi2(**options):
    target, draft = options.pop("chains", chains())
    rows = options.pop("rows", sampling_rows(N))
    verified, _ = cycle(target, draft, rows, **options)
    return chi2(np.bincount(verified.ids[:, 0], minlength=V), softmax(target[3])), verified


@pytest.mark.slow
def test_exactly_by_enumeration(monkeypatch):
    """No draws: every draft, a grid of u, and noise that just tips the replacement one way or the other."""
    p, q = np.array([0.1, 0.3, 0.25, 0.2, 0.15]), np.array([0.5, 0.1, 0.2, 0.15, 0.05])
    kept, left = q * np.minimum(1, p / q), np.maximum(p - q, 0)
    np.testing.assert_allclose(kept + (1 - kept.sum()) * left / left.sum(), p, atol=1e-12)

    def decide(drafts, u, noise):
        R = len(drafts)
        monkeypatch.setattr(rejection, "uniform", lambda *_: jnp.asarray(u, jnp.float32))
        monkeypatch.setattr(reference, "gumbel", lambda *_: jnp.repeat(jnp.asarray(noise, jnp.float32), 2, axis=0))
        logits = np.broadcast_to(np.log(p), (R, 2, 5)).astype(np.float32)
        of_drafts = DraftLogits(np.broadcast_to(np.log(q), (R, 1, 5)).astype(np.float32), np.zeros((R, 1), np.float32))
        none, one, first = np.zeros(R, bool), np.ones(R, np.int32), np.zeros(R, np.int32)
        ids = np.asarray(drafts, np.int32)[:, None]
        # Traced anew each time: the noise is a constant of it.
        run = jax.jit(lambda *inputs: verify(*inputs, full=False))
        return jax.tree.map(np.asarray, run(logits, ids, of_drafts, none, one, sampling_rows(R), first))

    drafts, u = (a.ravel() for a in np.meshgrid(np.arange(5), (np.arange(256) + 0.5) / 256))
    verified = decide(drafts, u, np.zeros((len(drafts), 5)))
    np.testing.assert_array_equal(verified.accepted, u * q[drafts] < p[drafts])

    pairs = [(a, b) for a in range(1, 5) for b in range(1, 5) if a != b]
    tips = np.array([np.log(left[b] / left[a]) for a, b in pairs])
    for shift, side in ((1e-3, 0), (-1e-3, 1)):
        noise = np.full((len(pairs), 5), -1e9)
        for row, (a, b) in enumerate(pairs):
            noise[row, [a, b]] = (tips[row] + shift, 0)
        replaced = decide(np.zeros(len(pairs), int), np.full(len(pairs), 0.99), noise)
        assert (replaced.accepted == 0).all()
        assert replaced.ids[:, 0].tolist() == [pair[side] for pair in pairs]


@pytest.mark.slow
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_the_first_token_follows_the_target(k):
    statistic, _ = first_token_chi2(k=k)
    assert statistic < CHI2_999[7]


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("temperature", [0.5, 1.5])
def test_second_token_given_the_first(k, temperature):
    """Pooled over first tokens, among windows that emitted at least two."""
    target, draft = chains()
    rows = sampling_rows(N, temperature)
    verified, _ = cycle(target, draft, rows, k=k)
    ids, accepted = verified
    total, df = 0.0, 0
    p = softmax(target / temperature)
    for first in range(V):
        second = ids[(accepted >= 1) & (ids[:, 0] == first), 1]
        if len(second) < 400:
            continue
        total += chi2(np.bincount(second, minlength=V), p[first])
        df += V - 1
    assert df >= 2 * (V - 1)
    assert total < df + 3.3 * (2 * df) ** 0.5 + 8  # beyond the 0.999 quantile


def test_the_bonus_follows_the_target_after_full_acceptance():
    target, draft = chains(0.2)
    verified, drafts = cycle(target, draft, sampling_rows(N), k=2)
    full = verified.accepted == 2
    last = drafts[full, 1]
    bonus = verified.ids[full, 2]
    token = np.bincount(last).argmax()
    assert chi2(np.bincount(bonus[last == token], minlength=V), softmax(target[token])) < CHI2_999[7]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_acceptance_is_exactly_the_overlap(temperature):
    """Too few acceptances waste the draft, too many are lossy: equality on both sides, at every position."""
    target, draft = chains()
    verified, drafts = cycle(target, draft, sampling_rows(N, temperature), k=3)
    overlap = np.minimum(softmax(target / temperature), softmax(draft / temperature)).sum(axis=1)
    context, accepted = np.full(N, 3), verified.accepted
    reached = np.ones(N, bool)
    for i in range(3):
        expected = overlap[context[reached]]
        got = (accepted > i)[reached].sum()
        sigma = np.sqrt((expected * (1 - expected)).sum())
        assert abs(got - expected.sum()) < 3 * sigma
        reached &= accepted > i
        context = drafts[:, i]


def test_draft_accept_and_recover_noise_are_independent():
    """p and q of which two residual tokens are left with unequal q: shared noise shows here and almost nowhere else."""
    p, q = np.array([0.1, 0.6, 0.3]), np.array([0.6, 0.3, 0.1])
    pad = lambda x: np.log(np.concatenate([x, np.full(V - 3, 1e-30)])).astype(np.float32)  # noqa: E731
    models = (np.tile(pad(p), (V, 1)), np.tile(pad(q), (V, 1)))
    R = 200_000
    verified, _ = cycle(*models, sampling_rows(R), 7, last=0, k=1)
    counts = np.bincount(verified.ids[:, 0], minlength=V)[:3]
    assert ((counts - R * p) ** 2 / (R * p)).sum() < 13.8


@pytest.mark.long
def test_support_and_extremes():
    target, draft = chains()
    order = np.argsort(-target[3])
    verified, _ = cycle(target, draft, sampling_rows(N, top_k=2), k=2, full=True)
    assert set(verified.ids[:, 0].tolist()) == set(order[:2].tolist())
    same, _ = cycle(target, target, sampling_rows(N), k=3)
    assert (same.accepted == 3).all()
    apart = np.full((2, V, V), -1e9, np.float32)
    apart[0, :, :4], apart[1, :, 4:] = 0, 0
    disjoint, _ = cycle(apart[0], apart[1], sampling_rows(N), k=2)
    assert (disjoint.accepted == 0).all()
    assert chi2(np.bincount(disjoint.ids[:, 0], minlength=V), softmax(apart[0, 0])) < CHI2_999[7]
    point = np.full((V, V), -1e9, np.float32)
    point[:, 5] = 0
    certain, _ = cycle(point, draft, sampling_rows(N), k=2)
    assert (certain.ids[:, 0] == 5).all()


@pytest.mark.slow
def test_masks_of_the_target_alone():
    """q knows nothing of the transforms and need not."""
    target, draft = chains()
    for options in ({"top_k": 4}, {"top_p": 0.8}, {"min_p": 0.3}):
        rows = sampling_rows(N, 0.9, **options)
        verified, _ = cycle(target, draft, rows, k=2, full=True)
        scaled = target[3] / 0.9
        probability = softmax(scaled)
        ranked = np.sort(probability)[::-1]
        keep = {
            "top_k": options.get("top_k", 0),
            "top_p": int((ranked.cumsum() < options.get("top_p", 0)).sum()) + 1,
            "min_p": int((ranked >= options.get("min_p", 0) * ranked[0]).sum()),
        }[next(iter(options))]
        p = np.where(probability >= ranked[keep - 1], probability, 0)
        assert chi2(np.bincount(verified.ids[:, 0], minlength=V), p / p.sum()) < CHI2_999[7]


@pytest.mark.slow
def test_one_hot_drafts_are_lossless_and_slower():
    """A sampled draft verified as a point mass, and a greedy draft: both right, with fewer acceptances."""
    statistic, verified = first_token_chi2(k=3)
    one_statistic, one_verified = first_token_chi2(k=3, one_hot=True)
    assert statistic < CHI2_999[7]
    assert one_statistic < CHI2_999[7]
    assert one_verified.accepted.mean() < 0.7 * verified.accepted.mean(), "q was not used at all"
    greedy_statistic, _ = first_token_chi2(k=3, one_hot=True, drafter=greedy_drafter)
    assert greedy_statistic < CHI2_999[7]


@pytest.mark.slow
def test_gated_and_greedily_drafted_rows_are_lossless():
    """In one batch, sampled and greedy drafts of which 0 to k count: every kind follows the target, first and second."""
    target, draft = chains()
    rng = np.random.default_rng(6)
    k, R = 3, 4 * N
    greedy_drafts, num_drafts = rng.random(R) < 0.5, rng.integers(0, k + 1, R)
    rows = sampling_rows(R, greedy_drafts=greedy_drafts)
    verified, drafts = cycle(target, draft, rows, k=k, num_drafts=num_drafts)
    ids, accepted = verified
    assert (accepted <= num_drafts).all()
    assert (drafts[greedy_drafts, 0] == draft[3].argmax()).all()
    p = softmax(target)
    for point_mass in (False, True):
        for number in range(k + 1):
            kind = (greedy_drafts == point_mass) & (num_drafts == number)
            assert chi2(np.bincount(ids[kind, 0], minlength=V), p[3]) < CHI2_999[7]
            first = ids[kind & (accepted >= 1), 0]
            if not number:
                assert not len(first)
                continue
            token = np.bincount(first).argmax()
            second = ids[kind & (accepted >= 1) & (ids[:, 0] == token), 1]
            assert len(second) > 400
            assert chi2(np.bincount(second, minlength=V), p[token]) < CHI2_999[7]


@pytest.mark.slow
def test_rows_of_many_kinds_share_a_batch():
    """Greedy and random rows, 0 to k drafts, another temperature each: every row is what it is alone, in any order."""
    rng = np.random.default_rng(4)
    R, k = 512, 3
    logits = rng.normal(size=(R, k + 1, V)).astype(np.float32)
    rows = sampling_rows(R, rng.choice([0.0, 0.7, 1.3], R))
    args = [
        logits, rng.integers(0, V, (R, k)).astype(np.int32), random_q(rng, rows, k), rng.random(R) < 0.3,
        rng.integers(0, k + 1, R).astype(np.int32),
    ]  # fmt: skip
    positions = rng.integers(0, 1000, R).astype(np.int32)
    compiled = jax.jit(partial(verify, full=False))
    run = lambda *inputs: jax.tree.map(np.asarray, compiled(*inputs))  # noqa: E731
    whole = run(*args, rows, positions)
    order = rng.permutation(R)
    permuted = run(*jax.tree.map(lambda a: a[order], (*args, rows, positions)))
    np.testing.assert_array_equal(permuted.accepted, whole.accepted[order])
    live = np.arange(k + 1) <= whole.accepted[:, None]
    np.testing.assert_array_equal(np.where(live[order], permuted.ids, 0), np.where(live, whole.ids, 0)[order])
    assert (whole.accepted <= args[4]).all()

    greedy = rows.temperature == 0
    best = logits.argmax(axis=2)
    for r in np.flatnonzero(greedy):
        matches = (args[1][r] == best[r, :k]) & (np.arange(k) < args[4][r])
        a = int(np.cumprod(matches).sum())
        assert whole.accepted[r] == a
        np.testing.assert_array_equal(whole.ids[r, : a + 1], best[r, : a + 1])

    none = np.flatnonzero(args[4] == 0)
    plain = jax.jit(partial(sample, full=False))(
        logits[none, 0], jax.tree.map(lambda a: a[none], rows), positions[none]
    )
    np.testing.assert_array_equal(whole.ids[none, 0], plain)  # no drafts: plain sampling, to the token


def test_zero_probabilities_and_equal_rounding():
    """q(x) = 0, p(x) = 0 and p == q never give NaN, an id outside the vocabulary, or an impossible token."""
    neg = -np.inf
    p = np.array([[[0.0, neg, 0.0, neg]] * 2], np.float32)
    run = jax.jit(partial(verify, full=False))
    for q_row, x in (([neg, 0.0, neg, neg], 1), ([neg, neg, 0.0, 0.0], 0), ([0.0, neg, 0.0, neg], 2)):
        q = DraftLogits(np.float32([[q_row]]), np.log(np.exp(np.float32([[q_row]])).sum(axis=2)))
        ids, none, one, first = np.int32([[x]]), np.array([False]), np.int32([1]), np.int32([0])
        for seed in range(20):
            out = run(p, ids, q, none, one, sampling_rows(1, salt=seed), first)
            emitted = np.asarray(out.ids)[0, : int(out.accepted[0]) + 1]
            assert set(emitted.tolist()) <= {0, 2}
            assert bool(out.accepted[0]) == (x == 2)


# --- tests of the tests: samplers known to be wrong must fail them ---


@cache
def synthetic_verifier(mean):
    """One function for each mean, so that both temperatures share what is compiled for it."""
    return partial(verify, synthetic_length=mean)


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "mean", "by_position"), [(1, 1.3, [0.3]), (3, 1.0, [0, 0, 0]), (3, 2.6, [1, 0.6, 0]), (3, 4.0, [1, 1, 1])]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance(k, mean, by_position, temperature):
    """Mean and rates are as asked for any target, and only the token after the drafts is the target's."""
    target, draft = chains(5.0)
    rows = sampling_rows(N, temperature)
    (ids, accepted), drafts = cycle(target, draft, rows, k=k, verifier=synthetic_verifier(mean))
    for position, rate in enumerate(by_position):
        assert abs((accepted > position).mean() - rate) <= 3 * (rate * (1 - rate) / N) ** 0.5
    assert abs(1 + accepted.mean() - mean) <= 3 * (sum(r * (1 - r) for r in by_position) / N) ** 0.5
    kept = np.arange(k) < accepted[:, None]
    np.testing.assert_array_equal(ids[:, :k][kept], drafts[kept])
    last = np.take_along_axis(ids, accepted[:, None], axis=1)[:, 0]
    before = np.where(accepted > 0, np.take_along_axis(drafts, np.maximum(accepted - 1, 0)[:, None], axis=1)[:, 0], 3)
    if temperature == 0:
        np.testing.assert_array_equal(last, target[before].argmax(axis=1))
    else:
        token = np.bincount(before).argmax()
        assert chi2(np.bincount(last[before == token], minlength=V), softmax(target[token])) < CHI2_999[7]


def test_synthetic_acceptance_keeps_to_the_drafts_there_are():
    accepted = rejection.accept_synthetically(jnp.arange(4), sampling_rows(4), jnp.full(4, 9), 4.0)
    np.testing.assert_array_equal(accepted, [0, 1, 2, 3])


@pytest.mark.parametrize(("k", "length"), [(3, 1.0), (3, 1.5), (3, 2.2), (3, 3.0), (3, 4.0), (1, 1.3), (7, 5.0)])
def test_drafts_accepted_one_by_one(k, length):
    """Each with the probability that gives the length, if those before it are; rows have their own."""
    p = probability_for(length, k)
    assert sum(p**i for i in range(k + 1)) == pytest.approx(length, abs=1e-9)
    u = np.random.default_rng(0).random((N, k)).astype(np.float32)
    probabilities = np.where(np.arange(N) % 2, p, 0).astype(np.float32)
    accepted = np.asarray(rejection.accept_one_by_one(jnp.full(N, k), u, probabilities))
    assert not accepted[::2].any()
    for position in range(k):
        rate, windows = p ** (position + 1), N // 2
        assert abs((accepted[1::2] > position).mean() - rate) <= 3.5 * (rate * (1 - rate) / windows) ** 0.5 + 1e-9
    fewer = rejection.accept_one_by_one(jnp.arange(N) % (k + 1), u, probabilities)
    np.testing.assert_array_equal(fewer, np.minimum(accepted, np.arange(N) % (k + 1)))


def greedy_drafter(logits, _rows, _positions):
    return jnp.argmax(logits, axis=1).astype(jnp.int32), jax.nn.logsumexp(logits, axis=1)


def colder_drafter(logits, rows, positions):
    """Draws at temperature 0.5 and reports q at 1."""
    ids, _ = sample_draft(logits * 2, rows, positions)
    return ids, jax.nn.logsumexp(logits, axis=1)


def argmax_verifier(logits, drafts, q, one_hot, num_drafts, rows, positions, *, full):
    """ATOM's rule: argmax at the draft positions whatever the temperature, only the bonus is sampled."""
    greedy = rows._replace(temperature=jnp.zeros_like(rows.temperature))
    out = verify(logits, drafts, q, one_hot, num_drafts, greedy, positions, full=full)
    sampled = verify(logits, drafts, q, one_hot, num_drafts, rows, positions, full=full)
    return Verified(jnp.where(out.accepted[:, None] == drafts.shape[1], sampled.ids, out.ids), out.accepted)


def _resample(logits, rows, positions, ids, accepted):
    """Puts a fresh draw from p after the accepted drafts."""
    p = jnp.take_along_axis(logits, accepted[:, None, None], axis=1)[:, 0]
    again = sample(p, rows, positions + 5000, full=False)
    return jnp.where(jnp.arange(ids.shape[1]) == accepted[:, None], again[:, None], ids)


def top2_verifier(logits, drafts, _q, _one_hot, _num_drafts, rows, positions, *, full):  # noqa: ARG001
    """Relaxed acceptance: any of the target's two likeliest tokens passes."""
    _, best = jax.lax.top_k(logits[:, :-1], 2)
    accepted = jnp.cumprod((best == drafts[..., None]).any(axis=2), axis=1).sum(axis=1)
    return Verified(_resample(logits, rows, positions, jnp.pad(drafts, ((0, 0), (0, 1))), accepted), accepted)


def recover_from_p_verifier(logits, drafts, q, one_hot, num_drafts, rows, positions, *, full):
    """The replacement is drawn from p instead of the residual."""
    out = verify(logits, drafts, q, one_hot, num_drafts, rows, positions, full=full)
    return Verified(_resample(logits, rows, positions, out.ids, out.accepted), out.accepted)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"drafter": greedy_drafter},  # a greedy draft with a full q in the ratio
        {"drafter": colder_drafter},
        {"verifier": argmax_verifier},
        {"verifier": top2_verifier},
        {"verifier": recover_from_p_verifier},
    ],
    ids=["greedy draft, full q", "q of another temperature", "argmax verification", "top-2 relaxed", "recover from p"],
)
def test_broken_samplers_are_caught(options):
    statistic, _ = first_token_chi2(k=3, **options)
    assert statistic > 2 * CHI2_999[7]


def test_shared_noise_is_caught(monkeypatch):
    """Recovery that reuses the draft's noise, as vLLM once did, fails the independence fixture."""
    shared = {Stream.RECOVER: Stream.DRAFT}
    monkeypatch.setattr(
        rejection, "noise_keys", lambda seeds, positions, streams: _shared_keys(seeds, positions, streams, shared)
    )
    compiled_cycle.clear_cache()
    try:
        with pytest.raises(AssertionError):
            test_draft_accept_and_recover_noise_are_independent()
    finally:
        monkeypatch.undo()
        compiled_cycle.clear_cache()


def _shared_keys(seeds, positions, streams, shared):
    for stream, source in shared.items():
        streams = jnp.where(streams == int(stream), int(source), streams)
    return noise_keys(seeds, positions, streams)


@pytest.mark.slow
def test_positions_past_the_drafts_are_not_searched(monkeypatch):
    """Neither what they keep nor, in seeded rows, a draw: nothing can be chosen there."""
    looked = {}

    def draw(logits, rows, temperature, keys, wanted, likely, residual, cuts):
        looked.update(wanted=wanted.reshape(4, 4), cuts=cuts.reshape(4, 4))
        return reference.gumbel_argmax(logits, rows, temperature, keys, wanted, likely, residual, cuts)

    monkeypatch.setattr(columns, "gumbel_argmax", draw)
    logits = np.random.default_rng(0).normal(size=(4, 4, V)).astype(np.float32)
    rows, held = sampling_rows(4, top_k=2, seeded=True), np.arange(4, dtype=np.int32)
    verify(logits, np.zeros((4, 3), np.int32), None, np.ones(4, bool), held, rows, np.full(4, 9, np.int32), full=True)
    live = np.arange(4) <= held[:, None]
    np.testing.assert_array_equal(looked["wanted"], live)
    np.testing.assert_array_equal(np.asarray(looked["cuts"]) > LEAST_KEY, live)
