"""Layers whose state no page holds: rejected drafts, late steps, retraction and reused slots leave no trace in it."""

import functools
import itertools
import json
from collections import Counter
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from jaxspec import LLM, EngineConfig, SamplingParams
from jaxspec.engine.draft_control import FixedDrafts
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_attention_kernels
from jaxspec.models.cache import page_bytes, slot_bytes
from jaxspec.models.decoder import CausalLM
from jaxspec.models.registry import family_of, read_config
from tests.conftest import few_buckets
from tests.engine.scripted import (
    Windows,
    changing_runner,
    greedy_requests,
    plain_run,
    tiny_config,
    with_pattern,
)
from tests.engine.test_engine import assert_equal_runs
from tests.engine.test_schedules import options
from tests.engine.tiny import fill_cache, run
from tests.tiny_models import CONFIGS

# Their states fade as a whole, beside grouped-query attention, and by channel, beside latents.
VARIANTS, K = ("qwen3.5", "kimi-linear"), 3
VARIANT = VARIANTS[0]
# By default tests/engine/test_equality.py has the other.
EACH = pytest.mark.parametrize("variant", [VARIANT, pytest.param("kimi-linear", marks=pytest.mark.full)])
GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class Cycling(FixedDrafts):
    """One number of drafts after the other, again and again."""

    def __init__(self, sequence):
        super().__init__(K)
        self._sequence = itertools.cycle(sequence)

    def choose(self, load):
        wanted = next(self._sequence)
        return wanted if wanted in load.choices else load.choices[0]


@pytest.mark.long
@EACH
def test_gdn_replay_equals_no_spec(variant):
    """Windows of several lengths after each other, read late, in mixed steps, in few pages, in slots that held NaN."""
    check_replayed("pattern", variant)


@pytest.mark.full
def test_replayed_windows_of_the_nextn_layer_are_plain_decoding():
    check_replayed("nextn")


@pytest.mark.full
@pytest.mark.parametrize("draft", ["pattern", "nextn"])
def test_index_keys_of_changing_windows(draft):
    """The same over layers that choose their keys: steps without drafts write the draft's index keys all the same."""
    check_replayed(draft, "glm-dsa")


def check_replayed(draft, variant=VARIANT):
    ids, logprobs, texts = plain_run(variant)
    vocab = tiny_config(variant).vocab_size
    runner, windows = changing_runner(K, draft, variant), Windows()
    preempted, chosen = 0, Counter()
    for sequence, depth, mixed, pages in (
        ((K,), 0, True, None), ((K, 1, 0), 1, True, 12), ((0, K), 2, False, None), ((1, K, K, 0), 3, True, 9),
    ):  # fmt: skip
        known = with_pattern(runner, texts, seed=1) if draft == "pattern" else options(runner)
        with options(runner, readout_depth=depth, mixed=mixed), known:
            fill_cache(runner, np.nan)
            engine = Engine(runner, vocab_size=vocab, control=Cycling(sequence), observer=windows)
            if pages:
                engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - pages)
            assert_equal_runs(run(engine, greedy_requests(vocab)), (ids, logprobs))
        preempted += engine.stats().num_preemptions
        chosen.update(engine.stats().steps_by_drafts)
    assert preempted > 0
    assert all(chosen[k] for k in (0, 1, K))
    assert windows.mixed > 0
    if draft == "pattern":
        assert set(windows.accepted) == set(range(K + 1))


OPTIONS = {"max_num_seqs": 4, "max_num_batched_tokens": 24, "max_model_len": 128}
PROMPTS = [[7, 8, 9, 10] * 5 + [i] for i in range(3)] + [[11, 12, 13]]


@pytest.mark.long
@EACH
def test_prefix_hit_after_rejected_drafts(variant):
    """The same prompts again and again, beside drafts that are accepted and rejected, in few pages and few kept states."""
    ids, logprobs, texts = plain_run(variant)
    vocab = tiny_config(variant).vocab_size
    runner, windows = changing_runner(K, "pattern", variant), Windows()
    for depth, pages in ((0, None), (2, 12)):
        with options(runner, readout_depth=depth, prefix_caching=True), with_pattern(runner, texts, seed=1):
            fill_cache(runner, np.nan)
            engine = Engine(runner, vocab_size=vocab, control=Cycling((K, K, 1)), observer=windows)
            if pages:
                engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - pages)
            for _ in range(3):
                before = engine.stats().prefix_cache_hits
                assert_equal_runs(run(engine, greedy_requests(vocab)), (ids, logprobs))
            assert engine.stats().prefix_cache_hits > before
            turns = [Request(f"turn {i}", text[:-9], GREEDY) for i, text in enumerate(texts) if len(text) > 80]
            answers, _, _ = run(engine, turns)
            for turn in turns:
                assert answers[turn.id][:9] == texts[int(turn.id.split()[1])][-9:]
    assert set(windows.accepted) == set(range(K + 1))
    assert engine.stats().num_preemptions > 0


