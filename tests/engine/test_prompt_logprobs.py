"""Log-probabilities of prompts: in chunks, beside decoding rows, with speculation, from pages that others share."""

import numpy as np
import pytest

from jaxspec.compat import compiles
from jaxspec.engine.request import Request
from jaxspec.sampling.params import MAX_LOGPROBS, SamplingParams
from tests.engine.test_transforms import raw_logits
from tests.engine.tiny import VOCAB, make_engine
from tests.sampling.rules_reference import softmax

LENGTHS = (1, 2, 40, 64, 65, 130, 200)
SPECULATING = [0, pytest.param(3, marks=pytest.mark.slow)]


def collect(engine, requests):
    """By request id: the prompt's log-probabilities, as told once, the output ids and the reason of its end."""
    told, ids, ends = {}, {r.id: [] for r in requests}, {}
    engine.add(*requests)
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
            if out.prompt_logprobs is not None:
                assert out.request_id not in told
                told[out.request_id] = out.prompt_logprobs
            if out.finish_reason:
                ends[out.request_id] = out.finish_reason.value
    return told, ids, ends


def scored(name, prompt, **options):
    options = {"temperature": 0, "max_tokens": 0, "prompt_logprobs": 5, "ignore_eos": True} | options
    return Request(name, prompt, SamplingParams(**options))


def test_of_every_prompt_token():
    """Against logits of one pass over all tokens."""
    prompt = np.random.default_rng(0).integers(6, VOCAB, 60).tolist()
    told, ids, ends = collect(make_engine(), [scored("r", prompt, prompt_logprobs=MAX_LOGPROBS)])
    assert (ids["r"], ends["r"], len(told["r"])) == ([], "length", 59)
    for position in (1, 7, 30, 59):
        logits = raw_logits(prompt[:position]).astype(np.float64)
        want = np.log(softmax(logits))
        logprob, rank, alternatives = told["r"][position - 1]
        np.testing.assert_allclose(logprob, want[prompt[position]], atol=1e-4)
        assert rank == 1 + (logits > logits[prompt[position]]).sum()
        order = np.argsort(-logits)[:MAX_LOGPROBS]
        assert [i for i, _ in alternatives] == order.tolist()
        np.testing.assert_allclose([p for _, p in alternatives], want[order], atol=1e-4)


@pytest.mark.parametrize("k", SPECULATING)
@pytest.mark.parametrize("usable_pages", [None, 7])
def test_in_chunks_in_mixed_steps_and_in_company(k, usable_pages):
    """A text that one request has written is scored by another as it was written."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(6, VOCAB, n).tolist() for n in LENGTHS]
    engine = make_engine(usable_pages, k=k)
    writers = [Request(f"w{i}", p, SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, logprobs=3))
               for i, p in enumerate(prompts)]  # fmt: skip
    written, values = {w.id: [] for w in writers}, {w.id: [] for w in writers}
    engine.add(*writers)
    while engine.has_work:
        for out in engine.step():
            written[out.request_id] += out.new_ids
            values[out.request_id] += zip(out.new_logprobs, out.new_alternatives, strict=True)
    readers = [
        scored(f"r{i}", [*p, *written[f"w{i}"]], prompt_logprobs=(0, 3)[i % 2], max_tokens=(0, 20)[i % 3 > 0])
        for i, p in enumerate(prompts)
    ]
    others = [Request(f"o{i}", p, SamplingParams(max_tokens=20, temperature=0)) for i, p in enumerate(prompts)]
    before = compiles.total
    told, ids, _ = collect(engine, [each for pair in zip(others, readers, strict=True) for each in pair])
    assert compiles.total == before
    assert set(told) == {r.id for r in readers}
    for i, (prompt, reader) in enumerate(zip(prompts, readers, strict=True)):
        scores = told[reader.id]
        assert len(scores) == reader.prompt_len - 1
        assert len(ids[reader.id]) == reader.params.max_tokens
        for score, (logprob, alternatives) in zip(scores[len(prompt) - 1 :], values[f"w{i}"], strict=True):
            np.testing.assert_allclose(score.logprob, logprob, atol=2e-4)
            assert score.rank == 1
            if reader.params.prompt_logprobs:
                assert [j for j, _ in score.alternatives] == [j for j, _ in alternatives]
    if usable_pages:
        assert engine.stats().num_preemptions


def test_the_prefix_cache_is_not_asked_but_learns():
    """All of a scored prompt passes through steps; what it wrote serves others."""
    engine = make_engine()
    prompt = np.random.default_rng(2).integers(6, VOCAB, 200).tolist()
    first, _, _ = collect(engine, [scored("a", prompt)])
    again, _, _ = collect(engine, [scored("b", prompt)])
    assert first["a"] == again["b"]
    assert engine.stats().prefix_cache_hits == 0
    collect(engine, [Request("c", prompt, SamplingParams(max_tokens=1))])
    assert engine.stats().prefix_cache_hits >= 128


@pytest.mark.parametrize("k", SPECULATING)
def test_no_output_tokens(k):
    """Also where the prompt fills the context."""
    limit = make_engine(k=k).max_model_len
    prompts = [[7], list(range(6, 70)), [9] * limit]
    requests = [Request(f"r{i}", p, SamplingParams(max_tokens=0)) for i, p in enumerate(prompts)]
    engine = make_engine(k=k)
    told, ids, ends = collect(engine, requests)
    assert not told
    assert ids == {r.id: [] for r in requests}
    assert set(ends.values()) == {"length"}
    assert engine.stats().generation_tokens == 0
