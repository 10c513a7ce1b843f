"""The server as a process: port, signals, exit codes, output. The engine is the mock, the rest is what users run."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from jaxspec.errors import ConfigError
from serve.cli import main
from serve.server import bind
from tests.serve.client_checks import check_error, sse
from tests.serve.raw import connect, error_of, head, post, read_all, seconds_until_closed
from tests.serve.server_processes import Process, Servers

# Seconds that a busy machine may take for what happens at once.
SLACK = 8.0
SLOW = {"prompt": "hi", "max_tokens": 200, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def start(servers: Servers) -> Iterator[Callable[..., Process]]:
    processes: list[Process] = []

    def run(*arguments: str, **options: Any) -> Process:
        processes.append(Process(servers, *arguments, **options))
        return processes[-1]

    yield run
    for process in processes:
        process.kill()


@pytest.mark.slow
def test_sigterm_finishes_what_runs_and_lets_nobody_in(start):
    process = start("mock", "--port", "0")
    url = process.base_url
    results: dict[str, object] = {}

    def stream() -> None:
        results["events"] = sse(url, "/v1/completions", SLOW | {"stream": True})[1]

    threads = [threading.Thread(target=stream)]
    for thread in threads:
        thread.start()
    while 'jaxspec:num_requests_running{engine="0",model_name="mock"} 1.0' not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    process.wait_for("SIGTERM")
    ready = httpx.get(f"{url}/ready")
    assert (ready.status_code, ready.json()) == (503, {"status": "draining"})
    assert httpx.get(f"{url}/health").status_code == 200
    refused = httpx.post(f"{url}/v1/completions", json=SLOW)
    assert "shutting down" in check_error(refused, 503, None, "service_unavailable")
    assert refused.headers["retry-after"]
    for thread in threads:
        thread.join()
    assert results["events"][-1] == "[DONE]"
    assert '"finish_reason":"length"' in results["events"][-2]
    assert process.exit_code() == 0, process.output
    assert "Traceback" not in process.output


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_server_ends_at_once(start, number):
    process = start("mock", "--port", "0")
    assert httpx.get(f"{process.base_url}/health").status_code == 200
    process.signal(number)
    assert process.exit_code() == 0, process.output
    assert "Traceback" not in process.output


@pytest.mark.long
@pytest.mark.parametrize("how", ["timeout", "second signal"])
def test_what_does_not_finish_in_time_gets_an_error(start, how):
    process = start("mock", "--port", "0", "--shutdown-timeout", "0.2" if how == "timeout" else "60")
    url = process.base_url
    events: list[str] = []
    body = SLOW | {"max_tokens": 500, "stream": True}
    thread = threading.Thread(target=lambda: events.extend(sse(url, "/v1/completions", body)[1]))
    thread.start()
    while 'num_requests_running{engine="0",model_name="mock"} 1.0' not in httpx.get(f"{url}/metrics").text:
        time.sleep(0.01)
    process.signal(signal.SIGTERM)
    if how == "second signal":
        process.wait_for("SIGTERM")
        process.signal(signal.SIGTERM)
    thread.join()
    assert events[-1] == "[DONE]"
    assert '"service_unavailable"' in events[-2]
    assert process.exit_code() == (0 if how == "timeout" else 128 + signal.SIGTERM), process.output
    assert "Traceback" not in process.output


def hold(url: str) -> dict[str, socket.socket]:
    """Requests that never end by themselves, each in another way."""
    sent = {
        "unfinished body": head(content_length=1000) + b"{",
        "unread stream": post(SLOW | {"max_tokens": 90_000, "stream": True, "logprobs": 5}),
        "unread answer": post(SLOW | {"prompt": ["x" * 1000] * 4, "n": 16, "max_tokens": 1000}),
        "tokenisation": post(SLOW | {"prompt": "sleep"}),
        "template": post({"messages": [{"role": "user", "content": "x"}]}, "/v1/chat/completions"),
        "silence": b"",
    }
    connections = {}
    for name, request in sent.items():
        connections[name] = connect(url, receive_buffer=4096)
        connections[name].sendall(request)
    time.sleep(0.5)
    return connections


@pytest.mark.long
@pytest.mark.parametrize("signals", [1, 2])
def test_nothing_holds_the_end_up(start, signals):
    """An unfinished body, an unread stream, a tokeniser that does not come back, a template that loops: all at once."""
    process = start("busy", "--port", "0", "--shutdown-timeout", "5" if signals == 1 else "600")
    connections = hold(process.base_url)
    started = time.monotonic()
    process.signal(signal.SIGTERM)
    if signals == 2:
        process.wait_for("SIGTERM")
        process.signal(signal.SIGTERM)
    told = [error_of(read_all(connections[name])) for name in ("unfinished body", "tokenisation", "template")]
    code = process.exit_code()
    seconds = time.monotonic() - started
    assert code == (0 if signals == 1 else 128 + signal.SIGTERM), process.output
    assert seconds < SLACK + (5 if signals == 1 else 1)
    assert [(status, error["code"]) for status, error in told] == [(503, "service_unavailable")] * 3
    assert "Traceback" not in process.output
    for connection in connections.values():
        connection.close()


@pytest.mark.slow
def test_a_short_shutdown_timeout_ends_within_a_second_more(start):
    process = start("busy", "--port", "0", "--shutdown-timeout", "0")
    connections = hold(process.base_url)
    started = time.monotonic()
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0, process.output
    assert time.monotonic() - started < 1 + SLACK
    for connection in connections.values():
        connection.close()


@pytest.mark.long
def test_an_answer_that_is_read_slowly_is_waited_for(start):
    """All of it has been written, but its client has not taken it yet."""
    process = start("busy", "--port", "0")
    with contextlib.closing(connect(process.base_url, receive_buffer=4096)) as slow:
        slow.sendall(post(SLOW | {"prompt": ["x" * 90_000] * 4, "n": 16, "echo": True, "max_tokens": 1}))
        answer = slow.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 200")
        process.signal(signal.SIGTERM)
        process.wait_for("SIGTERM")
        time.sleep(2.0)  # longer than idle connections are given to end
        answer += read_all(slow)
    content = answer.partition(b"\r\n\r\n")[2]
    assert len(content) > 16 * 4 * 90_000
    assert len(json.loads(content)["choices"]) == 64
    assert process.exit_code() == 0, process.output


@pytest.mark.long
def test_an_event_loop_that_freezes_while_it_drains_does_not_hold_the_end_up(start):
    process = start("freezes", "--port", "0", "--shutdown-timeout", "4", "--engine-timeout", "0")
    with contextlib.closing(connect(process.base_url)) as connection:
        connection.sendall(post(SLOW | {"max_tokens": 400, "stream": True}))
        assert connection.recv(12) == b"HTTP/1.1 200"
        process.signal(signal.SIGTERM)
        started = time.monotonic()
        assert process.exit_code() == 0, process.output
        assert 2.0 < time.monotonic() - started < 4 + SLACK


@pytest.mark.long
def test_a_stuck_step_ends_the_process(start):
    process = start("stuck", "--port", "0", "--engine-timeout", "1")
    response = httpx.post(f"{process.base_url}/v1/completions", json=SLOW, timeout=20)
    check_error(response, 500, None, "server_error")
    assert process.exit_code() == 1
    assert "an engine step has not ended within 1 s (--engine-timeout)" in process.output
    assert "gate.wait" in process.output  # where it is stuck


@pytest.mark.long
def test_a_frozen_event_loop_ends_the_process(start):
    """But not one that was suspended, together with its watch."""
    process = start("frozen", "--port", "0", "--engine-timeout", "1")
    url = process.base_url
    process.signal(signal.SIGSTOP)
    time.sleep(2.5)
    process.signal(signal.SIGCONT)
    assert httpx.get(f"{url}/health", timeout=20).status_code == 200
    with pytest.raises(httpx.TransportError):
        httpx.post(f"{url}/v1/completions", json=SLOW, timeout=20)
    assert process.exit_code() == 1
    assert "the event loop has not answered for 1 s (--engine-timeout)" in process.output
    assert "reject_too_long" in process.output  # where it is


@pytest.mark.slow
def test_half_open_connections_do_not_starve_a_server_with_few_descriptors(start):
    process = start("mock", "--port", "0", descriptors=256)
    url = process.base_url
    half_open = [connect(url) for _ in range(400)]
    process.wait_for("256 descriptors): others are refused")
    time.sleep(1.1)
    assert httpx.post(f"{url}/v1/completions", json=SLOW | {"max_tokens": 2}).status_code == 200
    assert process.output.count("others are refused") <= 5
    assert "out of system resource" not in process.output
    for connection in half_open:
        connection.close()
    assert httpx.get(f"{url}/health").status_code == 200


@pytest.mark.slow
def test_deadlines_are_what_the_flags_say(start):
    process = start("mock", "--port", "0", "--request-timeout", "0.5", "--queue-timeout", "0.25")
    response = httpx.post(f"{process.base_url}/v1/completions", json=SLOW)
    assert "within 0.5 s (--request-timeout)" in check_error(response, 504, None, "timeout")


@pytest.mark.long
def test_slow_connections_end_when_the_flags_say(start):
    flags = {"--header-timeout": "1", "--body-timeout": "2", "--send-timeout": "3", "--timeout-keep-alive": "4"}
    process = start("busy", "--port", "0", *(word for flag in flags.items() for word in flag))
    sent = {
        "head": head()[:-10],
        "body": head(content_length=1000) + b"{",
        "output": post(SLOW | {"prompt": ["x" * 90_000] * 4, "n": 16, "echo": True, "max_tokens": 1}),
        "idle": head("GET", "/health"),
    }
    with contextlib.ExitStack() as stack:
        opened = {}
        for name, request in sent.items():
            opened[name] = stack.enter_context(contextlib.closing(connect(process.base_url, receive_buffer=4096)))
            opened[name].sendall(request)
        for name, seconds in (("head", 1), ("body", 2)):
            status, error = error_of(read_all(opened[name]))
            assert (status, error["code"]) == (408, "request_timeout")
            assert f"{name} did not arrive within {seconds} s (--{name.replace('head', 'header')}-timeout)" in str(
                error
            )
        process.wait_for("takes no output for 3 s (--send-timeout): connection closed")
        assert seconds_until_closed(opened["idle"]) < 10


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("request-timeout", "-1"),
        ("queue-timeout", "nan"),
        ("max-connections", "0"),
        ("timeout-keep-alive", "0"),
        ("header-timeout", "0"),
        ("body-timeout", "-1"),
        ("send-timeout", "0.5"),
        ("shutdown-timeout", "inf"),
    ],
)
def test_limits_that_cannot_be(capsys, flag, value):
    assert main(["serve", f"--{flag}", value]) == 1
    assert re.match(rf"error: --{flag} must be a number of at least [01], got {value}", capsys.readouterr().err)


@pytest.mark.slow
def test_engine_death_ends_the_process(start):
    process = start("dies", "--port", "0")
    check_error(httpx.post(f"{process.base_url}/v1/completions", json=SLOW), 500, None, "server_error")
    assert process.exit_code() == 1
    assert "out of luck" in process.output  # in the log, for whoever runs it


@pytest.mark.slow
def test_a_signal_while_loading(start):
    process = start("slow", "--port", "0")
    process.wait_for("compiling")
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0, process.output
    assert "Traceback" not in process.output


def test_a_model_that_cannot_be_loaded(start):
    process = start("broken", "--port", "0")
    assert process.exit_code() == 1
    assert process.output.splitlines()[-1] == "error: the folder has no config.json"
    assert "Traceback" not in process.output


def test_a_port_that_is_bound_is_taken():
    """At once: not only when the event loop runs."""
    with contextlib.closing(bind("127.0.0.1", 0)) as sock, pytest.raises(ConfigError, match="Address already in use"):
        bind("127.0.0.1", sock.getsockname()[1])


@pytest.mark.slow
def test_the_port_is_taken_before_the_model_loads(start):
    first = start("slow", "--port", "0", "--log-level", "debug")
    first.wait_for("Listening on")
    port = first.output.split("Listening on ")[1].split()[0].rpartition(":")[2]
    second = start("slow", "--port", port)
    assert second.exit_code() == 1
    assert second.output.startswith(f"error: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert httpx.get(f"http://127.0.0.1:{port}/ready").json()["status"] == "loading"


def test_what_start_up_prints(start):
    process = start("mock", "--port", "0", "--max_num-seqs", "4", JAXSPEC_API_KEY="secret-key")
    url = process.base_url
    lines = process.output.splitlines()
    assert lines[0].startswith("jaxspec ")
    for expected in (
        "Options from the command line: port=0, max_num_seqs=4",
        "Loading mock",
        "Model:    mock",
        f"Serving mock at {url}. Try, with one of the keys in $JAXSPEC_API_KEY:",
    ):
        assert expected in lines, process.output
    assert any(line.endswith("s] compiling") for line in lines)
    routes = next(line for line in lines if "Routes: " in line)
    for route in ("GET /health", "GET /metrics", "POST /v1/chat/completions", "POST /tokenize"):
        assert route in routes
    assert "curl" in lines[-1] or "curl" in process.output
    assert "secret-key" not in process.output
    assert httpx.get(f"{url}/v1/models").status_code == 401
    assert httpx.get(f"{url}/v1/models", headers={"authorization": "Bearer secret-key"}).status_code == 200
    curl = next(line for line in lines if "curl" in line)
    answer = subprocess.run(
        ["bash", "-c", curl], capture_output=True, env={**os.environ, "JAXSPEC_API_KEY": "secret-key"}, check=True
    )
    assert b'"text_completion"' in answer.stdout
    assert "without --api-key" not in process.output


def test_an_open_server_warns(start):
    process = start("mock", "--port", "0", "--host", "0.0.0.0")
    process.wait_for("listening on 0.0.0.0 without --api-key: anybody may use it")


@pytest.mark.slow
def test_the_queue_is_as_long_as_the_flag_says(start):
    process = start("mock", "--port", "0", "--max-num-queued-requests", "3")
    url = process.base_url
    refused = httpx.post(f"{url}/v1/completions", json=SLOW | {"n": 4})
    assert "at most 3 may be queued" in check_error(refused, 400, "n")
    assert httpx.post(f"{url}/v1/completions", json=SLOW | {"n": 3, "max_tokens": 2}).status_code == 200


def test_synthetic_acceptance_warns(start):
    process = start("mock", "--port", "0", "--num-speculative-tokens", "3", "--synthetic-acceptance-length", "2.5")
    process.wait_for("--synthetic-acceptance-length 2.5: drafts are accepted at random, so every text is worthless")
