"""`bench serve` against the real server with the mock engine, and against one that refuses and breaks streams."""

import asyncio
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest

from bench.__main__ import main
from bench.harness import record
from bench.serving import endpoint
from bench.serving.client import BROKEN, Session, StreamReader, Turn, run_sessions
from bench.serving.endpoint import acceptance, read_counters
from bench.serving.profiles import PROFILES
from bench.serving.serve import make_arrivals
from tests.serve.conftest import start_server  # noqa: F401 - a fixture
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.server_processes import SCRIPT

# The mock's ids are bytes.
IDS = ["--vocab-size", "256"]


def bench(tmp_path, *options: str) -> tuple[int, dict]:
    out = tmp_path / "serve.json"
    out.unlink(missing_ok=True)
    code = main(["serve", "--out", str(out), "--timeout", "20", *options])
    return code, json.loads(out.read_text()) if out.exists() else {}


def event(**fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def choice(count: int, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"text": "x" * count, "token_ids": [1] * count, "finish_reason": finish_reason}])


DONE = b"data: [DONE]\n\n"
USAGE = event(choices=[], usage={"prompt_tokens": 5, "completion_tokens": 4})
COMPLETE = [choice(1), choice(3, "length"), USAGE, DONE]


class Scripted(BaseHTTPRequestHandler):
    """Answers each completion as the next of `script` says: a status, or the pieces of a stream, None breaking it off."""

    script: list[int | list[bytes | None]]
    bodies: list[dict]
    models = b'{"data": [{"id": "scripted"}]}'

    def do_GET(self):
        self._answer(200 if self.path == "/v1/models" else 404, self.models)

    def do_POST(self):
        self.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        answer = self.script[len(self.bodies) - 1]
        if isinstance(answer, int):
            self._answer(answer, json.dumps({"error": {"message": f"status {answer}"}}).encode())
            return
        self.send_response(200)
        if None in answer:
            self.send_header("content-length", "100000")
        self.end_headers()
        for piece in filter(None, answer):
            self.wfile.write(piece)
            self.wfile.flush()

    def _answer(self, status: int, body: bytes):
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def scripted() -> Iterator[type[Scripted]]:
    handler = type("Handler", (Scripted,), {"bodies": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    handler.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield handler
    server.shutdown()
    thread.join()
    server.server_close()


def test_chunks_are_counted_and_timed():
    """The bytes come in pieces that know nothing of events; a chunk's time is that of the read that completed it."""
    stream = StreamReader()
    data = b": ping\n\n" + choice(1) + choice(2).replace(b"\n", b"\r\n") + choice(0) + choice(1, "stop") + USAGE + DONE
    for i in range(0, len(data), 7):
        stream.feed(data[i : i + 7], i)
    assert stream.counts == [1, 2, 1]
    assert stream.times == sorted(stream.times)
    assert stream.times[0] == (len(b": ping\n\n" + choice(1)) - 2) // 7 * 7
    assert (stream.tokens, stream.exact, stream.finish_reason) == (4, True, "stop")
    assert stream.problem(4) is stream.problem(None) is None
    assert "4 tokens, and 5 were asked for" in stream.problem(5)


def test_without_ids_the_usage_counts_and_without_usage_the_chunks():
    stream = StreamReader()
    for total in (1, 4, 4, 6):
        stream.feed(event(choices=[{"text": "a"}], usage={"completion_tokens": total}), total)
    assert (stream.counts, stream.tokens, stream.exact) == ([1, 3, 2], 6, True)
    stream = StreamReader()
    for text in ("a", "", "bc"):
        stream.feed(event(choices=[{"text": text, "finish_reason": "length"}]), 0)
    assert (stream.counts, stream.tokens, stream.exact) == ([1, 1], 2, False)
    stream.feed(DONE, 0)
    assert stream.problem(6) is None  # nobody said how many tokens these were
    stream.feed(event(choices=[], usage={"completion_tokens": 6}), 0)
    assert stream.tokens == 6
    assert stream.problem(7)


@pytest.mark.parametrize("load", [["--concurrency", "4"], ["--request-rate", "200"]], ids=["closed loop", "open loop"])
def test_a_run_against_the_server(start_server, tmp_path, capsys, load):  # noqa: F811
    engine = MockEngine(k=3, step_seconds=0.001)
    server = start_server(served(engine, byte_tokenizer()))
    server.post("/v1/completions", {"prompt": "hi", "max_tokens": 20, "ignore_eos": True})  # not part of the run
    before = list(engine.windows)
    options = ["--num-requests", "12", "--input-len", "5:20", "--output-len", "10:30", "--ignore-eos", *IDS, *load]
    code, result = bench(tmp_path, "--url", f"{server.base_url}/v1", "--device", "no device", *options)
    assert code == 0
    assert (result["complete"], result["refused"], result["failed"]) == (12, 0, 0)
    assert 12 * 10 <= result["output_tokens"] <= 12 * 30
    assert 12 * 5 <= result["prompt_tokens"] <= 12 * 20
    assert result["token_counts_exact"]
    assert result["tokens_a_chunk"] > 1
    assert result["output_tokens_per_s"] == pytest.approx(result["output_tokens"] / result["seconds"], rel=1e-2)
    for figures in result["latency_ms"].values():
        assert 0 <= figures["p50"] <= figures["p99"]
        assert figures["mean"] > 0
    windows = [now - then for now, then in zip(engine.windows, before, strict=True)]
    accepted = sum(i * n for i, n in enumerate(windows))
    figures = result["acceptance"]
    assert (figures["windows"], figures["accepted"]) == (sum(windows), accepted)
    assert figures["mean_length"] == pytest.approx(1 + accepted / sum(windows), abs=1e-4)
    assert figures["rate"] == pytest.approx(accepted / (3 * sum(windows)), abs=1e-4)
    assert len(figures["rate_by_position"]) == 3
    assert "synthetic_length" not in figures
    assert result["command"].startswith("python -m bench")
    assert result["environment"]["commit"]
    assert "device" not in result["environment"]  # the server's is not this process's
    assert result["device_of_server"] == "no device"
    assert result["server"]["version"]
    shown = capsys.readouterr().out
    assert "12 requests" in shown
    assert "time to first token" in shown
    assert "acceptance length" in shown


def test_sessions_send_the_whole_conversation(start_server, tmp_path, capsys):  # noqa: F811
    """Turns of bursts of sessions that share their beginning; the mock's ids are bytes."""
    options = ["--profile", "agentic", "--scale", "0.01", "--duration", "0.2", "--request-rate", "10", *IDS]
    engine = MockEngine(k=2)
    server = start_server(served(engine, byte_tokenizer()))
    code, result = bench(tmp_path, "--url", server.base_url, *options, "--turns", "3")
    assert code == 0
    assert result["complete"] == result["requests"] == 3 * result["sessions"]
    assert result["sessions"] >= result["burst"] == 4
    assert result["drafting"]
    assert result["prefix_cache"]["found"] is not None
    assert "profile agentic" in capsys.readouterr().out

    tokens = {tuple(r.tokens) for r in engine.finished}
    begins = {tuple(r.tokens[:20]) for r in engine.finished}
    assert len(begins) == 1
    later = [r for r in engine.finished if any(r.tokens[: len(t)] == list(t) for t in tokens if len(t) < r.prompt_len)]
    assert len(later) == 2 * result["sessions"]  # each but the first sends the prompt and the answer before it

    # What does not fit is refused before anything is sent, with what would.
    assert bench(tmp_path, "--url", server.base_url, *options[:2], *options[4:], "--turns", "3") == (1, {})
    refused = capsys.readouterr().err
    assert f"and the server's context ends at {engine.max_model_len}: --scale" in refused
    scale = refused.partition("--scale ")[2].partition(",")[0]
    fits = PROFILES["agentic"].scaled(float(scale))
    assert 0.8 * engine.max_model_len < dataclasses.replace(fits, turns=3).longest <= engine.max_model_len


def test_a_session_goes_on_with_what_was_answered_only(start_server):  # noqa: F811
    """And not without it, where a server does not tell the answer's ids."""
    server = start_server(served(MockEngine(), byte_tokenizer()))
    turns = (Turn([1, 2], 3), Turn([4], 3))
    for told in (True, False):
        body = {"model": "mock", "stream": True, "return_token_ids": told}
        outcomes = asyncio.run(run_sessions(server.base_url, {}, [Session(0.0, body, turns)], timeout=30))
        assert [outcome.failure for outcome in outcomes] == ([None, None] if told else [BROKEN])
    assert "token_ids" in outcomes[0].message


def test_texts_where_a_server_needs_them(start_server, tmp_path):  # noqa: F811
    server = start_server(served(MockEngine(), byte_tokenizer()))
    options = ["--num-requests", "3", "--input-len", "9", "--output-len", "6", "--ignore-eos", "--tokenizer", "demo"]
    code, result = bench(tmp_path, "--url", server.base_url, *options)
    assert (code, result["complete"], result["output_tokens"]) == (0, 3, 18)
    assert result["prompt_tokens"] > 3 * 9  # the mock's tokens are bytes
    assert "acceptance" not in result  # no speculation


def test_keys(start_server, tmp_path, monkeypatch, capsys):  # noqa: F811
    server = start_server(served(MockEngine(), byte_tokenizer()), api_keys=("secret",))
    options = ["--url", server.base_url, "--num-requests", "2", "--output-len", "3", *IDS]
    assert bench(tmp_path, *options)[0] == 1
    assert "401" in capsys.readouterr().err
    assert bench(tmp_path, *options, "--api-key-env", "NO_SUCH_KEY")[0] == 1
    assert "NO_SUCH_KEY is not set" in capsys.readouterr().err
    monkeypatch.setenv("SOME_KEY", "secret")
    code, result = bench(tmp_path, *options, "--api-key-env", "SOME_KEY")
    assert (code, result["complete"]) == (0, 2)
    assert "secret" not in json.dumps(result)


def test_requests_depend_on_the_seed_only(scripted, tmp_path):
    options = ["--url", scripted.url, "--num-requests", "4", "--input-len", "3:9", "--output-len", "2:8"]
    scripted.script = [COMPLETE] * 12
    for seed, rate in (("1", ["--concurrency", "1"]), ("1", ["--request-rate", "1000"]), ("2", [])):
        assert bench(tmp_path, *options, "--seed", seed, *rate)[0] == 0
    first, again, other = (scripted.bodies[i : i + 4] for i in (0, 4, 8))
    by_seed = [sorted(bodies, key=lambda body: body["seed"]) for bodies in (first, again, other)]
    assert by_seed[0] == by_seed[1] != by_seed[2]
    assert {len(b["prompt"]) for b in first} <= set(range(3, 10))
    assert all(0 <= i < 1000 for b in first for i in b["prompt"])
    assert {"stream": True, "temperature": 0.0, "model": "scripted"}.items() <= first[0].items()
    assert {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}.items() <= first[0].items()
    assert "ignore_eos" not in first[0]
    gaps = make_arrivals(20_000, 50, 0)
    assert gaps[0] == 0
    assert gaps == make_arrivals(20_000, 50, 0) != make_arrivals(20_000, 50, 1)
    assert gaps[-1] / 20_000 == pytest.approx(1 / 50, rel=0.03)


RUN = ["--num-requests", "3", "--concurrency", "1", "--output-len", "4", "--ignore-eos"]


def test_refusals_are_not_failures(scripted, tmp_path, capsys):
    scripted.script = [COMPLETE, 429, COMPLETE]
    code, result = bench(tmp_path, "--url", scripted.url, *RUN)
    assert (code, result["complete"], result["refused"], result["failed"]) == (0, 2, 1, 0)
    assert (result["output_tokens"], result["prompt_tokens"]) == (8, 10)
    assert "1 refused (429)" in capsys.readouterr().out
    scripted.script += [429] * 3
    code, result = bench(tmp_path, "--url", scripted.url, *RUN)
    assert (code, result["complete"], result["refused"]) == (0, 0, 3)
    assert set(result["latency_ms"].values()) == {None}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("answer", "failure", "message"),
    [
        (503, "503", "status 503"),
        (400, "400", "status 400"),
        ([choice(1), None], "broken stream", "RemoteProtocolError"),
        ([choice(1), choice(3, "length"), USAGE], "broken stream", "ended after 4 tokens without [DONE]"),
        ([choice(4), USAGE, DONE], "broken stream", "ended after 4 tokens without a finish_reason"),
        ([choice(1), choice(1, "stop"), DONE], "broken stream", "held 2 tokens, and 4 were asked for"),
        ([choice(2, "length"), USAGE, DONE], "broken stream", "held 2 tokens, and its usage says 4"),
        ([choice(1), event(error={"message": "NaN"}), DONE], "broken stream", "error in the stream: NaN"),
        ([b"data: {\n\n"], "broken stream", "not JSON"),
    ],
)
def test_failures(scripted, tmp_path, capsys, answer, failure, message):
    scripted.script = [COMPLETE, answer, 429]
    code, result = bench(tmp_path, "--url", scripted.url, *RUN)
    assert code == 1
    assert (result["complete"], result["refused"], result["failures"]) == (1, 1, {failure: 1})
    assert message in result["failure_examples"][0]
    assert f"1 failed ({failure}: 1)" in capsys.readouterr().out


def test_a_short_answer_is_complete_where_it_may_stop(scripted, tmp_path):
    scripted.script = [[choice(1), choice(1, "stop"), DONE]] * 3
    code, result = bench(tmp_path, "--url", scripted.url, *RUN[:-1])
    assert (code, result["complete"], result["output_tokens"]) == (0, 3, 6)


@pytest.mark.long
def test_a_server_of_its_own(tmp_path, monkeypatch, capsys):
    """Started, used and stopped; flags after -- are its."""
    commands = []

    def command(model, flags):
        commands.append(endpoint_command(model, flags))
        return [sys.executable, "-c", SCRIPT, *commands[-1][3:]]

    endpoint_command = endpoint.server_command
    monkeypatch.setattr(endpoint, "server_command", command)
    monkeypatch.setenv("JAXSPEC_API_KEY", "secret")
    options = [*RUN, *IDS, "--model", "mock", "--", "--max-num-seqs", "4"]
    code, result = bench(tmp_path, *options)
    assert (code, result["complete"], result["model"]) == (0, 3, "mock")
    assert commands[0][3:] == ["serve", "mock", "--port", "0", "--max-num-seqs", "4"]
    assert result["environment"]["device"]
    output = capsys.readouterr().err
    assert "max_num_seqs=4" in output
    url = re.search(r"Listening on (\S+)", output)[1]
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")
    assert bench(tmp_path, *RUN, "--model", "broken")[0] == 1
    assert "before it was ready: error: the folder has no config.json" in capsys.readouterr().err


def test_sigterm_stops_its_server(tmp_path):
    """Which is not ready yet, as while it compiles."""
    started = tmp_path / "started"
    # By then the benchmark knows of its server, also on a busy machine.
    server = (
        f"import os, time; time.sleep(1); open({str(started)!r}, 'w').write(str(os.getpid()) + '.'); time.sleep(600)"
    )
    script = (
        "import sys; from bench.serving import endpoint; from bench.__main__ import main\n"
        f"endpoint.server_command = lambda model, flags: [sys.executable, '-c', {server!r}]\n"
        f"sys.exit(main(['serve', '--out', {str(tmp_path / 'serve.json')!r}]))"
    )
    process = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    try:
        while not (started.exists() and started.read_text().endswith(".")):
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    with pytest.raises(ProcessLookupError):
        os.kill(int(started.read_text()[:-1]), 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--url", "http://127.0.0.1:9"], "cannot list the models of http://127.0.0.1:9"),
        (["--url", "x", "--", "--max-num-seqs", "4"], "flags after -- are for a server that the benchmark starts"),
        (["--", "--api_key=secret"], "in $JAXSPEC_API_KEY, not as a flag"),
        (["--request-rate", "0"], "--request-rate must be a positive number"),
        (["--turns", "2"], "--turns is for a --profile"),
        (["--profile", "agentic", "--concurrency", "2"], "has no use for --concurrency"),
        (["--profile", "agentic", "--scale", "0"], "must be positive numbers"),
    ],
)
def test_what_cannot_be_run(tmp_path, capsys, options, message):
    assert bench(tmp_path, *options) == (1, {})
    assert message in capsys.readouterr().err


