"""Every sampling transform inside the real step, with and without speculation, alone and in company."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxspec.compat import compiles
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.forward import apply_updates, lay_out
from jaxspec.engine.plan import PrefillRow, StepPlan
from jaxspec.engine.request import Request, RequestState
from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.params import SamplingParams
from pallas_kernels.logit_rules import api as logit_rules
from tests.engine.test_engine import assert_equal_runs
from tests.engine.tiny import EOS, VOCAB, cached, make_engine, run, tiny_runner
from tests.sampling.rules_reference import adjusted

K = 3
SPECULATING = [0, pytest.param(K, marks=pytest.mark.slow)]
OTHER_K = [pytest.param(k, marks=pytest.mark.full) for k in (1, 2, 4, 7)]
ALL = {
    "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.3, "min_tokens": 30,
    "logit_bias": {EOS: 100.0, 8: 2.0, 9: -100.0, 77: 1.5},
}  # fmt: skip
TRANSFORMS = {
    "presence": {"presence_penalty": 1.5},
    "negative presence": {"presence_penalty": -2.0},
    "frequency": {"frequency_penalty": 0.8},
    "repetition": {"repetition_penalty": 1.8},
    "repetition under one": {"repetition_penalty": 0.6},
    "bias": {"logit_bias": dict.fromkeys(range(20, 30), 3.0)},
    "min_tokens": {"min_tokens": 30, "logit_bias": {EOS: 100.0}},
    "all": ALL,
}
PROMPT = np.random.default_rng(5).integers(6, VOCAB, 20).tolist()


def greedy_requests():
    """One of each transform and a plain one; one prompt, so that differences are theirs."""
    for name, options in {"plain": {}, **TRANSFORMS}.items():
        eos = {"ignore_eos": "min_tokens" not in options}
        yield Request(name, PROMPT, SamplingParams(max_tokens=40, temperature=0, **eos, **options))


def mixed_requests(**more):
    """Greedy and random rows with every transform, several chunks long or short."""
    rng = np.random.default_rng(2)
    lengths = (3, 70, 64, 100, 10, 33, 129, 1, 65, 7)
    options = [*TRANSFORMS.values(), {"min_p": 0.2, "top_k": 40}, {"logprobs": 5, "top_p": 0.9} | ALL]
    for i, (length, each) in enumerate(zip(lengths, options, strict=True)):
        params = SamplingParams(max_tokens=60, temperature=(0.9, 0.0, 1.3)[i % 3], seed=i, **each, **more)
        yield Request(f"m{i}", rng.integers(6, VOCAB, length).tolist(), params)


@cached
def greedy_texts():
    return run(make_engine(), list(greedy_requests()))


@cached
def mixed_solo():
    """Each alone, without speculation. All bring a seed, so no draft may change their texts."""
    ids, logprobs = {}, {}
    for request in mixed_requests():
        one_ids, one_logprobs, _ = run(make_engine(), [request])
        ids |= one_ids
        logprobs |= one_logprobs
    return ids, logprobs


def plant(engine, requests, draft_of) -> None:
    """Overwrites the drafts of every decoding request: a random draft model is almost never right by itself.

    draft_of: (request, number of the output token) -> id.
    """
    state = engine.runner.state
    drafts = np.array(state.drafts)
    for request in requests:
        if request.state is RequestState.DECODE:
            drafts[request.slot] = [draft_of(request, request.num_output + i) for i in range(drafts.shape[1])]
            request.drafts = tuple(drafts[request.slot].tolist())
    engine.runner.state = state._replace(drafts=jax.device_put(jnp.array(drafts), state.drafts.sharding))


class Planter:
    """Overwrites the drafts of every step right after it is dispatched, and what the host reads of them.

    For as long as it is entered. `draft_of`: as in `plant`.
    """

    def __init__(self, engine, draft_of):
        self.engine, self.draft_of = engine, draft_of
        self._planted: collections.deque[np.ndarray] = collections.deque()

    def __enter__(self):
        runner = self.engine.runner
        dispatch, choose = runner.dispatch, runner.choose

        def dispatched(plan):
            dispatch(plan)
            if not plan.split:
                self._plant(plan)

        def chosen():
            plan = runner.begun
            choose()
            self._plant(plan)

        def read(step):
            step.drafts[:] = self._planted.popleft()

        runner.dispatch, runner.choose, self.engine.observer = dispatched, chosen, read
        return self

    def __exit__(self, *_):
        del self.engine.runner.dispatch, self.engine.runner.choose

    def _plant(self, plan):
        state = self.engine.runner.state
        drafts, lengths = np.array(state.drafts), np.array(state.seq_len)
        for request in (*(row.request for row in plan.prefill if row.final), *plan.decode):
            first = lengths[request.slot] + 1 - request.prompt_len
            drafts[request.slot] = [self.draft_of(request, first + i) for i in range(drafts.shape[1])]
        self._planted.append(drafts[[request.slot for request in plan.requests]])
        self.engine.runner.state = state._replace(drafts=jax.device_put(jnp.array(drafts), state.drafts.sharding))


def run_planted(engine, requests, draft_of):
    """As `run`, with planted drafts; also the number of tokens of each step that gave any, by request id."""
    ids, logprobs, counts = ({r.id: [] for r in requests} for _ in range(3))
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
            logprobs[out.request_id] += out.new_logprobs
            if out.new_ids:  # not where it reports only that its prompt has begun
                counts[out.request_id].append(len(out.new_ids))
        plant(engine, requests, draft_of)
    return ids, logprobs, counts


def raw_logits(tokens):
    """Logits [V] after tokens (at most 64), by one forward pass over all of them."""
    runner = tiny_runner()
    request = Request("oracle", tokens, SamplingParams())
    request.slot = 1
    plan = StepPlan((PrefillRow(request, 0, len(tokens), True),), (), ((1, 0, 1),))
    flat = InputLayout(Bucket(64, 1, 1, "full"), runner.settings.page_size, runner.settings.max_pages).pack(plan)
    return np.asarray(_forward(runner.params[0], runner.state, flat))[len(tokens) - 1]


@jax.jit
def _forward(params, state, flat):
    runner = tiny_runner()
    inputs = InputLayout(Bucket(64, 1, 1, "full"), runner.settings.page_size, runner.settings.max_pages).split(flat)
    state = apply_updates(state, inputs, full=True)
    ids, meta = lay_out(state, inputs, runner.settings, 1)
    target = nnx.merge(runner.graphdefs[0], params)
    return target.logits(target(ids, state.kv, meta, capture=()).hidden)


@pytest.mark.slow
def test_greedy_texts_are_those_of_a_plain_loop():
    """Recomputes every token from the whole text, with NumPy's transforms."""
    ids, _, _ = greedy_texts()
    for request in greedy_requests():
        stop_ids = [] if request.params.ignore_eos else [EOS]
        output: list[int] = []
        while len(output) < 40 and (not output or output[-1] not in stop_ids):
            logits = raw_logits([*PROMPT, *output])
            output.append(int(adjusted(logits, PROMPT, output, request.params, stop_ids).argmax()))
        assert ids[request.id] == output, request.id
        assert (request.id == "plain") == (ids[request.id] == ids["plain"]), "a transform that changes nothing"
    assert ids["min_tokens"][30:] == ids["all"][30:] == [EOS]


