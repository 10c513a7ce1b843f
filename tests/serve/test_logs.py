"""What any client can cause as often as it likes costs a bounded part of the log."""

import logging
import re

import pytest

from serve.log_limit import LimitedLogger
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.raw import connect, head, post

ABORTED = {"prompt": "hi", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def test_a_template_is_written_a_few_times_a_minute(caplog):
    now = 0.0
    log = LimitedLogger(logging.getLogger("some"), clock=lambda: now)
    for i in range(100):
        log.warning("bad thing %d", i)
    log.error("another thing")
    now = 61.0
    log.warning("bad thing %d", 100)
    assert [r.getMessage() for r in caplog.records if r.name == "some"] == [
        *(f"bad thing {i}" for i in range(5)),
        "another thing",
        "95 more lines in 61 s like the following one",
        "bad thing 100",
    ]


def test_what_is_not_logged_does_not_count(caplog):
    log = LimitedLogger(logging.getLogger("some"), clock=lambda: 0.0)
    for _ in range(10):
        log.debug("bad thing")
    caplog.set_level("DEBUG")
    log.debug("bad thing")
    assert len([r for r in caplog.records if r.name == "some"]) == 1


def test_what_a_client_names_is_cut(mock_server, caplog):
    caplog.set_level("INFO", "jaxspec.access")
    path, method = "/" + "p" * 5000, "M" * 5000
    connection = connect(mock_server.base_url)
    connection.sendall(head(method, path, connection="close"))
    assert connection.recv(12) == b"HTTP/1.1 404"
    connection.close()
    mock_server.wait_until(lambda: "ppp" in caplog.text)
    line = next(r.getMessage() for r in caplog.records if "ppp" in r.getMessage())
    assert len(line) < 250
    assert line.startswith("M" * 64 + " '/ppp")


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=pytest.mark.full)])
def test_aborts_are_a_line_each(start_server, caplog, count):
    """Ten thousand of them: less than 20 MB of log."""
    caplog.set_level("INFO")
    engine = MockEngine(step_seconds=0.001)
    server = start_server(served(engine, byte_tokenizer()))
    for i in range(count):
        connection = connect(server.base_url)
        connection.sendall(post(ABORTED | {"stream": i % 2 == 0}))
        if i % 3:
            connection.recv(12) if i % 2 == 0 else None
        connection.close()
    server.wait_until(lambda: server.service.in_flight == 0 and not engine.has_work)
    ours = [r for r in caplog.records if r.name.startswith(("jaxspec", "uvicorn", "asyncio"))]
    assert not [r for r in ours if r.levelno >= logging.ERROR or r.exc_info]
    access = [r.getMessage() for r in ours if r.name == "jaxspec.access"]
    assert count / 2 < len(access) <= count + 5
    assert all(re.search(r"id=\S+$", line) for line in access)
    assert sum(len(r.getMessage()) for r in ours) < count * 2000  # 20 MB for ten thousand
