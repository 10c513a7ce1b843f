"""How many tokens each expert gets, as steps count them."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.config import Lookup
from jaxspec.engine.calibration import Calibration
from jaxspec.engine.engine import Engine
from jaxspec.engine.expert_load import WORD_BITS, ExpertLoad, add_load
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.step_output import StepOutput
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_expert_load
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import one_bucket
from tests.engine.test_mesh import TINY_LLAMA, mesh_of, params_of
from tests.engine.test_mesh_lowering import LoweredOnlyError
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB

# A dense layer, then two mixtures.
CONFIG = read_config(HF_CONFIG | {"num_hidden_layers": 3})
E, TOP_K = HF_CONFIG["n_routed_experts"], HF_CONFIG["num_experts_per_tok"]


def runner_of(
    devices: int, k: int, *, probe: bool = False, counted: bool = True, lookup: Lookup | None = None
) -> Runner:
    mesh, model = mesh_of(devices), CausalLM(CONFIG, jnp.float32)
    settings = dataclasses.replace(
        SETTINGS, num_speculative_tokens=k, readout_depth=1, prefix_caching=False, expert_load_metrics=counted,
        lookup=lookup,
    )  # fmt: skip
    draft = NextN(CONFIG, jnp.float32) if k and lookup is None else None
    return Runner(
        model, params_of(model, 1, mesh), settings, mesh, draft=(draft, params_of(draft, 2, mesh)) if draft else None,
        buckets=one_bucket(settings), split=(), probe=probe,
    )  # fmt: skip


class Recount:
    """An engine's observer that counts the chosen experts of all tokens that a step's plan has, but for rows that were done
    and for drafts that could not be accepted.

    The choices themselves are compared with PyTorch's in tests/models/test_parity.py.
    """

    def __init__(self) -> None:
        self.counts = np.zeros((2, E), np.int64)
        self.mixed = self.windows = self.dead = 0
        self.verified: set[int] = set()

    def __call__(self, step: StepOutput) -> None:
        assert step.probe is not None
        prompts, windows = step.token_offsets()
        live = step.emitted[len(prompts) :] > 0
        tokens = [first + np.arange(row.length) for first, row in zip(prompts, step.plan.prefill, strict=True)]
        verified = step.verified[len(prompts) :][live]
        tokens += [first + np.arange(1 + drafts) for first, drafts in zip(windows[live], verified, strict=True)]
        live_tokens = np.concatenate([np.empty(0, int), *tokens])  # none where all rows have ended
        for layer, ids_Tk in enumerate(step.probe.experts):
            self.counts[layer] += np.bincount(ids_Tk[live_tokens].ravel(), minlength=E)
        self.mixed += bool(len(prompts) and live.any())
        self.verified |= set(verified.tolist())
        self.windows += int(live.sum())
        self.dead += int((~live).sum())


@pytest.mark.long
@pytest.mark.parametrize(("devices", "k", "lookup"), [(1, 2, None), (2, 0, None), (1, 2, Lookup(1, 2))])
def test_counts_are_those_of_the_choices_of_live_tokens(devices, k, lookup):
    """Of prompts in chunks, of windows with their rejected drafts, of both in a step; not of padding, nor of rows that ended
    while later steps were dispatched, nor of drafts that a row did not find or that its request does not want. Measuring
    what steps cost leaves them as they are."""
    runner = runner_of(devices, k, probe=True, lookup=lookup)
    runner.warm_up()
    recount, rng = Recount(), np.random.default_rng(0)
    engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,), observer=recount)
    assert not engine.stats().expert_load.counts.any()
    # Stops that the host cannot foresee.
    params = SamplingParams(max_tokens=20, temperature=1, seed=2, stop_token_ids=tuple(range(10, 20)))
    for i, n in enumerate((5, 90, 30, 70)):
        # Texts of few ids, in which something is found, and one that wants fewer drafts than there are.
        ids = rng.integers(6, 30 if lookup else VOCAB, n).tolist()
        engine.add(
            Request(f"r{i}", ids, dataclasses.replace(params, num_speculative_tokens=1) if k and i == 3 else params)
        )
    engine.step()
    early = engine.stats().expert_load  # read when later steps have taken the state that it was a copy of
    while engine.has_work:
        engine.step()
    assert recount.mixed
    assert recount.dead
    assert recount.windows > 10
    assert recount.verified == ({0, 1, k} if lookup else {1, k} if k else {0})
    load = engine.stats().expert_load
    assert (load.layers, load.devices) == ((1, 2), devices)
    np.testing.assert_array_equal(load.counts, recount.counts)
    assert 0 < early.counts.sum() < load.counts.sum()
    Calibration(runner, VOCAB).measure([rank.pages.blank_pages for rank in engine.ranks])
    runner.dispatch(StepPlan((), (), drafts=k))
    runner.read()
    np.testing.assert_array_equal(runner.expert_load.counts, recount.counts)


def test_a_step_that_does_not_count_has_nothing_of_it(monkeypatch):
    """Neither state nor output, and nothing is routed again. Where it counts no device asks another for it."""
    texts = []

    def stop(step: jax.stages.Lowered, *_: Any) -> None:
        texts.append(step.as_text())
        raise LoweredOnlyError

    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a step that does not count experts asks for them")

    counting, plain = (runner_of(2, 0, counted=counted) for counted in (True, False))
    assert plain.expert_load is None
    monkeypatch.setattr(jax.stages.Lowered, "compile", stop)
    with pytest.raises(LoweredOnlyError):
        counting.compiler.compile(counting.buckets[0])
    for patched in ("jaxspec.engine.forward.add_load", "jaxspec.models.moe.MoE.chosen_experts"):
        monkeypatch.setattr(patched, refuse)
    with pytest.raises(LoweredOnlyError):
        plain.compiler.compile(plain.buckets[0])
    on, off = texts
    array = f"tensor<1x2x2x{E}xi32>"
    assert array in on
    assert array not in off
    assert on.count("all_reduce") == off.count("all_reduce") > 0


def test_counts_go_on_past_a_word():
    """Words that are nearly full, of two ranks; what each of two devices has, and how far the busiest expert is ahead."""
    rng = np.random.default_rng(0)
    L, T, k = 3, 50, 4
    words = np.stack([rng.integers((1 << WORD_BITS) - 20, 1 << WORD_BITS, (2, L, 8)), rng.integers(0, 3, (2, L, 8))], 1)
    want = (words[:, 0] + (words[:, 1] << WORD_BITS)).sum(axis=0)
    after = []
    for of_rank in words:
        ids = [np.stack([rng.permutation(8)[:k] for _ in range(T)]) for _ in range(L)]
        live = rng.random(T) < 0.7
        after.append(add_load(jnp.asarray(of_rank[None], jnp.int32), [jnp.asarray(a) for a in ids], jnp.asarray(live)))
        want += np.stack([np.bincount(a[live].ravel(), minlength=8) for a in ids])
    load = ExpertLoad(np.concatenate(after), (0, 2, 5), 2)
    np.testing.assert_array_equal(load.counts, want)
    assert any(np.asarray(low).min() < 1 << 20 for ((low, _),) in after)  # some words have gone over
    np.testing.assert_array_equal(load.by_device, np.stack([want[:, :4].sum(axis=1), want[:, 4:].sum(axis=1)], axis=1))
    np.testing.assert_allclose(load.busiest_over_mean, [max(row) / (sum(row) / 8) for row in want.tolist()])
    uneven = np.zeros((1, 2, 2, 8), int)
    uneven[0, 0, 1, 3] = 7
    assert ExpertLoad(uneven, (0, 1), 1).busiest_over_mean.tolist() == [1, 8]


def test_a_model_without_mixtures_is_refused():
    check_expert_load(CausalLM(CONFIG, jnp.float32))
    with pytest.raises(ConfigError, match=r"\(--expert-load-metrics\) is for mixtures .* leave it out"):
        check_expert_load(CausalLM(read_config(TINY_LLAMA), jnp.float32))
