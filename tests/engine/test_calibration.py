"""What steps cost: kept from start to start, and measured without a request or a start that waits for it."""

import dataclasses
import threading
import time
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.compile_cache import FileStore, open_store
from jaxspec.engine import calibration
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.calibration import Calibration, numbers_of_rows
from jaxspec.engine.costs import StepCosts
from jaxspec.engine.engine import Engine
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.models.decoder import CausalLM
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import one_device, target_params, tiny_config, tiny_draft, warmed
from tests.engine.tiny import SETTINGS, VOCAB, run

# The first is prepared late.
BUCKETS = (
    Bucket(0, 0, 2, "lean"), Bucket(0, 0, 4, "lean"), Bucket(64, 4, 8, "lean"), Bucket(64, 4, 8, "lean", 1),
)  # fmt: skip


def make_runner() -> Runner:
    settings = dataclasses.replace(SETTINGS, on_gpu=True, num_speculative_tokens=1, adaptive_drafts=True)
    return Runner(
        CausalLM(tiny_config("tiny"), jnp.float32), target_params("tiny"), settings, one_device(),
        draft=tiny_draft("nextn"), buckets=BUCKETS, files=open_store(None),
    )  # fmt: skip


TOKEN_SECONDS = {0: 1e-6, 1: 3e-6}
# Of each number of drafts the step that contexts are measured in.
WIDEST = [(BUCKETS[1], 4), (BUCKETS[3], 8)]


def seconds_of(bucket: Bucket, rows: int) -> float:
    """As if measured: different for each bucket and number of rows."""
    return 1e-3 * (1 + bucket.tokens / 64 + rows / 7 + bucket.drafts / 3)


@pytest.fixture
def measured(monkeypatch):
    """The buckets and rows that are measured, in order. They run; their times are those of `seconds_of`, longer contexts a
    little more.
    """
    really, out = calibration.step_seconds, []

    def measure(runner, cases, busy, vocab_size):
        assert min(really(runner, cases, busy, vocab_size).values()) > 0
        context = busy["seq_len"].max()
        if context == calibration.CONTEXT:
            out.extend(cases)
        else:
            assert cases in [[case] for case in WIDEST]
            assert context == SETTINGS.max_model_len // 2
        further = context - calibration.CONTEXT
        return {
            (b, rows): seconds_of(b, rows)
            + TOKEN_SECONDS[b.drafts] * calibration.busy_counts(b, rows, runner.settings)[-1] * further
            for b, rows in cases
        }

    monkeypatch.setattr(calibration, "step_seconds", measure)
    return out


def all_costs(costs: StepCosts) -> list[float | None]:
    return [costs.seconds(rows, k) for rows in range(1, 10) for k in (0, 1)]


def every_pair(buckets) -> list[tuple[Bucket, int]]:
    return [(bucket, rows) for bucket in buckets for rows in numbers_of_rows(bucket)]


def costs_of(buckets) -> list[float | None]:
    return all_costs(StepCosts({pair: seconds_of(*pair) for pair in every_pair(buckets)}))


def test_what_a_step_costs_is_without_the_wait_for_it_and_without_slow_moments(monkeypatch):
    """Of each case another round is slow, in its few or its many steps; a wait takes as long as some steps."""
    cases = [(bucket, rows) for bucket in BUCKETS for rows in numbers_of_rows(bucket)]
    rounds = dict.fromkeys(cases, 0)

    def times(_runner, bucket, rows, _vocab_size):
        case, wait = (bucket, rows), 2.5e-3
        slow = rounds[case] == cases.index(case) % calibration.ROUNDS
        rounds[case] += 1
        numbers = calibration.PROMPT_STEPS if bucket.prefill_tokens else calibration.STEPS
        few, many = (wait + number * seconds_of(bucket, rows) for number in numbers)
        return [few + 1e-2 * slow * (rows % 2), many + 1e-2 * slow * (1 - rows % 2)]

    monkeypatch.setattr(calibration, "seconds_of_steps", times)
    runner = SimpleNamespace(put=lambda **_: None)
    got = calibration.step_seconds(runner, cases, {}, VOCAB)
    assert list(got) == cases
    assert got == pytest.approx({case: seconds_of(*case) for case in cases})
    assert set(rounds.values()) == {calibration.ROUNDS}