@pytest.mark.slow
@pytest.mark.parametrize("k", [K, *OTHER_K])
@pytest.mark.parametrize("planted", ["right", "mixed", "wrong", "own"])
def test_greedy_texts_with_speculation(k, planted):
    """Drafts that are all right, right or wrong at random, all wrong, or the draft model's own."""
    texts = greedy_texts()
    rng = np.random.default_rng(0)
    rate = {"right": 1.0, "mixed": 0.7, "wrong": 0.0}.get(planted)

    def draft_of(request, index):
        text = texts[0][request.id]
        right = text[index] if index < len(text) else EOS
        return right if rng.random() < rate else (right + 1) % VOCAB

    engine = make_engine(k=k)
    requests = list(greedy_requests())
    got = run(engine, requests) if rate is None else run_planted(engine, requests, draft_of)
    assert_equal_runs(got[:2], texts[:2])
    accepted = engine.stats().acceptance.accepted_per_position
    if planted in ("right", "mixed"):
        assert min(accepted) > 0
    if planted == "right":
        assert engine.stats().acceptance.num_steps < sum(map(len, texts[0].values())) / (k + 1) + 2 * len(requests)
    if planted == "wrong":
        assert max(accepted) == 0


@pytest.mark.parametrize("k", [*SPECULATING, *OTHER_K])
def test_requests_see_neither_their_batch_nor_drafts(k):
    engine = make_engine(k=k)
    before = compiles.total
    assert_equal_runs(run(engine, list(mixed_requests())), mixed_solo())
    assert compiles.total == before


