"""Traffic of rude clients for a while, after which no page, slot, descriptor, thread or memory is missing."""

import pytest

from jaxspec.compat import compiles
from serve.model import ServedModel
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.soak import SETTINGS, Soak, stream_is_whole, usage

REQUIRED = (
    "valid 200", "canary 200", "aborted", "slow reader", "half-open, told 408", "half a body, told 408",
    "bad body 400", "bad HTTP 400", "flood 200", "flood 429", "tokenize 200",
)  # fmt: skip


def check_soak(soak: Soak, seconds: float, *, most_mib: float) -> None:
    """A first part brings caches and buffers to their sizes; the rest may not add to them."""
    soak.run(seconds / 3, seed=1)
    soak.settle()
    before = usage()
    soak.run(seconds * 2 / 3, seed=2)
    soak.settle()
    after = usage()
    print(dict(soak.seen), before, after)
    assert not soak.faults
    missing = [name for name in REQUIRED if not soak.seen[name]]
    assert not missing, soak.seen
    assert after.descriptors <= before.descriptors
    assert after.threads <= before.threads
    assert after.resident_mib - before.resident_mib < most_mib
    assert soak.server.service.engine_thread.healthy
    stream_is_whole(soak.server)


@pytest.mark.slow
def test_soak(start_server):
    engine = MockEngine(step_seconds=0.002, max_model_len=1024)
    soak = Soak(start_server(served(engine, byte_tokenizer()), **SETTINGS))
    check_soak(soak, 24.0, most_mib=100.0)
    assert len(engine.aborted) > 20


@pytest.mark.full
def test_soak_with_the_demo_model_for_half_an_hour(start_server, demo_llm):
    counts = lambda: (compiles.total, compiles.after_warmup)  # noqa: E731
    model = ServedModel(demo_llm.engine, demo_llm.tokenizer, demo_llm.describe(), counts)
    server = start_server(model, **SETTINGS)
    compiled = compiles.total
    pages = demo_llm.engine.scheduler.pages
    demo_llm.engine.reset_prefix_cache()
    free = pages.num_free
    check_soak(Soak(server), 1800.0, most_mib=200.0)
    demo_llm.engine.reset_prefix_cache()
    assert pages.num_free == free
    assert not demo_llm.engine.scheduler.running
    assert compiles.total == compiled