@pytest.mark.long
def test_a_second_start_measures_nothing(tmp_path, measured, monkeypatch):
    runner = warmed(make_runner())
    pages = [range(1, runner.settings.num_pages)]
    tmp_path.chmod(0o700)
    monkeypatch.setattr(runner, "store", ExecutableStore(FileStore(tmp_path), one_device()))
    first = Calibration(runner, VOCAB)
    # In two goes, the first of which leaves a bucket half known, which is then as good as unknown.
    assert all_costs(first.measure(pages, most=1)) == all_costs(StepCosts({}))
    assert Calibration(runner, VOCAB).unknown == every_pair(BUCKETS)
    costs = first.measure(pages)
    one, *rest = every_pair(BUCKETS)
    assert measured == [one, *WIDEST, *rest]  # with what contexts cost, the widest come once more
    second = Calibration(runner, VOCAB)
    assert not second.unknown
    again = second.measure(pages)
    assert all_costs(again) == all_costs(costs) == costs_of(BUCKETS)
    for each in (costs, again):
        for k, seconds in TOKEN_SECONDS.items():
            longer = each.seconds(4, k, tokens=4 * (calibration.CONTEXT + 100)) - each.seconds(4, k, tokens=9)
            assert longer == pytest.approx(400 * seconds)
    assert runner.bucket_seconds == {b: seconds_of(b, b.decode_rows) for b in BUCKETS}
    assert measured == [one, *WIDEST, *rest]

    # Damaged, no record, of other rows, and impossible: each is measured again.
    damaged, *others = BUCKETS
    path = tmp_path / runner.compiler.key("costs", damaged)
    path.write_bytes(path.read_bytes()[:-1])
    for bucket, data in zip(others, (b"[4]", b'{"4": 0.5}', b'{"8": -1.0}'), strict=True):
        FileStore(tmp_path).write(runner.compiler.key("costs", bucket), data)
    assert Calibration(runner, VOCAB).unknown == every_pair(BUCKETS)


@pytest.mark.long
def test_a_start_waits_for_the_first_buckets_only(measured, monkeypatch):
    """The others are measured when they are there and nothing runs; then all is known that a start that waits knows."""
    runner = make_runner()
    monkeypatch.setattr(runner.store, "load_record", lambda *_: None)
    monkeypatch.setattr(runner.store, "save_record", lambda *_: None)
    engine, may_come, (late, *first) = Engine(runner, vocab_size=VOCAB), threading.Event(), BUCKETS
    load, loaded = runner.store.load, []

    def load_late(key):
        if key == runner.compiler.key("step", late):
            assert may_come.wait(60)
            loaded.append(key)
        return load(key)

    monkeypatch.setattr(runner.store, "load", load_late)

    def text(name):
        params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        ids, logprobs, _ = run(engine, [Request(name, list(range(6, 136)), params)])
        return ids[name], logprobs[name]

    engine.warm_up(wait_for_all=False)
    try:
        assert not loaded
        assert measured == every_pair(first) + WIDEST
        assert all_costs(engine.control.costs) == costs_of(first)
        before = text("before")
        assert engine.prepare()  # it has yet to come
        assert measured == every_pair(first) + WIDEST
    finally:
        may_come.set()
    numbers, deadline = [], time.monotonic() + 60
    while engine.prepare() and time.monotonic() < deadline:
        numbers.append(len(measured))
        time.sleep(0.01)
    assert set(np.diff([*numbers, len(measured)])) <= {0, 1}  # one number of rows at a time
    assert sorted(measured) == sorted(every_pair(BUCKETS) + WIDEST)
    assert all_costs(engine.control.costs) == costs_of(BUCKETS)
    # What an earlier request left in the prefix cache is as it was.
    ids, logprobs = text("after")
    assert engine.stats().prefix_cache_hits == 128
    assert ids == before[0]
    np.testing.assert_allclose(logprobs, before[1], atol=1e-4)
    assert compiles.after_warmup == 0
