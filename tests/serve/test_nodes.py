"""Several processes that serve one model: they give the tokens of one, and end together.

Two processes of one CPU device each, which talk through Gloo, behind a proxy that tests cut. `tests/engine/test_group.py`
has the group alone.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cut_proxy import CutProxy, free_ports
from tests.serve.client_checks import check_error

ROOT = Path(__file__).parents[2]
NODE_TIMEOUT = 3
# Seconds that a busy machine may take beside a timeout, and for a start.
SLACK, START = 20.0, 240.0
OPTIONS = ("--dtype", "float32", "--max-model-len", "128", "--max-num-seqs", "2", "--max-num-batched-tokens", "16")
LONG = {"prompt": [1, 2, 3], "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
# Longer than a step: chunks beside decode rows, and pages that a later prompt finds again.
PROMPTS: list[dict[str, Any]] = [
    {"prompt": list(range(5, 75)), "max_tokens": 12, "temperature": 0},
    {"prompt": [9, 8, 7], "max_tokens": 20, "temperature": 0.8, "seed": 3},
    {"prompt": [*range(5, 70), 80, 81], "max_tokens": 12, "temperature": 1, "seed": 4, "n": 2},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A DeepSeek-V3 of two layers with an MTP layer, and a tokenizer of bytes."""
    from transformers import PreTrainedTokenizerFast

    from tests.serve.mock_engine import SPECIAL, byte_backend
    from tests.tiny_models import tiny_checkpoint

    size = -(-(256 + len(SPECIAL)) // 4) * 4  # four devices may split it
    folder = tiny_checkpoint("v3-mtp", tmp_path_factory.mktemp("model") / "hf", vocab_size=size)
    PreTrainedTokenizerFast(tokenizer_object=byte_backend()).save_pretrained(folder)
    return str(folder)


def environment(devices: int) -> dict[str, str]:
    """Of a process with so many CPU devices."""
    flags = [f for f in os.environ["XLA_FLAGS"].split() if "device_count" not in f]
    flags.append(f"--xla_force_host_platform_device_count={devices}")
    return {**os.environ, "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}


class Node:
    """One process, and what it has written."""

    def __init__(self, *arguments: str, variant: str = "lean", devices: int = 1):
        self.output = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.serve.node_process", variant, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env=environment(devices),
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout
        with self.process.stdout as lines:
            for line in lines:
                self.output += line

    def wait_for(self, text: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            assert self.process.poll() is None, self.output
            time.sleep(0.02)

    def ends(self, seconds: float) -> int:
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code


class TwoNodes:
    """A group of two, the second behind a proxy."""

    def __init__(
        self,
        folder: str,
        *more: str,
        follower: tuple[str, ...] = (),
        variant: str = "lean",
        port: int = 0,
        devices: int = 1,
    ):
        self.port = port = port or free_ports(2)
        between = free_ports(2)
        self.proxies = [CutProxy(port + i, between + i) for i in (0, 1)]
        shared = [folder, *OPTIONS, "--tensor-parallel-size", str(2 * devices), "--nnodes", "2"]
        shared += ["--node-timeout", str(NODE_TIMEOUT), *more]
        first = ["--node-rank", "0", "--coordinator", f"127.0.0.1:{port}", "--port", "0"]
        second = ["--node-rank", "1", "--coordinator", f"127.0.0.1:{between}", *follower]
        self.nodes = [Node(*shared, *own, variant=variant, devices=devices) for own in (first, second)]

    @property
    def url(self) -> str:
        self.nodes[0].wait_for("/v1/completions -H", START)
        found = re.search(r" at (http://[\d.:]+)\. Try", self.nodes[0].output)
        assert found
        return found[1]

    @property
    def outputs(self) -> str:
        return "\n--- process 1 ---\n".join(node.output for node in self.nodes)

    def cut(self) -> None:
        for proxy in self.proxies:
            proxy.silent = True

    def close(self) -> None:
        for node in self.nodes:
            node.process.kill()
            node.ends(10)
        for proxy in self.proxies:
            proxy.close()


@contextlib.contextmanager
def two_nodes(folder: str, *more: str, **options: Any) -> Iterator[TwoNodes]:
    group = TwoNodes(folder, *more, **options)
    try:
        yield group
    finally:
        group.close()


def answers(url: str, prompts: list[dict[str, Any]]) -> list[list[list[int]]]:
    """The ids of each choice of each request, which run together."""
    found: list[Any] = [None] * len(prompts)

    def ask(i: int) -> None:
        body = prompts[i] | {"ignore_eos": "structured_outputs" not in prompts[i], "return_token_ids": True}
        reply = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        assert reply.status_code == 200, reply.text
        found[i] = [choice["token_ids"] for choice in reply.json()["choices"]]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Client:
    """Reads a stream until it ends, and knows how that was.

    Attributes:
        cut: its connection was closed before its end.
    """

    def __init__(self, url: str):
        self.events: list[str] = []
        self.cut = False
        self._thread = threading.Thread(target=self._read, args=(url,), daemon=True)
        self._thread.start()

    def _read(self, url: str) -> None:
        try:
            with httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=120) as reply:
                self.events += [line[6:] for line in reply.iter_lines() if line.startswith("data: ")]
        except httpx.HTTPError:
            self.cut = True

    def end(self) -> list[str]:
        self._thread.join(SLACK)
        assert not self._thread.is_alive()
        return self.events


@pytest.mark.torch
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.full)])
def test_two_processes_give_the_tokens_of_one(folder, devices):
    """Over HTTP, on so many devices each; then the follower is asked to end: what runs is finished, and both end."""
    one = Node(folder, *OPTIONS, "--port", "0")
    with two_nodes(folder, devices=devices) as group:
        try:
            one.wait_for("/v1/completions -H", START)
            found = re.search(r" at (http://[\d.:]+)\. Try", one.output)
            assert found
            want = answers(found[1], PROMPTS)
        finally:
            one.process.kill()
            one.ends(10)
        assert answers(group.url, PROMPTS) == want
        assert 'jit_compiles_after_warmup_total{engine="0"' in (metrics := httpx.get(f"{group.url}/metrics").text)
        assert re.search(r"jit_compiles_after_warmup_total\{[^}]*\} 0.0", metrics)
        client = Client(group.url)
        time.sleep(0.3)
        group.nodes[1].process.terminate()
        events = client.end()
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
        assert [node.ends(SLACK) for node in group.nodes] == [0, 0], group.outputs
    assert "Traceback" not in group.outputs


