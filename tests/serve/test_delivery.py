"""When outputs leave the engine thread: beside a device that runs a step, after the next one has been dispatched."""

import json
import threading

import pytest

from tests.serve.client_checks import sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

BODY = {"prompt": "hi", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": True}


class Ahead(MockEngine):
    """With a step in flight as long as it has work, as a device's engine.

    Attributes:
        dispatches: how often a step was to be dispatched; from the second on it waits for `may_dispatch`.
        read: how many steps were read.
    """

    def __init__(self) -> None:
        super().__init__(step_seconds=0.0)
        self.dispatches = self.read = 0
        self.may_dispatch = threading.Event()
        self.broken = False

    def dispatch_ahead(self) -> None:
        self.dispatches += 1
        self.steps_in_flight = 1
        if self.dispatches > 1:
            assert self.may_dispatch.wait(30)
            if self.broken:
                raise RuntimeError("the device is gone")

    def read_oldest(self):
        outputs = super().read_oldest()
        self.read += 1
        self.steps_in_flight = int(self.has_work)
        return outputs


def text_of(events: list[str]) -> str:
    assert events[-1] == "[DONE]"
    return "".join(choice["text"] for event in events[:-1] for choice in json.loads(event)["choices"])


def first_tokens(server) -> float:
    """Requests of which a token has left the engine thread."""
    [line] = [
        x for x in server.get("/metrics").text.splitlines() if x.startswith("jaxspec:time_to_first_token_seconds_count")
    ]
    return float(line.split()[-1])


@pytest.fixture
def streaming(start_server):
    """A server with a step read whose outputs are not delivered, and what its client has got in the end."""
    engine, got = Ahead(), []
    server = start_server(served(engine, byte_tokenizer()))
    thread = threading.Thread(target=lambda: got.extend(sse(server.base_url, "/v1/completions", BODY)[1]))
    thread.start()
    server.wait_until(lambda: engine.dispatches == 2)
    assert engine.read == 1
    assert first_tokens(server) == 0
    yield engine, server, thread, got
    engine.may_dispatch.set()
    thread.join(30)


def test_outputs_leave_once_the_next_step_is_dispatched(streaming, mock_server):
    engine, server, thread, got = streaming
    engine.may_dispatch.set()
    thread.join(30)
    assert text_of(got) == text_of(sse(mock_server.base_url, "/v1/completions", BODY)[1]) != ""
    assert first_tokens(server) == 1
    server.wait_until(lambda: not server.service.engine_thread.num_generations)


def test_outputs_leave_where_the_next_step_fails(streaming):
    """What was read before counts, and the client is told."""
    engine, server, thread, got = streaming
    engine.broken = True
    engine.may_dispatch.set()
    thread.join(30)
    assert first_tokens(server) == 1
    assert "error" in got[-2]
    assert got[-1] == "[DONE]"
