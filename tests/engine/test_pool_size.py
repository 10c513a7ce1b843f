"""How many KV pages fit: the largest steps run with a small pool, and pages get what they leave."""

import itertools
from dataclasses import dataclass, replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import EngineConfig, Settings, pages_for, resolve
from jaxspec.engine.buckets import bucket_table, choose_bucket, draft_choices, parts, split_table
from jaxspec.engine.memory import MARGIN_BYTES, evidently_fits, largest_buckets, measure_free_bytes
from jaxspec.engine.runner import Runner
from jaxspec.errors import ConfigError

SETTINGS = Settings(
    max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, num_pages=999, dtype="bfloat16", on_gpu=True
)
PAGE_BYTES, HANDED_BYTES = 1000, 100


@given(
    seqs=st.integers(1, 200), budget=st.integers(256, 4096), mixed=st.booleans(), on_gpu=st.booleans(),
    drafts=st.integers(0, 7), adaptive=st.booleans(),
)  # fmt: skip
def test_tables_of_buckets(seqs, budget, mixed, on_gpu, drafts, adaptive):
    """Few, every one covered by one of the largest, and one for every plan with the drafts that there may be."""
    adaptive = adaptive and drafts > 0
    settings = replace(
        SETTINGS, max_num_seqs=seqs, max_num_batched_tokens=budget, mixed=mixed, on_gpu=on_gpu,
        num_speculative_tokens=drafts, adaptive_drafts=adaptive,
    )  # fmt: skip
    table = bucket_table(settings)
    assert len(set(table)) == len(table) <= (32 if adaptive else 24 if on_gpu else 4)
    assert split_table(settings) == ()
    split = split_table(replace(settings, readout_depth=1))
    assert {part.part for b in split for part in parts(b)} == {"forward", "choose"}
    assert len({str(part) for b in split for part in parts(b)} - {str(b) for b in table}) == 2 * len(split) <= 8
    assert {b.drafts for b in split if b.decode_rows == seqs} == {0, drafts} if adaptive else {drafts}
    assert all(b in table and b.variant == "full" and not b.prefill_tokens for b in split)
    largest = largest_buckets(table)
    if not adaptive:
        assert len(largest) == (1 if mixed else 2)
    for b in table:
        assert any(
            a.prefill_tokens >= b.prefill_tokens and a.prefill_rows >= b.prefill_rows and a.decode_rows >= b.decode_rows
            and a.drafts >= b.drafts and (a.variant == "full" or b.variant == "lean")
            for a in largest
        )  # fmt: skip
    for tokens, full in itertools.product({0, 1, min(384, budget), min(385, budget), budget}, (False, True)):
        choices = draft_choices(table, prompt_tokens=tokens, full=full)
        for k in choices:  # raises where there is none
            rows = 0 if tokens and not mixed else seqs
            sizes = {"prefill_tokens": tokens, "prefill_rows": min(tokens, 1), "decode_rows": rows}
            choose_bucket(table, **sizes, full=full, drafts=k)
        if not adaptive:
            assert choices == (drafts,)
        elif tokens <= 384 or not on_gpu:
            assert choices == tuple(sorted({0, 1, drafts}))
        else:  # with so many prompt tokens steps with one draft take as long as with none
            assert choices == tuple(sorted({1, drafts}))


@dataclass
class Device:
    """Knows what `run` needs beside the pool, and what loading the weights needed at most."""

    limit: int
    loading: int
    running: int = 0

    def memory_stats(self):
        return {"bytes_limit": self.limit, "peak_bytes_in_use": max(self.loading, self.running)}


def measured(devices, needs, made=None, depth=0):
    def make_runner(settings, buckets):
        if made is not None:
            made.append((settings, buckets))

        def warm_up():
            for device in devices:
                device.running = needs + settings.num_pages * PAGE_BYTES

        compiler = SimpleNamespace(handed_bytes=lambda bucket: HANDED_BYTES * bucket.decode_rows)
        return SimpleNamespace(warm_up=warm_up, compiler=compiler)

    return measure_free_bytes(make_runner, replace(SETTINGS, readout_depth=depth), PAGE_BYTES, devices)


