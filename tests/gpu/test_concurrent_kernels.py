"""Kernels of a quantised model's step that run at the same time give what they give one after the other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench.harness.models import draw
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.sampling.params import SamplingParams
from tests.engine.scripted import one_device
from tests.engine.test_schedules import options
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, fill_cache
from tests.gpu.test_graph import KERNEL_VOCAB, SIZES

pytestmark = pytest.mark.gpu

ROWS = SETTINGS.max_num_seqs
# More than one layer of experts: a kernel that ran ahead would meet those of the next. With KERNEL_VOCAB sampling is in kernels
# of ours, one of which has blocks that wait for each other.
HF = HF_CONFIG | SIZES | {"moe_intermediate_size": 128, "num_hidden_layers": 3, "n_shared_experts": 1}
HF |= {"vocab_size": KERNEL_VOCAB}


def runner_of(k: int, quantization: str) -> Runner:
    mesh = one_device()
    weights = draw(HF, mesh, np.dtype(jnp.bfloat16), quantization=quantization, with_draft=k > 0)
    settings = dataclasses.replace(SETTINGS, dtype="bfloat16", on_gpu=True, num_speculative_tokens=k)
    buckets = tuple(
        Bucket(tokens, rows, ROWS, "full", k) for tokens, rows in ((0, 0), (SETTINGS.max_num_batched_tokens, 4))
    )
    runner = Runner(weights.model, weights.params, settings, mesh, draft=weights.draft if k else None, buckets=buckets)
    runner.warm_up()
    return runner


def requests():
    rng = np.random.default_rng(2)
    for i in range(ROWS):
        params = SamplingParams(
            max_tokens=60 + i, temperature=i % 2, top_p=0.9 if i % 3 else 1.0, seed=i, ignore_eos=True
        )
        yield Request(f"r{i}", rng.integers(6, VOCAB, 9 + 7 * i).tolist(), params, arrival_time=float(i))


@pytest.mark.parametrize("quantization", ["fp8", "int4"])
@pytest.mark.parametrize("k", [0, 3])
def test_kernels_at_once_give_what_they_give_in_turn(k, quantization, monkeypatch):
    """From the same state the same output and the same state, bit by bit, in every step of prompts and windows."""
    at_once = runner_of(k, quantization)
    monkeypatch.setattr("jaxspec.engine.runner.schemes_of", lambda _model: {})
    in_turn = runner_of(k, quantization)
    assert all("CONCURRENT" in at_once.compiler.xla_options(bucket).values() for bucket in at_once.ready)
    assert not any("CONCURRENT" in in_turn.compiler.xla_options(bucket).values() for bucket in in_turn.ready)
    fill_cache(at_once, np.nan)
    dispatch, read, outputs = at_once.dispatch, at_once.read, []

    def dispatch_both(plan):
        in_turn.state = jax.tree.map(jnp.copy, at_once.state)
        dispatch(plan)
        in_turn.dispatch(plan)
        outputs.append(in_turn.read())

    def read_both():
        got, want = read(), outputs.pop()
        for name in ("emitted", "verified", "accepted", "flags", "ids", "drafts", "logprobs"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        for name, ours, theirs in zip(at_once.state._fields, at_once.state, in_turn.state, strict=True):
            if name != "written":  # the number of the step
                for pair in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
                    # Page 0 and slot 0 are padding: of the tokens that write the same row there, any may be the last.
                    got_rest, want_rest = (np.asarray(a[1:].astype(jnp.float32)) for a in pair)
                    np.testing.assert_array_equal(got_rest, want_rest, err_msg=name)
        return got

    monkeypatch.setattr(at_once, "dispatch", dispatch_both)
    monkeypatch.setattr(at_once, "read", read_both)
    with options(at_once, readout_depth=0):
        engine = Engine(at_once, vocab_size=KERNEL_VOCAB, eos_token_ids=(EOS,))
    engine.add(*requests())
    finished = 0
    while engine.has_work:
        finished += sum(output.finish_reason is not None for output in engine.step())
    assert finished == ROWS
