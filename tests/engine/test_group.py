"""The group of processes: who is let in, and how it ends. Without a model; `tests/serve/test_nodes.py` has one."""

import contextlib
import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from jaxspec.config import EngineConfig
from jaxspec.engine import fingerprint
from jaxspec.engine.channel import Channel, Say
from jaxspec.engine.follower import Follower
from jaxspec.engine.group import PROTOCOL, difference
from jaxspec.engine.leader import Leader
from jaxspec.engine.orders import Kind, Order, decode, encode
from jaxspec.errors import ConfigError, GroupError
from jaxspec.loading.join import facts_of
from jaxspec.nodes import Nodes, nodes_of
from tests.cut_proxy import CutProxy, free_ports
from tests.engine.group_process import TIMEOUT

ROOT = Path(__file__).parents[2]
# Seconds that a busy machine may take beside the timeout.
SLACK = 20.0
STEP_TIMEOUT = 2.0


# --- orders ---

ARRAYS = st.sampled_from([np.int32, np.float32, np.bool_]).flatmap(
    lambda dtype: arrays(dtype, array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
)
ORDERS = st.builds(
    Order, st.sampled_from(list(Kind)), st.integers(0, 2**32 - 1), st.lists(ARRAYS, max_size=3).map(tuple)
)


@given(order=ORDERS, data=st.data())
def test_an_order_is_its_bytes(order, data):
    """And no beginning or continuation of them is one."""
    written = encode(order)
    again = decode(written)
    assert (again.kind, again.which) == (order.kind, order.which)
    assert [(a.dtype, a.shape, a.tobytes()) for a in again.arrays] == [
        (a.dtype, a.shape, a.tobytes()) for a in order.arrays
    ]
    with pytest.raises(ValueError, match="order"):
        decode(written[: data.draw(st.integers(0, len(written) - 1))])
    with pytest.raises(ValueError, match="order"):
        decode(written + b"\0")


# --- channels ---


def test_a_channel_that_this_side_has_closed_reads_no_more():
    """As for a member whose connection another thread closes: an error of the group, whatever the socket says."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        channel = Channel(ours, 1.0)
        channel.close()
        with pytest.raises(GroupError, match="has closed the connection"):
            channel.read()


# --- who is let in ---


def test_only_the_expected_ranks_with_the_same_facts_come_in(caplog):
    """Everybody else is refused by name, and the group still comes together."""
    caplog.set_level(logging.INFO, "jaxspec.nodes")
    port = free_ports()
    leader = Leader(Nodes(3, 0, "127.0.0.1", port, 5.0))
    facts = {"jax": "0.11.2", "--max-num-seqs": "8"}
    joining = threading.Thread(target=leader.join, args=(facts,), kwargs={"within": 30})
    joining.start()

    def come(rank: int, facts: dict[str, str], count: int = 3) -> Follower:
        follower = Follower(Nodes(count, rank, "127.0.0.1", port, 5.0))
        follower.join(facts, within=20)
        return follower

    for rank, changed, count, named in (
        (1, {"jax": "0.10.2"}, 3, "jax is '0.10.2' there and '0.11.2' here"),
        (1, {"--max-num-seqs": "4"}, 3, "--max-num-seqs is '4' there and '8' here"),
        (2, {"--seed": "1"}, 3, "--seed is '1' there and 'none' here"),
        (1, {}, 2, "it has --nnodes 2 where process 0 has 3"),
        (3, {}, 3, "--node-rank 3 is not between 1 and 2"),
        (0, {}, 3, "--node-rank 0 is not between 1 and 2"),
    ):
        with pytest.raises(ConfigError, match=re.escape(named)):
            come(rank, facts | changed, count)
    with socket.create_connection(("127.0.0.1", port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
    second = threading.Thread(target=come, args=(2, facts))
    second.start()
    while "process 2 of the group has come" not in caplog.text:
        assert second.is_alive()
        time.sleep(0.01)
    with pytest.raises(ConfigError, match="there is a process with --node-rank 2 already"):
        come(2, facts)
    first = come(1, facts)
    joining.join(20)
    second.join(20)
    assert not joining.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    assert leader.failure is None
    leader.end()
    assert first.over.wait(5)
    assert first.failure is None


@pytest.fixture
def process_again() -> Iterator[None]:
    """What is read once in a process is read anew, and once more afterwards."""
    fingerprint.forget_process()
    yield
    fingerprint.forget_process()


@pytest.mark.usefixtures("process_again")
def test_what_compiled_steps_follow_from_is_compared(tmp_path, monkeypatch):
    """XLA's flags but those that write files for people, and jax's options, which variables of the environment set."""
    (tmp_path / "config.json").write_text("{}")

    def facts(flags: str) -> dict[str, str]:
        monkeypatch.setenv("XLA_FLAGS", flags)
        fingerprint.forget_process()
        return facts_of(tmp_path, EngineConfig())

    ours = facts("--xla_gpu_enable_triton_gemm=false --xla_dump_to=/tmp/host0")
    assert facts("--xla_dump_to=/tmp/host1 --xla_gpu_enable_triton_gemm=false") == ours
    assert "XLA_FLAGS is" in (difference(ours, facts("--xla_gpu_enable_triton_gemm=true")) or "")
    with jax.default_matmul_precision("highest"):
        theirs = facts("--xla_gpu_enable_triton_gemm=false")
    assert difference(ours, theirs) == ("jax_default_matmul_precision is 'highest' there and 'None' here (process 0)")


def test_what_was_made_of_the_options_must_be_equal():
    port = free_ports()
    leader, follower = Leader(Nodes(2, 0, "127.0.0.1", port, 5.0)), Follower(Nodes(2, 1, "127.0.0.1", port, 5.0))
    joining = threading.Thread(target=leader.join, args=({},))
    joining.start()
    follower.join({})
    joining.join()
    failed: list[GroupError] = []

    def meet() -> None:
        try:
            follower.meet({"num_pages": "40"})
        except GroupError as error:
            failed.append(error)

    meeting = threading.Thread(target=meet)
    meeting.start()
    with pytest.raises(GroupError, match="process 1 does not fit: num_pages is '40' there and '44' here"):
        leader.meet({"num_pages": "44"})
    meeting.join(5)
    assert "num_pages is '40'" in str(failed[0])


def test_a_process_that_does_not_come_is_named():
    leader = Leader(Nodes(3, 0, "127.0.0.1", free_ports(), 5.0))
    with pytest.raises(GroupError, match=r"processes \[1, 2\] have not come within 0.1 s"):
        leader.join({}, within=0.1)
    with pytest.raises(GroupError, match=r"process 0 at .* was not there within 0.1 s: Connection refused"):
        Follower(Nodes(2, 1, "127.0.0.1", free_ports(), 5.0)).join({}, within=0.1)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ((0, None, None), "--nnodes must be between 1 and 1024, got 0"),
        ((1, 1, None), "--node-rank 1 needs --nnodes"),
        ((2, None, "a:1"), "--nnodes 2 needs --node-rank"),
        ((2, 0, None), "--nnodes 2 needs --coordinator"),
        ((2, 2, "a:1"), "--node-rank must be between 0 and 1"),
        ((2, 1, "a"), "--coordinator must be HOST:PORT"),
        ((2, 1, "a:65535"), "--coordinator must be HOST:PORT"),
        ((2, 1, ":80"), "--coordinator must be HOST:PORT"),
    ],
)
def test_options_of_a_group_make_sense(options, named):
    with pytest.raises(ConfigError, match=re.escape(named)):
        nodes_of(*options, timeout=30.0, step_timeout=None)
    assert nodes_of(1, 0, None, timeout=30.0, step_timeout=None) is None
    there = nodes_of(2, 1, "tcp://[::1]:80", timeout=30.0, step_timeout=None)
    assert there == Nodes(2, 1, "::1", 80)
    assert there.coordinator == "[::1]:81"


# --- how it ends before all have come ---


class Joining(threading.Thread):
    """A process that waits for the others, and what came of it."""

    def __init__(self, group: Leader | Follower):
        super().__init__(daemon=True)
        self._group = group
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            self._group.join({}, within=60)
        except (ConfigError, GroupError) as error:
            self.error = error

    def ends(self) -> Exception | None:
        self.join(SLACK)
        assert not self.is_alive()
        return self.error


@contextlib.contextmanager
def waiting_for_a_third(caplog: pytest.LogCaptureFixture) -> Iterator[tuple[Leader, Joining, Follower, Joining]]:
    """Rank 0 and rank 1 of a group of three."""
    caplog.set_level(logging.INFO, "jaxspec.nodes")
    port = free_ports()
    leader, follower = (Leader(Nodes(3, 0, "127.0.0.1", port)), Follower(Nodes(3, 1, "127.0.0.1", port)))
    joining = [Joining(leader), Joining(follower)]
    wait_for("process 1 of the group has come", caplog)
    yield leader, joining[0], follower, joining[1]
    leader.end()
    joining[0].ends()


def wait_for(text: str, caplog: pytest.LogCaptureFixture) -> None:
    deadline = time.monotonic() + SLACK
    while text not in caplog.text:
        assert time.monotonic() < deadline, caplog.text
        time.sleep(0.01)


def test_a_process_that_is_asked_to_end_while_it_waits_tells_the_others(caplog):
    """Rank 0 ends the group, which is an orderly end for those that wait."""
    with waiting_for_a_third(caplog) as (leader, leading, follower, following):
        leader.on_stop = threading.Thread(target=leader.end).start
        follower.ask_to_stop()
        assert isinstance(following.ends(), GroupError)
        assert isinstance(leading.ends(), GroupError)
        assert follower.over.is_set()
        assert leader.failure is follower.failure is None


def test_a_process_that_fails_tells_those_that_wait(caplog):
    with waiting_for_a_third(caplog) as (leader, leading, follower, following):
        leader.fail(ConfigError("no such device"))
        named = "process 0 says: process 0 has failed: no such device"
        assert named in str(following.ends())
        assert named in str(follower.failure)
        assert leading.ends() is leader.failure


def test_a_process_that_ends_while_others_wait_is_missed_and_may_come_again(caplog):
    """At once, before the third has come; the connection of the one that has ended is closed."""
    caplog.set_level(logging.INFO, "jaxspec.nodes")
    port = free_ports()
    leader = Leader(Nodes(3, 0, "127.0.0.1", port))
    said: list[str] = []
    leading = threading.Thread(target=leader.join, args=({}, lambda _done, _all, what: said.append(what)), daemon=True)
    leading.start()
    with socket.create_connection(("127.0.0.1", port)) as sock:
        Channel(sock, 5.0).send_json(Say.HELLO, {"rank": 1, "count": 3, "facts": {"protocol": str(PROTOCOL)}})
        wait_for("process 1 of the group has come", caplog)
        sock.shutdown(socket.SHUT_WR)
        wait_for("process 1 of the group has closed the connection before all have come", caplog)
        sock.settimeout(SLACK)
        assert sock.recv(1) == b""
    followers = [Follower(Nodes(3, rank, "127.0.0.1", port)) for rank in (1, 2)]
    following = [Joining(follower) for follower in followers]
    assert [joining.ends() for joining in following] == [None, None]
    leading.join(SLACK)
    assert [what.partition(" of ")[0] for what in said[:3]] == [
        f"Waiting for processes {missing}" for missing in ([1, 2], [2], [1, 2])
    ]
    leader.end()
    assert followers[0].over.wait(SLACK)
    assert followers[0].failure is None


def test_the_end_does_not_wait_for_a_process_that_takes_nothing():
    """Not even where another thread waits for it already, for as long as --node-timeout says."""
    port = free_ports()
    leader = Leader(Nodes(2, 0, "127.0.0.1", port, 600.0))
    joining = Joining(leader)
    with socket.create_connection(("127.0.0.1", port)) as sock:
        Channel(sock, 5.0).send_json(Say.HELLO, {"rank": 1, "count": 2, "facts": {"protocol": str(PROTOCOL)}})
        assert joining.ends() is None
        sent: list[int] = []

        def flood() -> None:
            with contextlib.suppress(GroupError):
                while True:
                    leader.send(Order(Kind.STEP, 0, (np.zeros(1 << 20, np.int32),)))
                    sent.append(len(sent))

        threading.Thread(target=flood, daemon=True).start()
        deadline = time.monotonic() + SLACK
        while True:  # until it waits for the other side
            before = len(sent)
            time.sleep(0.5)
            if before == len(sent):
                break
            assert time.monotonic() < deadline
        ending = threading.Thread(target=leader.end, daemon=True)
        ending.start()
        ending.join(SLACK)
        assert not ending.is_alive()


# --- how it ends ---


class Pair:
    """Two processes of one group, the second behind a proxy."""

    def __init__(self) -> None:
        port = free_ports()
        self.proxy = CutProxy(port)
        self.processes = [self._start(0, port), self._start(1, self.proxy.port)]
        assert self.processes[0].stdout
        self.first = ""

    def _start(self, rank: int, port: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.engine.group_process", "2", str(rank), str(port), str(STEP_TIMEOUT)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def wait_until_serving(self) -> None:
        lines = self.processes[0].stdout
        assert lines
        while "serving" not in (line := lines.readline()):
            assert line, self.first
            self.first += line

    def ends(self, seconds: float) -> tuple[list[int], list[str]]:
        """Exit codes, and what each has written."""
        written = []
        for process in self.processes:
            try:
                written.append(process.communicate(timeout=seconds)[0])
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)
                pytest.fail(f"still there after {seconds} s:\n{process.communicate()[0]}")
        return [process.returncode for process in self.processes], written

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        self.proxy.close()


@contextlib.contextmanager
def pairs(count: int) -> Iterator[list[Pair]]:
    """So many groups at once: they mostly wait."""
    made = [Pair() for _ in range(count)]
    try:
        for pair in made:
            pair.wait_until_serving()
        yield made
    finally:
        for pair in made:
            pair.close()


def test_plan_hash_mismatch_stops_both_processes():
    """One bit of an order is changed on its way."""
    with pairs(1) as (pair,):
        pair.proxy.flip = True
        codes, written = pair.ends(SLACK)
    assert codes == [1, 1], written
    assert "has sent other bytes than it says as order" in written[1]
    assert "their hash differs" in written[0]


@pytest.mark.slow
def test_stuck_or_terminated_rank_ends_the_group():
    """Either process is killed or stopped, the connection is cut, or a step does not end; then both are gone in time.

    A stopped process goes when it is continued.
    """
    with pairs(7) as groups:
        killed, stopped, (cut, stuck, terminated) = groups[:2], groups[2:4], groups[4:]
        for rank, pair in enumerate(killed):
            pair.processes[rank].kill()
        for rank, pair in enumerate(stopped):
            pair.processes[rank].send_signal(signal.SIGSTOP)
        cut.proxy.silent = True
        stuck.processes[1].send_signal(signal.SIGUSR1)
        terminated.processes[1].terminate()
        began = time.monotonic()
        for rank, pair in enumerate(stopped):
            assert pair.processes[1 - rank].wait(TIMEOUT + SLACK) == 1
            pair.processes[rank].send_signal(signal.SIGCONT)
        ended = [pair.ends(STEP_TIMEOUT + SLACK) for pair in groups]
        assert time.monotonic() - began < STEP_TIMEOUT + SLACK
    for rank in (0, 1):
        codes, written = ended[rank]
        assert codes == ([-signal.SIGKILL, 1] if rank == 0 else [1, -signal.SIGKILL])
        assert f"process {rank} has closed the connection" in written[1 - rank]
        codes, written = ended[2 + rank]
        assert codes == [1, 1]
        assert f"process {rank} has been silent for too long" in written[1 - rank]
    assert ended[4][0] == [1, 1]
    assert "has been silent for too long" in ended[4][1][0]
    assert "has been silent for too long" in ended[4][1][1]
    assert ended[5][0] == [1, 1]
    assert re.search(r"processes \[1\] have not finished order \d+ within 2 s", ended[5][1][0])
    assert ended[6][0] == [0, 0], ended[6]
