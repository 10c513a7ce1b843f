"""Rank 0 of a group as a process, with the mock engine: how its end is the group's. The test itself is the other rank.

`tests/serve/test_nodes.py` has groups that share a model, `tests/engine/test_group.py` groups without a server.
"""

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from jaxspec.engine.follower import Follower
from jaxspec.nodes import Nodes
from tests.cut_proxy import free_ports
from tests.serve.server_processes import Process, Servers

SLOW = {"prompt": "hi", "max_tokens": 100, "temperature": 0, "ignore_eos": True}
# Seconds that a busy machine may take for what happens at once.
SLACK = 20.0


@contextlib.contextmanager
def led(servers: Servers, model: str) -> Iterator[tuple[Process, Follower]]:
    """A server of a group of two, and its follower, which has come."""
    port = free_ports(2)
    of_group = ("--nnodes", "2", "--node-rank", "0", "--coordinator", f"127.0.0.1:{port}")
    process = Process(servers, model, "--port", "0", "--tensor-parallel-size", "2", *of_group)
    try:
        follower = Follower(Nodes(2, 1, "127.0.0.1", port))
        follower.join({})
        yield process, follower
    finally:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("signals", [1, 2])
def test_a_signal_to_all_processes_drains_the_group(servers, signals):
    """The follower's request to stop comes before rank 0's own signal, which is still the first; the next one is not."""
    with led(servers, "mock") as (process, follower):
        url = process.base_url
        replies: list[httpx.Response] = []
        body = SLOW | ({"max_tokens": 500} if signals == 2 else {})
        asking = threading.Thread(
            target=lambda: replies.append(httpx.post(f"{url}/v1/completions", json=body, timeout=60))
        )
        asking.start()
        while 'num_requests_running{engine="0",model_name="mock"} 1.0' not in httpx.get(f"{url}/metrics").text:
            time.sleep(0.01)
        follower.ask_to_stop()
        process.wait_for("another process of the group is asked to end")
        for number in range(signals):
            process.signal(signal.SIGTERM)
            process.wait_for("SIGTERM") if number == 0 else None
        asking.join(SLACK)
        code = process.exit_code()
        assert follower.over.wait(SLACK)
    assert (replies[0].status_code, code) == ((200, 0) if signals == 1 else (503, 128 + signal.SIGTERM)), process.output
    # Forced or not, the end was asked for: nothing has failed in the others.
    assert follower.failure is None


@pytest.mark.parametrize(
    ("model", "why"), [("dies", "RuntimeError: out of luck"), ("alone", "jax's coordinator is not there")]
)
def test_the_end_of_rank_0_is_the_failure_of_all(servers, model, why):
    """Of a step that fails, after which the server returns its exit code, and of an error of the group's own kind."""
    with led(servers, model) as (process, follower):
        if model == "dies":
            assert httpx.post(f"{process.base_url}/v1/completions", json=SLOW, timeout=60).status_code == 500
        assert process.exit_code() == 1, process.output
        assert follower.over.wait(SLACK)
    assert f"process 0 has failed: {why}" in str(follower.failure)
    assert f"the group of 2 processes has ended: process 0 has failed: {why}" in process.output