@pytest.mark.parametrize("k", [pytest.param(0, marks=pytest.mark.slow), pytest.param(K, marks=pytest.mark.long)])
def test_rows_with_rules_may_have_an_array_of_their_own(k, monkeypatch, tmp_path):
    """As the kernel of rules leaves them: in that array other rows are nothing, here NaN. Rows of prompts and windows alike."""
    whole = logit_rules.adjust

    def apart(logits, drafts, rules, positions, wanted, **options):
        ruled, _ = whole(logits, drafts, rules, positions, wanted, **options)
        return jnp.where(wanted[..., None], ruled, jnp.nan), False

    monkeypatch.setattr(logit_rules, "adjust", apart)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))  # what is compiled now is kept for nobody
    engine = Engine(tiny_runner.__wrapped__(k), vocab_size=VOCAB, eos_token_ids=(EOS,))
    assert_equal_runs(run(engine, list(mixed_requests())), mixed_solo())


@pytest.mark.parametrize("k", SPECULATING)
def test_preemption_rebuilds_the_counts(k):
    engine = make_engine(usable_pages=8, k=k)
    assert_equal_runs(run(engine, list(mixed_requests())), mixed_solo())
    assert engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize("k", [K, *OTHER_K])
@pytest.mark.parametrize("draft", ["the text", "always the end"])
def test_min_tokens_at_each_position_of_the_window(k, draft):
    """The end is forced as soon as it may come; drafts propose it there, and before its time."""

    def draft_of(request, index):
        early = draft == "the text" and index < request.params.min_tokens
        return plain[request.id][index] if early else EOS

    def requests():
        for m in range(2 * k + 3):
            for stop, options in ((EOS, {}), (99, {"ignore_eos": True, "stop_token_ids": (99,)})):
                params = SamplingParams(
                    max_tokens=30, min_tokens=m, temperature=0, logit_bias={stop: 100.0, 104 - stop: -100.0}, **options
                )
                yield Request(f"{stop} after {m}", PROMPT, params)

    plain, _, ends = run(make_engine(), list(requests()))
    for request in requests():
        stop, m = map(int, request.id.split(" after "))
        assert len(plain[request.id]) == m + 1
        assert plain[request.id][-1] == stop
        assert ends[request.id][0] == "stop"
        assert plain[request.id].index(stop) == m
    got, _, _ = run_planted(make_engine(k=k), list(requests()), draft_of)
    assert got == plain


