"""Connections over TLS: the same limits, and several requests on one connection."""

import ssl
import subprocess
from pathlib import Path

import pytest

from serve.connection_table import ConnectionLimits
from serve.tls import Tls
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, error_of, head, post, read_all, seconds_until_closed

SHORT = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
DEAF = {"prompt": "hi", "max_tokens": 100_000, "ignore_eos": True, "stream": True, "logprobs": 5}
QUICK = ConnectionLimits(header_timeout=0.4, body_timeout=0.4, keep_alive_timeout=0.4, send_timeout=0.4)


@pytest.fixture(scope="module")
def tls(tmp_path_factory) -> Tls:
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    new = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-days", "2"]
    subprocess.run(
        [*new, "-nodes", "-keyout", str(key), "-out", str(cert), "-subj", "/CN=localhost"],
        check=True,
        capture_output=True,
    )
    return Tls(Path(cert), Path(key))


@pytest.fixture
def start(start_server, tls):
    """The server, and what opens a connection to it."""
    context = ssl.create_default_context(cafile=str(tls.certfile))
    context.check_hostname = False
    engine = MockEngine(max_model_len=300_000)
    server = start_server(served(engine, byte_tokenizer()), connections=QUICK, tls=tls, wait_ready=False)
    server.wait_until(lambda: server.service.engine_thread.model is not None)
    opened: list[ssl.SSLSocket] = []

    def open_one(**options) -> ssl.SSLSocket:
        opened.append(context.wrap_socket(connect(server.base_url, **options), suppress_ragged_eofs=True))
        return opened[-1]

    yield server, engine, open_one
    for connection in opened:
        connection.close()


def test_keep_alive_and_its_end(start):
    _, _, open_one = start
    connection = open_one()
    for _ in range(3):
        connection.sendall(post(SHORT))
        answer = b""
        while not answer.endswith(b"}}}"):  # a record at a time
            part = connection.recv(1 << 16)
            assert part, answer
            answer += part
        assert answer.startswith(b"HTTP/1.1 200")
    assert 0.1 < seconds_until_closed(connection) < 5


def test_heads_and_bodies_that_do_not_end(start):
    server, _, open_one = start
    for sent, part in ((head()[:-10], "head"), (head(content_length=1000) + b"{", "body")):
        slow = open_one()
        slow.sendall(sent)
        status, error = error_of(read_all(slow))
        assert (status, error["code"]) == (408, "request_timeout")
        assert f"{part} did not arrive within 0.4 s" in error["message"]
    assert 0.2 < seconds_until_closed(open_one()) < 5  # silent after the handshake
    # These clients have not said that they end the connection too, for which TLS by itself would wait half a minute.
    server.wait_until(lambda: len(server.service.connections) == 0, 15)


def test_a_client_that_takes_no_output_is_closed(start):
    server, engine, open_one = start
    open_one(receive_buffer=4096).sendall(post(DEAF))
    server.wait_until(lambda: server.service.in_flight == 1)
    server.wait_until(lambda: server.service.in_flight == 0 and len(server.service.connections) == 0, 20)
    server.wait_until(lambda: not engine.has_work)
