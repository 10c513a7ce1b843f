"""Random requests through the whole engine: acceptance is exactly the overlap of target and draft, and what is said
follows the same distribution with speculation and without."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from convert.reference import read_record
from jaxspec.config import Lookup
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import TEMPERATURE
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.sampling.params import SamplingParams
from jaxspec.sampling.rejection import log_probability
from serve.demo import RECORD
from tests.caches import empty_cache, single_request
from tests.conftest import optimise_steps
from tests.engine.scripted import (
    engine_over,
    exchanged,
    numpy_params,
    one_device,
    target_params,
    tiny_config,
    warmed,
)
from tests.engine.tiny import SETTINGS, run

K = 3


# --- acceptance ---


def log_p_of_texts(runner, length):
    """Jitted: ids [length] -> the target's logits [length, V], in one pass over a cache of its own."""
    size = runner.settings.page_size
    pages = length // size
    model = nnx.merge(runner.graphdefs[0], runner.params[0])
    meta = single_request(0, length, pages=pages, page_size=size, prefill=True)

    @jax.jit
    def logits(ids):
        cache = tuple(empty_cache(spec, pages + 1, size) for spec in model.cache_specs())
        return model.logits(model(ids, cache, meta).hidden)

    return logits


def q_of_slots(state):
    """What each slot's drafts were drawn from, of slots that sample: log-probabilities [S, k, V]."""
    temperature_S = state.params_f[:, TEMPERATURE]
    temperature_S = jnp.where(temperature_S == 0, 1, temperature_S)
    return log_probability(state.draft_logits, temperature_S[:, None, None], state.draft_log_z[..., None])


def logged_windows(engine, batch):
    """Of every verified window: (request, text length before it, accepted drafts, log q [k, V])."""
    windows, log_q, mine = [], None, {request.id for request in batch}

    def look(step):
        for request, accepted in zip(step.plan.decode, step.accepted[len(step.plan.prefill) :], strict=True):
            if request.id not in mine:  # of an earlier test: it ended when its last step was not read yet
                continue
            windows.append((request, len(request.tokens), int(accepted), log_q[request.slot].copy()))

    former, engine.observer = engine.observer, look
    try:
        for request in batch:
            engine.add(request)
        while engine.has_work:
            log_q = np.asarray(q_of_slots(engine.runner.state))  # what the coming step's drafts were drawn from
            engine.step()
    finally:
        engine.observer = former
    return windows


LENGTH = 192


@pytest.fixture(scope="module")
def demo_logits(demo_llm):
    return log_p_of_texts(demo_llm.engine.runner, LENGTH)


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_acceptance_is_exactly_the_overlap(temperature, demo_llm, demo_logits):
    """Position by position among the windows that came so far, on the demo model with its MTP layer.

    Too few acceptances would waste the draft, too many would be lossy. All contexts of reached positions are prefixes
    of the final text, so one pass over each text gives every p.
    """
    length = LENGTH
    batch = [
        Request(
            f"{temperature}-{i}", r.prompt_ids,
            SamplingParams(max_tokens=length - len(r.prompt_ids), temperature=temperature, ignore_eos=True),
        )
        for i, r in enumerate(read_record(RECORD))
    ]  # fmt: skip
    windows = logged_windows(demo_llm.engine, batch)
    logits = {r.id: np.asarray(demo_logits(jnp.asarray(r.tokens, jnp.int32))) for r in batch}
    got, expected, variance, reached = (np.zeros(K) for _ in range(4))
    for request, known, accepted, log_q in windows:
        for i in range(min(accepted + 1, K)):
            if known + i >= length:  # cut off: the text does not say what stood there
                break
            scaled = logits[request.id][known + i - 1].astype(np.float64) / temperature
            p = np.exp(scaled - np.logaddexp.reduce(scaled))
            overlap = np.minimum(p, np.exp(log_q[i].astype(np.float64))).sum()
            expected[i] += overlap
            variance[i] += overlap * (1 - overlap)
            got[i] += accepted > i
            reached[i] += 1
    assert len(windows) > 600
    assert (np.abs(got - expected) < 3 * np.sqrt(variance)).all(), (got, expected, np.sqrt(variance))
    # The bound is tight enough to tell a sampler that ignores q, or one that accepts a twentieth more.
    assert (3 * np.sqrt(variance) < 0.1 * reached).all()


# --- whole sequences ---

PROMPT = [17, 42, 99]
TEMPERATURES = (0.5, 1.0, 1.5)


