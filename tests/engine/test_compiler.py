"""How steps are traced."""

import gc
import threading
import time

import pytest

from jaxspec.engine.compiler import tracing


def test_nothing_is_collected_while_a_step_is_traced():
    assert gc.isenabled()
    with tracing():
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ValueError, match="a step that fails"), tracing():
        raise ValueError("a step that fails")
    assert gc.isenabled()


def test_what_was_off_stays_off():
    gc.disable()
    try:
        with tracing():
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
            with tracing():
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
