"""Connections of clients that are slow, silent, ambiguous or too many: each ends, is told why, and costs little."""

import contextlib
import socket
import threading
import time

import pytest

from serve.connection import SendWatch
from serve.connection_table import ConnectionLimits
from tests.serve.client_checks import check_error
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, error_of, head, is_closed, post, read_all, read_answer, seconds_until_closed

SHORT = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
LONG = {"prompt": "hi", "max_tokens": 15_000, "temperature": 0, "ignore_eos": True, "stream": True}
# An answer of 6 MB, more than the system's buffers take, for little work.
ECHO = {"prompt": ["x" * 100_000] * 4, "n": 16, "echo": True, "max_tokens": 1}
# One limit of a test is short, so that a busy machine does not run into another before its turn.
SHORT_HEAD = ConnectionLimits(header_timeout=0.4)
SHORT_BODY = ConnectionLimits(body_timeout=0.4)
SHORT_SEND = ConnectionLimits(send_timeout=0.4)
# Of a client that would else wait twenty seconds: that the server ends it, however late a busy machine gets there.
SOON = 15


@pytest.fixture
def start(start_server):
    def run(limits: ConnectionLimits, engine: MockEngine | None = None, **options):
        return start_server(served(engine or MockEngine(), byte_tokenizer()), connections=limits, **options)

    return run


