"""`bench load` against a server with the mock engine."""

import json

import pytest

from bench.__main__ import main
from bench.serving.endpoint import Endpoint
from bench.serving.load import gates
from bench.serving.senders import Senders
from tests.serve.conftest import start_server  # noqa: F401 - a fixture
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

SMALL = ["--concurrency", "2,9", "--repeats", "2", "--rounds", "1", "--input-len", "5", "--output-len", "3"]


def bench(tmp_path, name, url, *options):
    out = tmp_path / name
    code = main(["load", "--url", url, "--vocab-size", "256", "--out", str(out), *SMALL, *options])
    return code, json.loads(out.read_text()) if out.exists() else {}


def medians(tokens, p50, p99):
    return {"tokens/s": tokens, "first token p50": p50, "first token p99": p99}


@pytest.mark.parametrize(
    ("ours", "worst", "met"),
    [
        ({"1": medians(115.0, 10.0, 20.0), "8": medians(250.0, 5.0, 20.0)}, [1.15, 1.0, 1.0], [True, True, True]),
        ({"1": medians(130.0, 10.0, 20.1), "8": medians(229.0, 9.0, 30.0)}, [1.145, 1.0, 1.5], [False, True, False]),
        ({"1": medians(130.0, None, 20.0), "9": medians(1.0, 99.0, 99.0)}, [1.3, None, 1.0], [True, False, True]),
    ],
)
def test_gates_beside_a_peer(ours, worst, met):
    """Judged at every number of requests that both have; a figure that is missing meets no gate."""
    found = gates(ours, {"1": medians(100.0, 10.0, 20.0), "8": medians(200.0, 10.0, 20.0)})
    assert [gate["worst"] for gate in found] == worst
    assert [gate["met"] for gate in found] == met
    assert [gate["bound"] for gate in found] == [1.15, 1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 3])
def test_processes_share_a_load(start_server, count):  # noqa: F811
    """All requests are answered, in their order, whatever the number of processes; no more are sent at once than asked."""
    server = start_server(served(MockEngine(), byte_tokenizer()))
    bodies = [
        {"model": "mock", "prompt": [1, 2, 3], "max_tokens": 1 + i, "ignore_eos": True, "stream": True,
         "stream_options": {"include_usage": True}}
        for i in range(10)
    ]  # fmt: skip
    with Senders(count) as senders:
        outcomes = senders.send(Endpoint(server.base_url), bodies, 4, timeout=60)
    assert [outcome.failure for outcome in outcomes] == [None] * 10
    assert [outcome.stream.tokens for outcome in outcomes] == [1 + i for i in range(10)]
    running = [sum(o.sent <= at.sent < o.ended for o in outcomes) for at in outcomes]
    assert max(running) <= 4


@pytest.mark.slow
def test_numbers_at_once_beside_a_peer(start_server, tmp_path, capsys):  # noqa: F811
    """Each number runs as often as asked, with prompts of its own, and ratios are to the peer's record of the same load."""
    server = start_server(served(MockEngine(), byte_tokenizer()))
    code, first = bench(tmp_path, "first.json", server.base_url, "--temperature", "0.7", "--top-p", "0.95")
    assert code == 0
    assert {count: [run["complete"] for run in runs] for count, runs in first["runs"].items()} == {
        "2": [8, 8],  # the fewest
        "9": [9, 9],
    }
    assert {run["output_tokens"] for runs in first["runs"].values() for run in runs} == {8 * 3, 9 * 3}
    assert first["medians"]["9"]["tokens/s"] > 0
    same = ["--temperature", "0.7", "--top-p", "0.95", "--peer", str(tmp_path / "first.json")]
    doubled = json.loads((tmp_path / "first.json").read_text())
    for figures in doubled["medians"].values():
        figures |= {"tokens/s": 1e-9, "first token p50": 1e9, "first token p99": 1e9}
    (tmp_path / "first.json").write_text(json.dumps(doubled))
    capsys.readouterr()
    assert bench(tmp_path, "second.json", server.base_url, *same)[0] == 0
    printed = capsys.readouterr().out
    assert "over mock of --peer" in printed
    assert printed.count("\nmet: ") == 3
    second = json.loads((tmp_path / "second.json").read_text())
    assert [(gate["met"], gate["numbers_at_once"]) for gate in second["gates"]] == [(True, 2)] * 3
    assert bench(tmp_path, "third.json", server.base_url, *same[2:])[0] == 1
    assert "has another load: temperature 0.7, here 0.0" in capsys.readouterr().err
