"""Bytes to and from a server, without an HTTP library: what no decent client sends."""

import json
import re
import socket
import time
from typing import Any

import httpx


def connect(base_url: str, *, receive_buffer: int | None = None) -> socket.socket:
    url = httpx.URL(base_url)
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(20)
    connection.connect((url.host, url.port))
    return connection


def head(method: str = "POST", path: str = "/v1/completions", **headers: Any) -> bytes:
    fields = {"host": "x", "content-type": "application/json"}
    fields |= {name.replace("_", "-"): str(value) for name, value in headers.items()}
    return "".join([f"{method} {path} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in fields.items()), "\r\n"]).encode()


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    content = json.dumps(body).encode()
    return head("POST", path, content_length=len(content)) + content


def read_answer(connection: socket.socket) -> bytes:
    """One whole answer of announced length; less where the server closes the connection."""
    received = bytearray()
    while part := connection.recv(1 << 16):
        received += part
        start, _, body = received.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", start.lower())
        if length and len(body) >= int(length[1]):
            break
    return bytes(received)


def read_all(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection; also what came before it was reset."""
    received = bytearray()
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionResetError:
        pass
    return bytes(received)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection; reads what there is."""
    connection.settimeout(0.0)
    try:
        while connection.recv(1 << 16):
            pass
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
    else:
        return True
    finally:
        connection.settimeout(20)


def error_of(answer: bytes) -> tuple[int, dict[str, Any]]:
    """Status and error of an answer, which has the one shape of errors."""
    start, _, body = answer.partition(b"\r\n\r\n")
    assert start.startswith(b"HTTP/1.1 "), answer[:100]
    assert b"content-type: application/json" in start.lower()
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(start[9:12]), error


def seconds_until_closed(connection: socket.socket) -> float:
    start = time.monotonic()
    read_all(connection)
    return time.monotonic() - start