@pytest.fixture
def opened():
    """Connections that are closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda connection: stack.enter_context(contextlib.closing(connection))


def drip(connection: socket.socket, data: bytes, seconds: float = 0.1) -> None:
    """Sends a byte now and then until the server has had enough."""

    def run() -> None:
        with contextlib.suppress(OSError):
            for byte in data:
                connection.sendall(bytes([byte]))
                time.sleep(seconds)

    threading.Thread(target=run, daemon=True).start()


def answered(server) -> socket.socket:
    """A connection that has had one answer. A busy machine may be too late with its request: then another one."""
    for _ in range(50):
        connection = connect(server.base_url)
        with contextlib.suppress(OSError):
            connection.sendall(head("GET", "/health"))
            if read_answer(connection).startswith(b"HTTP/1.1 200"):
                return connection
        connection.close()
    raise AssertionError("no request was answered")


def test_a_silent_connection_is_closed(start, opened):
    server = start(SHORT_HEAD)
    silent = opened(connect(server.base_url))
    assert 0.2 < seconds_until_closed(silent) < SOON
    server.wait_until(lambda: len(server.service.connections) == 0)


@pytest.mark.parametrize("later", [False, True])
def test_a_head_that_does_not_end(start, opened, later):
    """A byte now and then does not help, and neither does an earlier request on the same connection."""
    server = start(SHORT_HEAD)
    slow = opened(answered(server) if later else connect(server.base_url))
    drip(slow, head("GET", "/health", x_long="y" * 1000))
    status, error = error_of(read_all(slow))
    assert (status, error["code"]) == (408, "request_timeout")
    assert "head did not arrive within 0.4 s" in error["message"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["announced", "chunked", "expected"])
def test_a_body_that_does_not_end(start, opened, kind):
    server = start(SHORT_BODY)
    slow = opened(connect(server.base_url))
    if kind == "chunked":
        slow.sendall(head(transfer_encoding="chunked"))
        drip(slow, b"1\r\n{\r\n" * 100, 0.02)
    else:
        slow.sendall(head(content_length=100_000, **({"expect": "100-continue"} if kind == "expected" else {})))
        drip(slow, b"{" * 100)
    answer = read_all(slow).removeprefix(b"HTTP/1.1 100 Continue\r\n\r\n")
    status, error = error_of(answer)
    assert (status, error["code"]) == (408, "request_timeout")
    server.wait_until(lambda: server.service.in_flight == 0)


def test_a_body_after_its_answer_is_bounded_too(start, opened):
    server = start(SHORT_BODY)
    slow = opened(connect(server.base_url))
    slow.sendall(head(path="/no/such/path", transfer_encoding="chunked"))
    assert slow.recv(1 << 16).startswith(b"HTTP/1.1 404")
    drip(slow, b"1\r\n{\r\n" * 1000, 0.02)
    assert seconds_until_closed(slow) < SOON


@pytest.mark.slow
def test_an_idle_connection_is_closed_and_a_busy_one_is_not(start, opened):
    engine = MockEngine(step_seconds=0.05)
    limits = ConnectionLimits(header_timeout=1.0, body_timeout=1.0, keep_alive_timeout=1.0, send_timeout=1.0)
    server = start(limits, engine)
    connection = opened(connect(server.base_url))
    connection.sendall(post(SHORT | {"max_tokens": 60, "ignore_eos": True}))  # takes longer than any of the limits
    assert read_answer(connection).startswith(b"HTTP/1.1 200")
    for _ in range(4):  # all in all longer, too
        time.sleep(0.3)
        connection.sendall(post(SHORT))
        assert read_answer(connection).startswith(b"HTTP/1.1 200")
    assert 0.5 < seconds_until_closed(connection) < SOON


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_takes_no_output_is_closed(start, opened, stream):
    engine = MockEngine(max_model_len=300_000)
    server = start(SHORT_SEND, engine)
    body = LONG | {"max_tokens": 100_000, "logprobs": 5} if stream else ECHO
    deaf = opened(connect(server.base_url, receive_buffer=4096))
    deaf.sendall(post(body))
    server.wait_until(lambda: server.service.in_flight == 1)
    server.wait_until(lambda: server.service.in_flight == 0 and len(server.service.connections) == 0, 20)
    server.wait_until(lambda: not engine.has_work)
    assert server.service.engine_thread.num_generations == 0


def test_a_slow_client_that_reads_is_not_closed(start, opened):
    limits = ConnectionLimits(send_timeout=1.0)
    server = start(limits, MockEngine(max_model_len=20_000))
    slow = opened(connect(server.base_url, receive_buffer=4096))
    slow.sendall(post(LONG | {"max_tokens": 2000, "logprobs": 5}))
    received = bytearray()
    started = time.monotonic()
    while b"data: [DONE]" not in received[-100:]:
        part = slow.recv(32 * 1024)
        assert part, "closed"
        received += part
        time.sleep(0.05)
    assert time.monotonic() - started > limits.send_timeout


KIB = 1024


@pytest.mark.parametrize(
    ("unsent", "stuck"),
    [
        ([100 * KIB - 17 * KIB * i for i in range(6)], None),  # slow but steady
        ([100 * KIB, 92 * KIB, 83 * KIB, 75 * KIB, 66 * KIB, 58 * KIB], None),  # not at every look
        ([100 * KIB, *[100 * KIB - 1000 * i for i in range(1, 6)]], 2),  # a sip now and then
        ([10 * KIB, 40 * KIB, 90 * KIB, 90 * KIB], 2),  # more and more waits
        ([10 * KIB, 90 * KIB, 70 * KIB, 50 * KIB, 30 * KIB], None),  # and is taken
        ([10 * KIB, 5 * KIB, 0, 5 * KIB, 0, 5 * KIB], None),  # little, but all of it
        ([50 * KIB, 0, 0, 0, 50 * KIB, 50 * KIB, 50 * KIB], 6),
    ],
)
def test_what_counts_as_taking_output(unsent, stuck):
    """Looked at every six seconds, of ten in which a client must take something."""
    watch = SendWatch(10.0)
    found = [watch.is_stuck(each, 6.0 * i) for i, each in enumerate(unsent)]
    assert (found.index(True) if True in found else None) == stuck


@pytest.mark.long
def test_streams_that_nobody_reads_are_bounded_each(start, opened, caplog):
    engine = MockEngine(max_model_len=200_000)
    limits = ConnectionLimits()  # patient: memory is what ends the request
    server = start(limits, engine, max_unread_bytes=2**20)
    deaf = opened(connect(server.base_url, receive_buffer=4096))
    deaf.sendall(post(LONG | {"max_tokens": 150_000}))
    server.wait_until(lambda: engine.has_work)
    server.wait_until(lambda: not engine.has_work, 60)
    assert len(engine.aborted) == 1
    assert "does not read its stream" in caplog.text
    answer = read_all_of_stream(deaf)
    assert b"the client does not read its stream" in answer[-300:]
    assert len(answer) < 40 * 2**20


def read_all_of_stream(connection: socket.socket) -> bytes:
    received = bytearray()
    while b"data: [DONE]" not in received[-100:]:
        part = connection.recv(1 << 20)
        assert part, bytes(received[-300:])
        received += part
    return bytes(received)


@pytest.mark.long
def test_streams_that_nobody_reads_are_bounded_together(start, opened):
    engine = MockEngine(max_model_len=200_000)
    server = start(ConnectionLimits(), engine, max_unread_bytes=2**40, max_all_unread_bytes=2**19)
    for _ in range(4):
        opened(connect(server.base_url, receive_buffer=4096)).sendall(
            post(LONG | {"max_tokens": 150_000, "logprobs": 5})
        )
    server.wait_until(lambda: len(engine.aborted) >= 2, 60)
    assert server.post("/v1/completions", SHORT).status_code == 200


@pytest.mark.long
def test_answers_that_nobody_reads_are_bounded_together(start, opened):
    server = start(
        ConnectionLimits(max_unsent_bytes=2**18, send_timeout=100, header_timeout=0.4),
        MockEngine(max_model_len=300_000),
    )
    deaf = [opened(connect(server.base_url, receive_buffer=4096)) for _ in range(3)]
    for connection in deaf:
        connection.sendall(post(ECHO))
    server.wait_until(lambda: server.service.in_flight == 3)
    server.wait_until(lambda: server.service.in_flight == 0, 30)
    server.wait_until(lambda: len(server.service.connections) < 3)
    assert server.post("/v1/completions", SHORT).status_code == 200


def test_the_number_of_connections_is_bounded(start, opened, caplog):
    server = start(ConnectionLimits(max_connections=8))
    server.wait_until(lambda: len(server.service.connections) == 0)
    half_open = [opened(connect(server.base_url)) for _ in range(8)]
    server.wait_until(lambda: len(server.service.connections) == 8)
    refused = [opened(connect(server.base_url)) for _ in range(40)]
    for connection in refused:
        connection.sendall(post(SHORT))
    answers = [read_all(connection) for connection in refused]
    told = [answer for answer in answers if answer]
    assert len(told) >= 10  # under a flood some are closed on their unread requests
    for answer in told:
        status, error = error_of(answer)
        assert (status, error["code"]) == (503, "service_unavailable")
        assert b"retry-after: " in answer
    lines = [r for r in caplog.records if "--max-connections 8" in r.getMessage()]
    assert 1 <= len(lines) <= 5
    # One that has sent nothing for a while makes room for one that wants something.
    time.sleep(1.1)
    assert server.post("/v1/completions", SHORT).status_code == 200
    assert is_closed(half_open[0])
    assert not is_closed(half_open[7])
    server.wait_until(lambda: len(server.service.connections) == 7)


def test_a_connection_with_a_request_makes_room_for_nobody(start, opened):
    engine = MockEngine(step_seconds=0.005, max_model_len=20_000)
    server = start(ConnectionLimits(max_connections=3), engine)
    server.wait_until(lambda: len(server.service.connections) == 0)
    streams = [opened(connect(server.base_url)) for _ in range(3)]
    for stream in streams:
        stream.sendall(post(LONG))
        assert stream.recv(12) == b"HTTP/1.1 200"
    time.sleep(1.1)
    check_error(server.get("/health"), 503, None, "service_unavailable")
    streams.pop().close()
    server.wait_until(lambda: server.get("/health").status_code == 200)
    assert all(stream.recv(1 << 16) for stream in streams)


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(SHORT).replace(b"host: x\r\n", b"host: x\r\ntransfer-encoding: chunked\r\n"),
        post(SHORT).replace(b"content-length", b"transfer-encoding: chunked\r\ncontent-length"),
        post(SHORT).replace(b"HTTP/1.1", b"HTTP/1.0").replace(b"content-length", b"transfer-encoding: chunked\r\nx"),
        post(SHORT).replace(b"content-length: ", b"content-length: 1\r\ncontent-length: "),
        post(SHORT).replace(b"content-length: ", b"content-length: +"),
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 100,
        head("GET", "/health", x_big="x" * 100_000),
        b"GET /health HTTP/1.1\r\n\r\n",
        head(transfer_encoding="chunked") + b"nonsense\r\n",
        head(transfer_encoding="chunked") + b"1\r\n \r\n" * 5000,
    ],
    ids=[
        "length and chunks", "chunks and length", "chunks in 1.0", "two lengths", "signed length", "nonsense", "TLS",
        "big head", "no host", "bad chunk", "tiny chunks",
    ],
)  # fmt: skip
def test_bad_http_is_refused_with_openais_body(mock_server, opened, request_bytes):
    connection = opened(connect(mock_server.base_url))
    with contextlib.suppress(ConnectionError):  # closed before it was all sent
        connection.sendall(request_bytes)
    if answer := read_all(connection):
        status, error = error_of(answer)
        assert (status, error["type"], error["code"]) == (400, "invalid_request_error", "invalid_http")
    else:
        assert len(request_bytes) > 20_000
    mock_server.wait_until(lambda: mock_server.service.in_flight == 0)
    assert mock_server.get("/health").status_code == 200


def test_bad_http_does_not_fill_the_log(start, caplog):
    server = start(ConnectionLimits())
    for _ in range(50):
        with contextlib.closing(connect(server.base_url)) as connection:
            connection.sendall(b"nonsense\r\n\r\n")
            assert read_all(connection).startswith(b"HTTP/1.1 400")
    assert sum("Invalid HTTP request" in r.getMessage() for r in caplog.records) == 5


def test_odd_requests_get_errors_of_the_usual_shape(mock_server, opened):
    for method, target in (
        ("OPTIONS", "*"),
        ("GET", "http://evil/health"),
        ("GET", "//evil/health"),
        ("GET", "/v1/models/"),
        ("GET", "/health/"),
        ("CONNECT", "evil:80"),
        ("BREW", "/health"),
        ("POST", "/v1/completions/"),
        ("GET", "/%ff%fe"),
        ("GET", "/" + "x" * 8000),
    ):
        connection = opened(connect(mock_server.base_url))
        connection.sendall(head(method, target, host="evil.example", connection="close"))
        answer = read_all(connection)
        status, _ = error_of(answer)
        assert status in (401, 404, 405), answer[:200]
        assert b"evil" not in answer
        assert b"location" not in answer.lower()


def test_an_upgrade_is_ignored(mock_server, opened, caplog):
    connection = opened(connect(mock_server.base_url))
    connection.sendall(head("GET", "/health", connection="upgrade, close", upgrade="websocket"))
    assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert "upgrade" not in caplog.text.lower()


def test_large_bodies_share_a_budget(start, opened):
    """Each may send a little; what all hold beyond that is bounded, and comes back however they end."""
    server = start(ConnectionLimits())
    budget = server.service.body_bytes
    content = b" " * (4 * 2**20 - 10)
    sending = []
    for _ in range(15):
        connection = opened(connect(server.base_url))
        connection.sendall(head(content_length=4 * 2**20) + content)
        sending.append(connection)
    server.wait_until(lambda: budget.held > 15 * (4 * 2**20 - 2**18))
    refused = opened(connect(server.base_url))
    with contextlib.suppress(ConnectionError):
        refused.sendall(head(content_length=8 * 2**20, connection="close") + b" " * (8 * 2**20 - 10))
    answer = b""
    while b"too many large bodies" not in answer and (more := refused.recv(1 << 16)):  # head and body may come apart
        answer += more
    assert b" 503 " in answer
    assert b"too many large bodies" in answer
    assert server.post("/v1/completions", SHORT).status_code == 200
    sending[0].sendall(b'{"a": 1}  ')
    assert sending[0].recv(1 << 16).startswith(b"HTTP/1.1 400")
    for connection in sending[1:]:
        connection.close()
    refused.close()
    server.wait_until(lambda: budget.held == 0 and server.service.in_flight == 0)
