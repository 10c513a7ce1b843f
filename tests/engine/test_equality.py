"""Speculation says what plain decoding says, for every kind of target, at every k and in every layout of a batch."""

import numpy as np
import pytest

from tests.engine import scripted
from tests.engine.scripted import (
    NEW_TOKENS,
    Windows,
    eagle3_runner,
    engine_over,
    exchanged,
    greedy_requests,
    pattern_runner,
    plain_run,
    tiny_config,
    with_pattern,
)
from tests.engine.test_engine import assert_equal_runs
from tests.engine.tiny import run, tiny_runner

VARIANTS = (
    "v2-lite", "v2", "v2-grouped", "v3", "v3-yarn", "moonlight", "glm4-lite", "minicpm3", "llama", "llama3-rope", "qwen3",
    "qwen3-tied", "qwen3-moe", "glm4-moe", "minimax-m2", "gpt-oss", "qwen3.5", "qwen3.5-moe", "glm-dsa",
    "qwen3-next", "kimi-linear",
)  # fmt: skip
KS = (1, 2, 3, 4, 7)
# Each kind of attention and of mixture, with all layouts each; every pair of variant and k is in the full matrix. k = 3 is
# in test_speculation.py, and test_recurrent_states.py has recurrent layers.
COVERING = (
    ("v2-grouped", 7),
    ("glm-dsa", 2),
    ("llama", 4),
    ("gpt-oss", 1),
)
# Sliding windows with sinks, a mixture beside grouped-query attention, states that no page holds, and pages of index keys.
# test_speculation.py retracts MLA's requests.
RETRACTED = ("gpt-oss", "qwen3-moe", "qwen3.5", "glm-dsa", "kimi-linear")
# Pages for about half of what the requests want at once, and for less: which windows are accepted decides whether one has
# to be retracted.
FEW_PAGES = (9, 6, 4)


def layouts(variant):
    """(requests that run together, what fills the pool): alone, all eight, five of eight rows over NaN."""
    every = lambda: greedy_requests(tiny_config(variant).vocab_size)  # noqa: E731
    return {
        "alone": [([request], 0.0) for request in every()[1:4:2]],
        "batch": [(every(), 0.0)],
        "padded": [(every()[3:], np.nan)],
    }


def check_layouts(variant, k, *, every_bucket=False):
    ids, logprobs, texts = plain_run(variant)
    runner = pattern_runner(k, variant, every_bucket=every_bucket)
    windows = Windows()
    if variant in RETRACTED:
        with with_pattern(runner, texts, seed=3):
            check_few_pages(variant, runner, ids, logprobs)
    for seed in (1, 2) if every_bucket else (1,):
        with with_pattern(runner, texts, seed=seed):
            for groups in layouts(variant).values():
                for requests, poison in groups:
                    names = [r.id for r in requests]
                    want = ({n: ids[n] for n in names}, {n: logprobs[n] for n in names})
                    assert_equal_runs(run(engine_over(runner, poison=poison, observer=windows), requests), want)
    assert windows.mixed > 0
    assert set(windows.accepted) == set(range(k + 1))


def check_few_pages(variant, runner, ids, logprobs):
    """Requests that are retracted and resumed, and then the same ones once more, whose prompts the prefix cache has, if any."""
    preempted = 0
    for pages in FEW_PAGES:
        engine = engine_over(runner)
        engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - pages)
        for _ in range(2):
            assert_equal_runs(run(engine, greedy_requests(tiny_config(variant).vocab_size)), (ids, logprobs))
        preempted += engine.stats().num_preemptions
        if preempted:
            break
    assert preempted > 0
    assert engine.stats().prefix_cache_hits > 0 or not runner.settings.prefix_caching


@pytest.mark.long
@pytest.mark.parametrize(("variant", "k"), COVERING)
def test_speculation_is_plain_decoding(variant, k):
    try:
        check_layouts(variant, k)
    finally:
        forget(variant, k)