def test_the_recorded_command_keeps_the_flags_of_the_server(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxspec", "bench", "serve", "--out", "x", "--seed", "3", "--", "--out", "4"])
    assert record.command_line() == "python -m bench serve --seed 3 -- --out 4"


def test_the_recorded_command_names_no_folder_of_this_machine(monkeypatch):
    argv = ["bench", "kernel", "mla_decode", "--peer-libs", "/opt/x/peers/", "--y=/a/b.json", "a/b", "/"]
    monkeypatch.setattr(sys, "argv", argv)
    assert record.command_line() == "python -m bench kernel mla_decode --peer-libs peers --y=b.json a/b /"


@pytest.mark.parametrize("options", [["--input-len", "5:3"], ["--output-len", "0"], ["--concurrency", "0"]])
def test_usage_errors(options):
    with pytest.raises(SystemExit):
        main(["serve", *options])


def test_httpx_is_named_where_it_is_missing(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "httpx", None)
    assert main(["serve"]) == 1
    assert 'pip install -e ".[test]"' in capsys.readouterr().err


def metrics(drafts: int, drafted: int, accepted: list[int], prefix: str = "vllm:") -> str:
    lines = ["# TYPE other gauge", "other 5"]
    for engine in ("0", "1"):  # two engines of one server add up
        label = f'engine="{engine}"'
        lines += [
            f"{prefix}spec_decode_num_drafts_total{{{label}}} {drafts}",
            f"{prefix}spec_decode_num_draft_tokens_total{{{label}}} {drafted}",
            f"{prefix}spec_decode_num_accepted_tokens_total{{{label}}} {sum(accepted)}",
            f"{prefix}spec_decode_num_accepted_tokens_created{{{label}}} 1.7e9",
        ]
        for position, count in enumerate(accepted):
            pair = f'{label},position="{position}"'
            lines.append(f"{prefix}spec_decode_num_accepted_tokens_per_pos_total{{{pair}}} {count}")
    return "\n".join(lines) + "\n"


def test_acceptance_is_the_increase_of_the_counters():
    before, after = read_counters(metrics(10, 20, [5, 1])), read_counters(metrics(30, 60, [20, 6]))
    assert acceptance(before, after) == {
        "windows": 40, "drafted": 80, "accepted": 40, "mean_length": 2.0, "rate": 0.5, "rate_by_position": [0.75, 0.25],
    }  # fmt: skip
    assert acceptance(after, after)["mean_length"] is None
    assert read_counters("other 5\n") is read_counters("{") is acceptance(None, None) is None
    synthetic = read_counters(metrics(1, 2, [1], "") + "jaxspec:spec_decode_synthetic_acceptance_length 2.5\n")
    assert acceptance(synthetic, synthetic)["synthetic_length"] == 2.5


def test_a_page_without_models_is_named(scripted, tmp_path, capsys):
    scripted.models = b"[]"
    assert bench(tmp_path, "--url", scripted.url) == (1, {})
    assert "does not answer as OpenAI's API does: name a --model" in capsys.readouterr().err
    scripted.script = [COMPLETE] * 3
    code, result = bench(tmp_path, "--url", scripted.url, *RUN, "--model", "named")
    assert (code, result["model"]) == (0, "named")
    assert {body["model"] for body in scripted.bodies} == {"named"}
