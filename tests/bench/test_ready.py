"""`bench ready` against a server with the mock engine."""

import json
import sys
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.serving import endpoint
from bench.serving.ready import wait_for_all
from jaxspec.errors import ConfigError
from tests.serve.server_processes import SCRIPT


def test_a_server_that_does_not_say_what_is_pending_is_no_server_with_nothing_pending():
    with pytest.raises(ConfigError, match="buckets_pending"):
        wait_for_all(endpoint.Endpoint("http://127.0.0.1:9", trust_env=False))


def test_the_first_start_is_cold(tmp_path, capsys):
    (tmp_path / "something").touch()
    assert main(["ready", "--cache-folder", str(tmp_path)]) == 1
    assert "must be a new or an empty folder" in capsys.readouterr().err


@pytest.mark.long
def test_a_start_is_timed_and_its_requests_compared(tmp_path, monkeypatch, capsys):
    """Each start has the same folder for compiled steps, which is gone at the end."""
    out, caches = tmp_path / "ready.json", tmp_path / "caches"
    note = f"import os; open({str(caches)!r}, 'a').write(os.environ['JAXSPEC_CACHE'] + chr(10));"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    note += "assert 'JAX_COMPILATION_CACHE_DIR' not in os.environ;"
    command = endpoint.server_command
    note += "print('INFO jaxspec.warmup: compiled 1 of 2 while serving, after 3.5 s: a step', flush=True);"
    mock = lambda model, flags: [sys.executable, "-c", note + SCRIPT, *command(model, flags)[3:]]  # noqa: E731
    monkeypatch.setattr(endpoint, "server_command", mock)
    options = ["--model", "mock", "--warm-starts", "1", "--num-requests", "3", "--output-len", "4"]
    code = main(["ready", "--out", str(out), "--vocab-size", "256", *options])
    assert code == 0
    result = json.loads(out.read_text())
    assert list(result["serve"]) == ["cold", "warm 1"]
    for start in result["serve"].values():
        assert 0 < start["listening_s"] <= start["ready_s"] <= start["all_s"]
        assert start["cpu_s"] > 0
        assert start["late_s"] == [3.5]
        assert [burst["complete"] for burst in start["requests"].values()] == [3, 3]
    first, second = caches.read_text().split()
    assert first == second
    assert not Path(first).exists()
    shown = capsys.readouterr().out
    assert "warm 1" in shown
    assert "first token" in shown