@pytest.mark.full
@pytest.mark.parametrize("k", KS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_speculation_is_plain_decoding_everywhere(variant, k):
    """With the decode buckets too, the sampler of all parameters, and a second seed of the draft's mistakes."""
    try:
        check_layouts(variant, k, every_bucket=True)
    finally:
        forget(variant, k, every_bucket=True, plain=k == KS[-1])


def forget(variant, k, *, every_bucket=False, plain=True):
    """Nothing else runs these targets, and their executables do not all fit into a process at once."""
    scripted.pattern_runner.forget(k, variant, every_bucket=every_bucket)
    if plain:
        scripted.plain_runner.forget(variant)
        scripted.plain_run.forget(variant)


def assert_all_accepted(runner, requests, texts, **options):
    windows = Windows()
    ids, _, _ = run(engine_over(runner, observer=windows, **options), requests)
    assert ids == texts
    assert len(windows.accepted) >= len(requests) * ((NEW_TOKENS - 1) // runner.window)
    assert set(windows.accepted) == {runner.window - 1}


@pytest.mark.parametrize(
    "k",
    [
        pytest.param(1, marks=pytest.mark.full),
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.full),
    ],
)
def test_a_perfect_draft_is_accepted_at_every_position(k):
    """Draft i really goes on from draft i - 1, in every row, and the draft's cache holds the row's own text."""
    ids, _, texts = plain_run()
    runner = pattern_runner(k)
    with with_pattern(runner, texts):
        assert_all_accepted(runner, greedy_requests(tiny_config("tiny").vocab_size), ids, poison=np.nan)


# --- heads made to be exact: a target whose next token is a function of the last one, known to its draft's weights ---


def markov_target(runner):
    """Blocks that add nothing, and a head that answers each token with its successor on one cycle of all ids.

    Embeddings have length sqrt(H), so by Cauchy-Schwarz the row that equals an embedding has the largest logit.
    """
    H = 32
    rng = np.random.default_rng(1)
    vocab = scripted.tiny_vocab(runner)
    embed = rng.standard_normal((vocab, H)).astype(np.float32)
    embed *= np.sqrt(H) / np.linalg.norm(embed, axis=1, keepdims=True)
    cycle = rng.permutation(vocab)
    successor = np.empty(vocab, np.int64)
    successor[cycle] = np.roll(cycle, -1)
    head = np.empty_like(embed)
    head[successor] = embed
    silent = {i: silent_block(runner.params[0]["layers"][i]) for i in range(2)}
    ones = {"weight": np.ones(H)}
    params = {"embed": {"weight": embed}, "head": {"weight": head}, "norm": ones, "layers": silent}
    return params, successor


def silent_block(block):
    """Zeros for the two matrices by which a block adds to the residual stream (three with shared experts)."""
    zero = lambda variable: np.zeros(variable.get_value().shape)  # noqa: E731
    mlp = {"down": zero(block["mlp"]["down"])}
    if "shared" in block["mlp"]:
        mlp["shared"] = {"down": zero(block["mlp"]["shared"]["down"])}
    return {"attention": {"o": zero(block["attention"]["o"])}, "mlp": mlp}


def markov_texts(requests, successor):
    texts = {}
    for request in requests:
        text = list(request.prompt_ids)
        for _ in range(NEW_TOKENS):
            text.append(int(successor[text[-1]]))
        texts[request.id] = text[request.prompt_len :]
    return texts


@pytest.mark.long
@pytest.mark.parametrize("k", [3, pytest.param(7, marks=pytest.mark.full)])
def test_an_exact_nextn_layer_is_accepted_at_every_position(k):
    """The layer passes the next token's embedding through, so its logits are the target's: the real code, all right."""
    runner = tiny_runner(k)
    target, successor = markov_target(runner)
    H = 32
    ones = {"weight": np.ones(H)}
    draft = {
        "enorm": ones, "hnorm": ones, "norm": ones, "eh_proj": np.eye(H, 2 * H),
        "layer": silent_block(runner.params[1]["layer"]),
    }  # fmt: skip
    requests = greedy_requests(scripted.tiny_vocab(runner))
    with exchanged(runner, target=target, draft=draft):
        assert_all_accepted(runner, requests, markov_texts(requests, successor))


@pytest.mark.slow
def test_an_exact_eagle3_head_is_accepted_at_every_position():
    """Attention finds the token itself (only there are query and key equal) and puts its embedding in the place of x.

    With value = embedding - normed x, z = x + value is the embedding of the newest token, at the first step, where x
    is fc's, and at later ones, where x is the former token's embedding.
    """
    runner = eagle3_runner("llama", 3)
    target, successor = markov_target(runner)
    H = 32
    ones = {"weight": np.ones(H)}
    eye, nothing = np.eye(H), np.zeros((H, H))
    sharp = np.concatenate([30 * eye, nothing], axis=1)
    qkv = np.stack([sharp, np.zeros_like(sharp), sharp, np.concatenate([eye, -eye], axis=1)])[None]
    o = np.stack([eye, nothing], axis=1)[:, None]  # the second head is left out
    draft = {
        "fc": np.concatenate([eye, nothing, nothing], axis=1), "input_norm": ones, "hidden_norm": ones, "norm": ones,
        "post_norm": ones, "attention": {"qkv": qkv, "o": o},
        "mlp": {"down": np.zeros(runner.params[1]["mlp"]["down"].get_value().shape)},
    }  # fmt: skip
    requests = greedy_requests(scripted.tiny_vocab(runner))
    with exchanged(runner, target=target, draft=draft):
        assert_all_accepted(runner, requests, markov_texts(requests, successor))