@pytest.mark.slow
def test_alternatives_with_speculation():
    """The likeliest ids of the raw distribution: with speculation those of plain decoding, cut as the ids are."""

    def requests():
        for i, count in enumerate((0, 1, 5, 20)):
            params = SamplingParams(
                max_tokens=30, temperature=0, logprobs=count, ignore_eos=True, frequency_penalty=1.0
            )
            yield Request(f"t{i}", PROMPT[i:], params)

    def tops_of(engine, planted=None):
        batch, tops, ids = list(requests()), {}, {}
        for request in batch:
            engine.add(request)
        while engine.has_work:
            for out in engine.step():
                wanted = len(out.new_ids) if out.request_id != "t0" else 0
                assert len(out.new_alternatives) == wanted
                pairs = zip(out.new_ids, out.new_logprobs, strict=True)
                ids.setdefault(out.request_id, []).extend(pairs)
                tops.setdefault(out.request_id, []).extend(out.new_alternatives)
            if planted:
                plant(engine, batch, lambda r, i: planted[r.id][i][0] if i < 30 else EOS)
        return tops, ids

    want, ids = tops_of(make_engine())
    got, again = tops_of(make_engine(k=K), planted=ids)
    assert {key: [t for t, _ in pairs] for key, pairs in ids.items()} == {
        key: [t for t, _ in pairs] for key, pairs in again.items()
    }
    held = 0
    for i, count in enumerate((1, 5, 20), 1):
        for at, (one, other) in enumerate(zip(want[f"t{i}"], got[f"t{i}"], strict=True)):
            assert len(one) == count
            assert [t for t, _ in one] == [t for t, _ in other]
            np.testing.assert_allclose([p for _, p in one], [p for _, p in other], atol=1e-4)
            assert [p for _, p in one] == sorted((p for _, p in one), reverse=True)
            token, logprob = ids[f"t{i}"][at]
            if token in dict(one):
                held += 1
                assert dict(one)[token] == pytest.approx(logprob, abs=1e-5)
    assert 0 < held < 90


@pytest.mark.long
def test_gated_rows_are_as_alone_and_are_counted():
    """Speculating or not, with drafts sampled or greedy: each row is what it is alone, and the counters add up."""

    def requests():
        rng = np.random.default_rng(3)
        for i, number in enumerate((None, 0, 1, 2, 9) * 2):
            params = SamplingParams(
                max_tokens=50,
                temperature=(0.0, 0.8, 1.0)[i % 3],
                seed=None if i % 4 else i,
                ignore_eos=True,
                num_speculative_tokens=number,
                greedy_drafts=i >= 5,
                repetition_penalty=(1.0, 1.2)[i % 2],
            )
            yield Request(f"s{i}", rng.integers(6, VOCAB, 8 + i).tolist(), params)

    solo_ids, solo_logprobs, totals = {}, {}, np.zeros(3 + K, int)

    def counters(engine):
        total = engine.stats().acceptance
        return [total.num_steps, total.num_drafted, total.num_accepted, *total.accepted_per_position]

    alone = make_engine(k=K)  # one engine, which draws the same seeds as for all at once
    for request in requests():
        alone.reset_prefix_cache()
        before = counters(alone)
        ids, logprobs, _ = run(alone, [request])
        solo_ids |= ids
        solo_logprobs |= logprobs
        number = request.params.num_speculative_tokens
        number = K if number is None else min(number, K)
        counts = np.array(counters(alone)) - before
        windows, drafted, accepted, *by_position = counts.tolist()
        assert (windows > 0) == (number > 0)
        assert drafted == number * windows
        assert sum(by_position) == accepted <= drafted
        assert sum(by_position[number:]) == 0
        assert not number or windows + accepted >= 49
        totals += counts
    engine = make_engine(k=K)
    assert_equal_runs(run(engine, list(requests())), (solo_ids, solo_logprobs))
    np.testing.assert_array_equal(counters(engine), totals)