def peaked(runner):
    """Parameters of a target that mostly looks at its last token, and of a draft that sees that one less clearly."""
    H, rng = 32, np.random.default_rng(7)
    target, draft = (None if s is None else jax.tree.map(np.asarray, nnx.to_pure_dict(s)) for s in runner.params)
    head = rng.standard_normal(target["head"]["weight"].shape) * 3 / H**0.5
    out = {"target": {"head": {"weight": head}, "layers": {i: quiet(layer) for i, layer in target["layers"].items()}}}
    if draft is not None:
        noise = 0.15 * rng.standard_normal((H, 2 * H)) / H**0.5
        out["draft"] = {
            "enorm": {"weight": np.ones(H)}, "norm": target["norm"], "eh_proj": np.eye(H, 2 * H) + noise,
            "layer": quiet(draft["layer"]),
        }  # fmt: skip
    return out


def quiet(block):
    """What a block adds to the residual stream, made smaller."""
    mlp = {"down": 0.2 * block["mlp"]["down"]}
    if "shared" in block["mlp"]:
        mlp["shared"] = {"down": 0.2 * block["mlp"]["shared"]["down"]}
    return {"attention": {"o": 0.2 * block["attention"]["o"]}, "mlp": mlp}


# Of a text whose first token comes from the prompt's step: pairs, and the tokens at each position of a window.
VIEWS = (slice(1, 3), slice(1, 2), slice(2, 3), slice(3, 4))


def wide_runner(k, lookup=None):
    """The engine tests' tiny model with one bucket of many rows, so that thousands of requests take few steps."""
    rows, mesh = 32, one_device()
    bucket = Bucket(len(PROMPT) * rows // 2, rows // 2, rows, "lean", k)
    settings = dataclasses.replace(
        SETTINGS, num_speculative_tokens=k, max_num_seqs=rows, max_model_len=SETTINGS.page_size, num_pages=rows + 2,
        max_num_batched_tokens=bucket.tokens, lookup=lookup,
    )  # fmt: skip
    model, draft = (kind(tiny_config("tiny"), jnp.float32) for kind in (CausalLM, NextN))
    drafting = (draft, numpy_params(draft, 4)) if k else None
    with pytest.MonkeyPatch.context() as patch:
        optimise_steps(patch)
        return warmed(Runner(model, target_params("tiny"), settings, mesh, draft=drafting, buckets=(bucket,)))


def generated(k, seed, count, lookup=None):
    """Texts by temperature, and the accepted drafts of a window. Requests without seeds, on an engine with one."""
    runner = wide_runner(k, lookup)
    with exchanged(runner, **peaked(runner)):
        engine = engine_over(runner, seed=seed)
        batch = [
            Request(f"{t}-{i}", PROMPT, SamplingParams(max_tokens=4, temperature=t, ignore_eos=True))
            for i in range(count)
            for t in TEMPERATURES
        ]
        ids, _, _ = run(engine, batch)
        acceptance = engine.stats().acceptance
    texts = {t: [ids[r.id] for r in batch if r.params.temperature == t] for t in TEMPERATURES}
    return texts, (acceptance.mean_length or 1) - 1 if acceptance else 0


def two_sample(ours, theirs, view):
    """Chi-square of two equally large sets of texts, rare categories pooled, and a bound beyond its 0.999 quantile."""
    a, b = (collections.Counter(tuple(text[view]) for text in texts) for texts in (ours, theirs))
    pairs = [(a[key], b[key]) for key in a | b if a[key] + b[key] >= 12]
    pairs.append((a.total() - sum(x for x, _ in pairs), b.total() - sum(y for _, y in pairs)))
    df = len(pairs) - 1
    return sum((x - y) ** 2 / max(x + y, 1) for x, y in pairs), df + 3.3 * (2 * df) ** 0.5 + 8


@pytest.mark.parametrize(
    ("count", "lookup"),
    [
        pytest.param(1200, None, marks=pytest.mark.long),
        pytest.param(5000, None, marks=pytest.mark.full),
        # A row takes what is found in its text, with no q, or the layer's drafts with theirs.
        pytest.param(2500, Lookup(1, 2, beside_model=True), marks=pytest.mark.full),
    ],
)
def test_texts_follow_the_same_distribution_with_and_without(count, lookup):
    """Other seeds on the two sides, so that equal noise cannot stand in for equal distributions."""
    plain, _ = generated(0, 0, count)
    speculated, accepted = generated(K, 1, count, lookup)
    assert 0.5 < accepted < K - 0.5  # both acceptance and rejection had their part
    for temperature in TEMPERATURES:
        for view in VIEWS:
            statistic, bound = two_sample(plain[temperature], speculated[temperature], view)
            assert statistic < bound, (temperature, view)
    # The test of the test: another temperature is seen in every view.
    for view in VIEWS:
        statistic, bound = two_sample(plain[1.0], speculated[1.5], view)
        assert statistic > bound, view
