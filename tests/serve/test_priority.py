"""The priority of a request reaches the engine, where lower runs earlier."""

import threading

import pytest

from tests.serve.client_checks import client
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

LOWEST, HIGHEST = -(2**63), 2**63 - 1


@pytest.mark.parametrize("chat", [False, True])
def test_lower_runs_earlier(start_server, chat):
    engine = MockEngine(max_running=1)
    server = start_server(served(engine, byte_tokenizer()))

    def run(extra: dict[str, int]) -> None:
        options = {"model": "mock", "max_tokens": 20, "extra_body": {"ignore_eos": True, **extra}}
        if chat:
            client(server.base_url).chat.completions.create(messages=[{"role": "user", "content": "hi"}], **options)
        else:
            client(server.base_url).completions.create(prompt="hi", **options)

    engine.gate.clear()
    threads = []
    for extra in ({"priority": 5}, {"priority": HIGHEST}, {}, {"priority": -3}, {"priority": LOWEST}, {"priority": 5}):
        threads.append(threading.Thread(target=run, args=(extra,)))
        threads[-1].start()
        server.wait_until(lambda: server.service.in_flight == len(threads))
    server.wait_until(lambda: server.service.engine_thread.num_generations == len(threads))
    engine.gate.set()
    for thread in threads:
        thread.join()
    assert [r.priority for r in engine.finished] == [LOWEST, -3, 0, 5, 5, HIGHEST]
    first, second = engine.finished[3:5]
    assert first.arrival_time < second.arrival_time
