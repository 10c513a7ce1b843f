"""Traffic of rude clients and of constrained and calling ones for a while, after which nothing is missing.

No page, slot, matcher, descriptor, thread or memory.
"""

import collections

import pytest

from jaxspec.compat import compiles
from serve.deadlines import Deadlines
from serve.model import ServedModel
from tests.serve.chats import HERMES, chat_engine
from tests.serve.soak import SETTINGS, Soak, stream_is_whole, usage

REQUIRED = (
    "valid 200", "canary 200", "aborted", "slow reader", "half-open, told 408", "half a body, told 408",
    "bad body 400", "bad HTTP 400", "flood 200", "flood 429", "tokenize 200", "constrained, aborted", "constrained 200",
    "constrained, valid", "called", "tools 200", "bad schema 400",
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


@pytest.mark.long
def test_soak(start_server):
    engine, model = chat_engine(None, step_seconds=0.002, max_model_len=1024)
    engine.finished = collections.deque(maxlen=0)  # the mock would keep them all
    soak = Soak(start_server(model, **SETTINGS))
    check_soak(soak, 30.0, most_mib=100.0)
    assert len(engine.aborted) > 20


@pytest.mark.full
def test_soak_with_the_demo_model_for_half_an_hour(start_server, demo_llm):
    counts = lambda: (compiles.total, compiles.after_warmup)  # noqa: E731
    tokenizer = demo_llm.tokenizer.with_chat_template(HERMES)  # its own has no place for tools
    model = ServedModel(demo_llm.engine, tokenizer, demo_llm.describe(), counts, grammars=demo_llm.grammars)
    # A call takes the model some seconds, more where others share the machine.
    server = start_server(model, **SETTINGS | {"deadlines": Deadlines(request=12.0, queue=9.0)})
    compiled = compiles.total
    pages = demo_llm.engine.scheduler.pages
    demo_llm.engine.reset_prefix_cache()
    free = pages.num_free
    check_soak(Soak(server), 1800.0, most_mib=200.0)
    demo_llm.engine.reset_prefix_cache()
    assert pages.num_free == free
    assert not demo_llm.engine.scheduler.running
    assert compiles.total == compiled