@pytest.mark.long
@EACH
def test_a_text_that_others_had_is_found_at_the_interval_and_where_they_parted(variant):
    """Prompts of three pages that share two tokens more than one, with an interval of a page, and with a longer one."""
    vocab = tiny_config(variant).vocab_size
    runner = changing_runner(K, "pattern", variant)
    rng = np.random.default_rng(3)
    text = rng.integers(6, vocab, 66).tolist()
    users = [[*text, *rng.integers(6, vocab, 80).tolist()] for _ in range(3)]

    def asked(interval, **changes):
        """What each of them is answered, and how many of its tokens were found."""
        with options(runner, state_interval=interval, **changes):
            fill_cache(runner, np.nan)
            engine = Engine(runner, vocab_size=vocab, control=Cycling((K, 0)))
            found, answers = [], []
            for i, prompt in enumerate(users):
                request = Request(f"user {i}", prompt, GREEDY)
                answers.append(run(engine, [request]))
                found.append(request.num_cached_tokens)
            return found, answers

    _, alone = asked(64)
    for interval, found in ((64, [0, 64, 64]), (1024, [0, 0, 64])):
        got, answers = asked(interval, prefix_caching=True)
        assert got == found
        for answer, want in zip(answers, alone, strict=True):
            assert_equal_runs(answer, want)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny variant in a Hugging Face folder."""
    return functools.cache(lambda variant: write_folder(tmp_path_factory.mktemp("hybrid"), variant))


def write_folder(path, variant=VARIANT, **changes: Any):
    """With the NextN layer, if it has one; `changes` are of the configuration."""
    rng = np.random.default_rng(0)
    hf = CONFIGS[variant] | changes
    config = read_config(hf)
    family = family_of(config)
    maps = [family.key_map(config), *([family.nextn_key_map(config)] if config.nextn_layers else [])]
    pieces = [p for keys in maps for ps in keys.values() for p in ps]
    tensors = {p.name: rng.standard_normal(p.shape).astype(np.float32) * p.shape[-1] ** -0.5 for p in pieces}
    (path / "config.json").write_text(json.dumps(hf | {"torch_dtype": "float32"}))
    save_file(tensors, path / "model.safetensors")
    return str(path)


@pytest.fixture(scope="module")
def plain_llm(folder):
    @functools.cache
    def made(variant):
        with pytest.MonkeyPatch.context() as patch:
            few_buckets(patch, decode=False)
            return LLM(folder(variant), **OPTIONS)

    return made


@pytest.mark.long
@pytest.mark.parametrize(
    ("variant", "method"),
    [
        (VARIANT, "mtp"),
        pytest.param(VARIANT, "ngram", marks=pytest.mark.full),
        pytest.param("kimi-linear", "ngram", marks=pytest.mark.full),
    ],
)
def test_drafts_from_a_folder(folder, plain_llm, variant, method, monkeypatch):
    """Looked up in texts that repeat themselves, and by the layer of the checkpoint."""
    few_buckets(monkeypatch, decode=False)
    folder, plain = folder(variant), plain_llm(variant)
    drafting = LLM(folder, num_speculative_tokens=K, speculative_method=method, adaptive_speculation=False, **OPTIONS)
    assert [c.ids for c in drafting.generate(PROMPTS, GREEDY)] == [c.ids for c in plain.generate(PROMPTS, GREEDY)]
    assert drafting.engine.stats().acceptance.num_steps > 0
    model = CausalLM(read_config(CONFIGS[variant]), np.dtype("float32"))
    for llm, window in ((plain, 1), (drafting, K + 1)):
        state = slot_bytes(model.cache_specs(), window, {"tensor": 1})
        assert llm.describe()["State bytes per request"] == state
    kept = 4 * slot_bytes(model.cache_specs(), 0, {"tensor": 1})
    assert plain.describe()["Kept states"] == f"4, {kept / 2**20:.0f} MiB"
    # Again, from kept states.
    hits = drafting.engine.stats().prefix_cache_hits
    long = [PROMPTS[0] * 4]
    first, second = (drafting.generate(long, GREEDY)[0] for _ in range(2))
    assert first.ids == second.ids == plain.generate(long, GREEDY)[0].ids
    assert drafting.engine.stats().prefix_cache_hits == hits + 64
    # One layer in three has pages; a NextN layer too.
    assert plain.describe()["KV cache bytes per token"] == page_bytes(model.cache_specs(), 1, {"tensor": 1})


# Widths that the kernels' blocks divide.
REAL_WIDTHS = {
    "qwen3.5": {"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    "kimi-linear": {"linear_attn_config": CONFIGS["kimi-linear"]["linear_attn_config"] | {"head_dim": 128}},
}


def on_gpu(monkeypatch, capability):
    device = SimpleNamespace(platform="gpu", compute_capability=capability, device_kind="a GPU")
    monkeypatch.setattr(jax, "devices", lambda: [device])


@pytest.mark.parametrize("variant", VARIANTS)
def test_gpus_decode_in_a_kernel_or_not_at_all(variant, monkeypatch):
    """Plain XLA decodes there where it is asked for, and nowhere by itself."""
    tiny, real = (
        CausalLM(read_config(CONFIGS[variant] | changes), np.dtype("float32")) for changes in ({}, REAL_WIDTHS[variant])
    )
    for capability, model, refused in (
        ("9.0", real, None),
        ("9.0", tiny, "values of a multiple of 64 columns"),
        ("8.0", real, "compute capability 9.0"),
    ):
        on_gpu(monkeypatch, capability)
        for backend in ("auto", "mosaic", "triton"):
            config = EngineConfig(attention_backend=backend)
            if refused is None:
                check_attention_kernels([model], config, "float32")
                continue
            message = rf"no decode kernel here: .*{refused}.*; use attention_backend \(--attention-backend\) reference"
            with pytest.raises(ConfigError, match=message):
                check_attention_kernels([model], config, "float32")
        check_attention_kernels([model], EngineConfig(attention_backend="reference"), "float32")
    grouped = CausalLM(read_config(CONFIGS["qwen3"]), np.dtype("float32"))
    check_attention_kernels([grouped], EngineConfig(), "float32")
