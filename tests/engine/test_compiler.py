"""How steps are traced."""

import gc
import threading
import time

import pytest

from jaxspec.engine.compiler import tracing


def test_nothing_is_collected_while_a_step_is_traced():
    assert gc.isenabled()
    with tracing(while_serving=False):
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a step that fails"), tracing(while_serving=False):
        raise ValueError("a step that fails")
    assert gc.isenabled()


@pytest.mark.parametrize("while_serving", [False, True])
def test_what_a_trace_leaves_is_looked_through_where_nobody_waits_only(while_serving):
    gc.collect()
    gc.unfreeze()
    try:
        with tracing(while_serving=while_serving):
            left = [[] for _ in range(1000)]
        assert (gc.get_freeze_count() >= len(left)) == while_serving
    finally:
        gc.unfreeze()


def test_what_was_off_stays_off():
    gc.disable()
    try:
        with tracing(while_serving=False):
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_one_step_is_traced_at_a_time():
    inside, seen, entered = 0, set(), threading.Barrier(4)

    def trace():
        nonlocal inside
        entered.wait()
        for _ in range(50):
            with tracing(while_serving=False):
                inside += 1
                time.sleep(0)  # another thread's turn
                seen.add((inside, gc.isenabled()))
                inside -= 1

    threads = [threading.Thread(target=trace) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == {(1, False)}
    assert gc.isenabled()