@pytest.mark.full
@pytest.mark.torch
@pytest.mark.parametrize(("how", "rank"), [("killed", 0), ("killed", 1), ("stopped", 0), ("stopped", 1), ("cut", 0)])
def test_a_lost_process_ends_the_server(folder, how, rank):
    """In time, with a line that says why, and an error for those that wait. Started again, it serves again."""
    with two_nodes(folder) as group:
        url = group.url
        client = Client(url)
        time.sleep(0.5)
        began = time.monotonic()
        process, other = group.nodes[rank].process, group.nodes[1 - rank]
        if how == "killed":
            process.kill()
        elif how == "stopped":
            process.send_signal(signal.SIGSTOP)
        else:
            group.cut()
        code = other.ends(NODE_TIMEOUT + SLACK)
        assert time.monotonic() - began < NODE_TIMEOUT + SLACK
        process.send_signal(signal.SIGCONT) if how == "stopped" else None
        ended = group.nodes[rank].ends(SLACK)
        assert code != 0
        assert ended != 0
        events = client.end()
        if rank == 1 or how == "cut":
            assert code == 1
            assert not client.cut
            assert events[-1] == "[DONE]"
            assert "service_unavailable" in events[-2], group.outputs
            assert "the group of 2 processes has ended: process 1" in group.nodes[0].output
        else:
            assert client.cut == (how == "killed")
            assert "the group of 2 processes has ended: process 0" in other.output
    if (how, rank) == ("killed", 1):
        with two_nodes(folder, port=group.port) as again:
            assert len(answers(again.url, PROMPTS[:1])[0][0]) == PROMPTS[0]["max_tokens"]


@pytest.mark.full
@pytest.mark.torch
def test_an_order_that_is_changed_on_its_way_stops_both(folder):
    with two_nodes(folder) as group:
        url = group.url
        group.proxies[0].flip = True
        reply = httpx.post(f"{url}/v1/completions", json=LONG | {"stream": False}, timeout=60)
        check_error(reply, 503, None, "service_unavailable")
        assert [node.ends(SLACK) for node in group.nodes] == [1, 1], group.outputs
        assert "their hash differs" in group.nodes[0].output


@pytest.mark.full
@pytest.mark.torch
def test_every_kind_of_order_is_followed(folder):
    """Speculation, adaptive too, prompt log-probabilities, penalties over cached prompts, masks of split steps."""
    options = ("--num-speculative-tokens", "2", "--readout-depth", "1")
    with two_nodes(folder, *options, "--adaptive-speculation", variant="full") as group:
        one = Node(folder, *OPTIONS, *options, "--port", "0", variant="full")
        prompts = [
            PROMPTS[0] | {"prompt_logprobs": 2, "logprobs": 2},
            PROMPTS[0] | {"repetition_penalty": 1.3},
            PROMPTS[1] | {"top_k": 5, "logit_bias": {"7": 2.0}},
            PROMPTS[1] | {"structured_outputs": {"regex": "[ab]{64}"}},
        ]
        try:
            one.wait_for("/v1/completions -H", START)
            found = re.search(r" at (http://[\d.:]+)\. Try", one.output)
            assert found
            want = [answers(found[1], [prompt]) for prompt in (*prompts, prompts[1])]
        finally:
            one.process.kill()
            one.ends(10)
        assert [answers(group.url, [prompt]) for prompt in (*prompts, prompts[1])] == want
        group.nodes[0].process.terminate()
        assert [node.ends(SLACK) for node in group.nodes] == [0, 0], group.outputs


@pytest.mark.full
@pytest.mark.torch
def test_a_process_with_other_options_is_refused(folder):
    with two_nodes(folder, follower=("--seed", "5")) as group:
        assert group.nodes[1].ends(START) == 1
        assert "refuses this one: seed (--seed) is '5' there and '0' here" in group.nodes[1].output
        group.nodes[0].process.terminate()
        assert group.nodes[0].ends(SLACK) == 0, group.outputs