@given(needs=st.integers(0, 10**9), loading=st.integers(0, 2 * 10**9))
def test_pages_get_what_the_largest_steps_leave(needs, loading):
    made: list = []
    free = measured([Device(2 * 10**9, loading)], needs, made)
    ((settings, buckets),) = made
    assert settings.num_pages == pages_for(SETTINGS.max_model_len) + 1
    assert buckets == largest_buckets(bucket_table(SETTINGS))
    pool = settings.num_pages * PAGE_BYTES
    # A peak while loading may hide what steps need: then there is less for pages, never more.
    assert free == 2 * 10**9 - max(needs, loading - pool) - MARGIN_BYTES
    assert free + needs + MARGIN_BYTES <= 2 * 10**9


def test_steps_in_two_parts_leave_room_for_what_lies_between():
    handed = HANDED_BYTES * sum(b.decode_rows for b in split_table(replace(SETTINGS, readout_depth=1)))
    assert measured([Device(10**9, 0)], 5, depth=1) == measured([Device(10**9, 0)], 5) - handed


def test_the_fullest_device_decides():
    assert measured([Device(2 * 10**9, 0), Device(10**9, 0)], 5) == 10**9 - 5 - MARGIN_BYTES


@pytest.mark.parametrize(
    ("text", "error"),
    [("RESOURCE_EXHAUSTED: out of memory", ConfigError), ("INTERNAL: something else", jax.errors.JaxRuntimeError)],
)
def test_steps_that_do_not_fit_are_the_users_error(text, error, monkeypatch):
    def run_out(*_):
        raise jax.errors.JaxRuntimeError(text)

    monkeypatch.setattr(Runner, "_warm_up", run_out)
    runner = Runner.__new__(Runner)
    runner.settings = SETTINGS
    with pytest.raises(
        error, match=r"999 KV pages .* lower them, max_model_len or num_gpu_blocks_override|something else"
    ):
        runner.warm_up()


@given(pages=st.integers(1, 1 << 20), free=st.integers(0, 1 << 40))
def test_nothing_is_measured_where_plenty_is_left(pages, free):
    on_device = NamedSharding(Mesh(np.array(jax.devices()[:2]), ("x",)), PartitionSpec("x"))
    state = (jax.ShapeDtypeStruct((2 * pages, 64), jnp.bfloat16, sharding=on_device),)
    needed = pages * 128
    assert evidently_fits(state, free) == (free >= 2 * needed and free >= needed + (8 << 30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 0}, r"max_num_seqs \(--max-num-seqs\) must be at least 1"),
        ({"max_model_len": 1024}, "over the model's own limit of 512"),
        (
            {"max_num_seqs": 16, "max_num_batched_tokens": 8},
            r"max_num_batched_tokens .* 8 is under max_num_seqs .* 16",
        ),
        ({"num_gpu_blocks_override": 5}, r"max_model_len \(--max-model-len\) 512; lower it to at most 256"),
        ({"num_gpu_blocks_override": 1}, "at least 2"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"dtype": "int4"}, r"dtype \(--dtype\) must be auto, bfloat16 or float32"),
        ({"readout_depth": 4}, "between 0 and 3, got 4"),
        ({"readout_depth": -1}, "between 0 and 3"),
        ({"num_speculative_tokens": 8}, "between 0 and 7"),
        ({"num_speculative_tokens": -1}, "between 0 and 7"),
        ({"synthetic_acceptance_pattern": "each"}, r"needs synthetic_acceptance_length \(--synth"),
        ({"synthetic_acceptance_length": 2.0}, "needs speculation"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": 4.5}, "between 1 and 4 .* got 4.5"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": 0.9}, "between 1 and 4"),
        ({"num_speculative_tokens": 3, "synthetic_acceptance_length": float("nan")}, "between 1 and 4"),
    ],
)
def test_options_that_cannot_work(options, message):
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**options), model_max_position=512, page_bytes=1000, free_bytes=10**6, on_gpu=False)


def test_pool_is_sized_by_memory_and_capped_by_need():
    options = EngineConfig(max_num_seqs=4)
    sized = resolve(options, model_max_position=512, page_bytes=1000, free_bytes=20_000, on_gpu=False)
    assert sized.num_pages == 20
    with pytest.raises(ConfigError, match="the weights leave no memory"):
        resolve(options, model_max_position=512, page_bytes=1000, free_bytes=-1, on_gpu=False)
    capped = resolve(options, model_max_position=512, page_bytes=1000, free_bytes=10**9, on_gpu=False)
    assert capped.num_pages == 4 * pages_for(512) + 1
