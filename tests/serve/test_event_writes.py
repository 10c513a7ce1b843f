"""Events that a connection writes to its socket itself: a client gets all bytes in order, however it reads."""

import asyncio
import itertools
import random
import threading
import time

import h11
import pytest
import uvicorn

from serve.connection import EVENTS_KEY
from serve.connection_table import ConnectionLimits, ConnectionTable
from serve.server import bind
from tests.serve.raw import connect, head

SIZES = [1, 400, 70, 0, 3_000_000, 5, 250_000, 1, 1, 2_000_000, 17]


def events() -> list[bytes]:
    random_bytes = random.Random(0).randbytes
    return [random_bytes(size) for size in SIZES]


class App:
    """Streams the events; every third one as any ASGI application would.

    Attributes:
        waited: the most bytes that waited for the client.
        ended: set when all has been sent.
    """

    def __init__(self):
        self.waited = 0
        self.ended = threading.Event()

    async def __call__(self, scope, _receive, send):
        assert scope["type"] == "http"
        connection = scope[EVENTS_KEY]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for i, event in enumerate(events()):
            if i % 3 == 2:
                await send({"type": "http.response.body", "body": event, "more_body": True})
            else:
                connection.write_event(event)
            self.waited = max(self.waited, connection.unsent)
            await connection.drain()
            assert connection.keeps_up
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        self.ended.set()


@pytest.fixture(params=["uvloop", "asyncio"])
def serving(request):
    """The application and its address, on both event loops."""
    app, sock = App(), bind("127.0.0.1", 0)
    protocol = ConnectionTable(ConnectionLimits()).protocol(None)
    config = uvicorn.Config(app, loop=request.param, http=protocol, ws="none", lifespan="off", log_config=None)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio_run(server, sock, config))
    thread.start()
    yield app, f"http://127.0.0.1:{sock.getsockname()[1]}"
    server.should_exit = True
    thread.join(10)
    assert not thread.is_alive()


def asyncio_run(server: uvicorn.Server, sock, config: uvicorn.Config) -> None:
    with asyncio.Runner(loop_factory=config.get_loop_factory()) as runner:
        runner.run(server.serve([sock]))


def body_of(received: bytes) -> bytes:
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="GET", target="/", headers=[("host", "x"), ("connection", "close")]))
    client.send(h11.EndOfMessage())
    client.receive_data(received)
    parts = []
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        assert event is not h11.NEED_DATA, "the answer is cut"
        if isinstance(event, h11.Data):
            parts.append(bytes(event.data))
    return b"".join(parts)


def test_a_slow_reader_gets_all_of_it_in_order(serving):
    app, url = serving
    with connect(url, receive_buffer=4096) as client:
        client.sendall(head("GET", "/", connection="close"))
        received = bytearray()
        for i in itertools.count():
            if i % 50 == 0:
                time.sleep(0.002)
            part = client.recv(1 << 16)
            if not part:
                break
            received += part
    assert app.waited > 100_000  # the socket took less than it was given
    assert body_of(bytes(received)) == b"".join(events())


def test_a_client_that_leaves_ends_nothing_but_its_answer(serving):
    app, url = serving
    with connect(url, receive_buffer=4096) as client:
        client.sendall(head("GET", "/"))
        client.recv(1000)
    assert app.ended.wait(10)  # what is sent to nobody is dropped
    with connect(url) as client:
        client.sendall(head("GET", "/", connection="close"))
        received = b"".join(iter(lambda: client.recv(1 << 20), b""))
    assert body_of(received) == b"".join(events())