@pytest.mark.slow
def test_no_more_drafts_are_accepted_than_count():
    """With right drafts, a window gives exactly one token more than the request lets it draft."""
    texts = greedy_texts()[0]

    def requests():
        for number in range(K + 1):
            for name in ("plain", "repetition"):
                options = TRANSFORMS.get(name, {})
                params = SamplingParams(
                    max_tokens=40, temperature=0, ignore_eos=True, num_speculative_tokens=number, **options
                )
                yield Request(f"{name} {number}", PROMPT, params)

    def draft_of(request, index):
        text = texts[request.id.split()[0]]
        return text[index] if index < 40 else EOS

    ids, _, counts = run_planted(make_engine(k=K), list(requests()), draft_of)
    for request in requests():
        name, number = request.id.split()
        assert ids[request.id] == texts[name]
        first, *middle, _ = counts[request.id]
        assert first == 1
        # The first window after a prompt was dispatched with the model's own drafts.
        assert set(middle[1:]) == {int(number) + 1}


@pytest.mark.parametrize("k", SPECULATING)
def test_a_bias_forces_and_forbids(k):
    """Random rows too: +100 is always drawn, -100 never."""
    forced = [
        Request(f"f{i}", PROMPT, SamplingParams(temperature=1.5, logit_bias={100 + i: 100.0}, seed=i)) for i in range(4)
    ]
    forbidden = Request(
        "never",
        PROMPT,
        SamplingParams(max_tokens=60, temperature=2.0, logit_bias=dict.fromkeys(range(140), -100), seed=1),
    )
    ids, _, _ = run(make_engine(k=k), [*forced, forbidden])
    assert all(ids[f"f{i}"] == [100 + i] * 16 for i in range(4))
    assert min(ids["never"]) >= 140


def test_ids_outside_the_vocabulary_are_refused():
    for token in (-1, VOCAB):
        with pytest.raises(InvalidRequestError, match="logit_bias") as error:
            make_engine().add(Request("r", PROMPT, SamplingParams(logit_bias={token: 1.0})))
        assert error.value.param == "logit_bias"


@pytest.mark.long
def test_huge_numbers_do_not_reach_the_device():
    params = SamplingParams(
        max_tokens=None, top_k=2**40, min_tokens=2**40, num_speculative_tokens=2**40, ignore_eos=True
    )
    ids, _, ends = run(make_engine(), [Request("r", PROMPT, params)])
    assert ends["r"] == ("length", None)
    assert len(ids["r"]) == 512 - len(PROMPT)


def poison_rules(runner) -> None:
    """What former requests may have left in the slots."""
    state = runner.state
    runner.state = state._replace(
        counts=jnp.full_like(state.counts, 2**31 - 1),
        bias_ids=jnp.full_like(state.bias_ids, 7),
        bias_values=jnp.full_like(state.bias_values, np.nan),
    )


def test_what_slots_held_before_does_not_matter():
    poison_rules(tiny_runner())
    assert_equal_runs(run(make_engine(), list(mixed_requests())), mixed_solo())


@pytest.mark.long
def test_lean_and_full_buckets_share_slots(monkeypatch):
    """Lean buckets leave counts and biases as they are; their requests move to full ones and back, to the same text."""

    def table(settings):
        shapes = ((0, 0, settings.max_num_seqs), (64, 4, settings.max_num_seqs))
        return tuple(Bucket(*shape, variant) for shape in shapes for variant in ("lean", "full"))

    shared = tiny_runner()
    monkeypatch.setattr("jaxspec.engine.runner.bucket_table", table)
    make_runner = tiny_runner.__wrapped__
    runner = make_runner(0)
    poison_rules(runner)
    used = []
    engine = Engine(
        runner, vocab_size=VOCAB, eos_token_ids=(EOS,), observer=lambda step: used.append(step.plan.needs_full)
    )
    lean = [
        Request(f"l{i}", [*PROMPT, i], SamplingParams(max_tokens=60, temperature=i % 2, seed=i, ignore_eos=True))
        for i in range(20)
    ]
    batch = [*lean[:10], *mixed_requests(), *lean[10:]]
    got = run(engine, batch)
    assert set(used) == {True, False}
    assert shared is tiny_runner()
    alone = run(make_engine(), [Request(r.id, r.prompt_ids, r.params) for r in lean])
    want = mixed_solo()
    assert_equal_runs(got, (want[0] | alone[0], want[1] | alone[1]))
