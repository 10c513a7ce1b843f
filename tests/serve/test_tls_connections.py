"""Connections over TLS: the same limits, and several requests on one connection."""

import contextlib
import dataclasses
import ssl
import subprocess
import time
from pathlib import Path

import pytest

from serve.connection_table import ConnectionLimits
from serve.tls import Tls
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, error_of, head, is_closed, post, read_all, seconds_until_closed

SHORT = {"prompt": "hi", "max_tokens": 4, "temperature": 0}
DEAF = {"prompt": "hi", "max_tokens": 100_000, "ignore_eos": True, "stream": True, "logprobs": 5}
# A second is enough for a handshake on a busy machine, which has the time of a head.
QUICK = ConnectionLimits(header_timeout=1.0, body_timeout=1.0, keep_alive_timeout=1.0, send_timeout=0.4)
SOON = 15


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
    assert 0.1 < seconds_until_closed(connection) < SOON


@pytest.mark.slow
def test_heads_and_bodies_that_do_not_end(start):
    server, _, open_one = start
    for sent, part in ((head()[:-10], "head"), (head(content_length=1000) + b"{", "body")):
        slow = open_one()
        slow.sendall(sent)
        status, error = error_of(read_all(slow))
        assert (status, error["code"]) == (408, "request_timeout")
        assert f"{part} did not arrive within 1 s" in error["message"]
    assert 0.2 < seconds_until_closed(open_one()) < SOON  # silent after the handshake
    # These clients have not said that they end the connection too, for which TLS by itself would wait half a minute.
    server.wait_until(lambda: len(server.service.connections) == 0, 15)


@pytest.mark.slow
def test_a_client_that_takes_no_output_is_closed(start):
    server, engine, open_one = start
    open_one(receive_buffer=4096).sendall(post(DEAF))
    server.wait_until(lambda: server.service.in_flight == 1)
    server.wait_until(lambda: server.service.in_flight == 0 and len(server.service.connections) == 0, 20)
    server.wait_until(lambda: not engine.has_work)


def start_tls(start_server, tls, **limits):
    server = start_server(
        served(MockEngine(), byte_tokenizer()), connections=ConnectionLimits(**limits), tls=tls, wait_ready=False
    )
    server.wait_until(lambda: server.service.engine_thread.model is not None)
    return server


def trusting(tls: Tls) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(tls.certfile))
    context.check_hostname = False
    return context


def answer_to(server, context: ssl.SSLContext) -> bytes:
    """The beginning of the answer to a short request on a connection of its own; nothing where there is none."""
    with contextlib.suppress(OSError), context.wrap_socket(connect(server.base_url)) as connection:
        connection.sendall(post(SHORT))
        return connection.recv(12)
    return b""


def test_a_handshake_that_does_not_end_is_closed(start_server, tls):
    server = start_tls(start_server, tls, header_timeout=1.0)
    with contextlib.closing(connect(server.base_url)) as silent:
        assert 0.2 < seconds_until_closed(silent) < SOON
    with contextlib.closing(connect(server.base_url)) as plain:
        plain.sendall(post(SHORT))
        read_all(plain)
    server.wait_until(lambda: len(server.service.connections) == 0)
    assert answer_to(server, trusting(tls)) == b"HTTP/1.1 200"


def test_handshakes_count_among_the_connections(start_server, tls, caplog):
    server = start_tls(start_server, tls, max_connections=4)
    with contextlib.ExitStack() as stack:
        half_open = [stack.enter_context(contextlib.closing(connect(server.base_url))) for _ in range(4)]
        server.wait_until(lambda: len(server.service.connections) == 4)
        assert answer_to(server, trusting(tls)) == b""
        assert "--max-connections 4" in caplog.text
        time.sleep(1.1)  # from then on they make room for others
        assert answer_to(server, trusting(tls)) == b"HTTP/1.1 200"
        assert is_closed(half_open[0])
        assert not is_closed(half_open[3])


def test_a_request_may_come_with_the_end_of_the_handshake(start_server, tls):
    server = start_tls(start_server, tls)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = trusting(tls).wrap_bio(incoming, outgoing)
    with contextlib.closing(connect(server.base_url)) as raw:
        while True:
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                raw.sendall(outgoing.read())
                incoming.write(raw.recv(1 << 16))
        client.write(post(SHORT))
        raw.sendall(outgoing.read())  # both in one piece
        answer = b""
        while b"HTTP/1.1 200" not in answer:
            part = raw.recv(1 << 16)
            assert part, answer
            incoming.write(part)
            with contextlib.suppress(ssl.SSLWantReadError):
                answer += client.read(1 << 16)


def test_certificates_of_clients(start_server, tls):
    server = start_tls(start_server, dataclasses.replace(tls, ca_certs=tls.certfile, cert_reqs=2))
    context = trusting(tls)
    assert answer_to(server, context) == b""
    context.load_cert_chain(tls.certfile, tls.keyfile)
    assert answer_to(server, context) == b"HTTP/1.1 200"
