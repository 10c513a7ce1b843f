"""The server that is measured: its address, what it reports about itself, and a local one for the time of a run."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from jaxspec.errors import ConfigError

ROOT = Path(__file__).parents[2]
_POLL_SECONDS = 0.1
_STOP_SECONDS = 60.0
_TAIL_LINES = 30
_SPECULATION = re.compile(
    r"(?:\w+:)?spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)_total"
)
_SYNTHETIC = re.compile(r"(?:\w+:)?spec_decode_synthetic_acceptance_length")


@dataclass(frozen=True)
class Counters:
    """Prometheus counters of speculation, under vLLM's names after any prefix, summed over engines.

    Attributes:
        synthetic_length: the acceptance length that the server was told to simulate, if any.
    """

    values: dict[str, float] = field(default_factory=dict)
    per_position: dict[int, float] = field(default_factory=dict)
    synthetic_length: float | None = None


def read_counters(text: str) -> Counters | None:
    """The counters in the text of /metrics; None of a server that does not speculate (or does not say)."""
    values: dict[str, float] = {}
    per_position: dict[int, float] = {}
    synthetic = None
    try:
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    except ValueError:
        return None
    for sample in samples:
        if _SYNTHETIC.fullmatch(sample.name):
            synthetic = sample.value
        elif match := _SPECULATION.fullmatch(sample.name):
            if match[1] == "num_accepted_tokens_per_pos":
                position = int(sample.labels.get("position", 0))
                per_position[position] = per_position.get(position, 0.0) + sample.value
            else:
                values[match[1]] = values.get(match[1], 0.0) + sample.value
    return Counters(values, per_position, synthetic) if "num_drafts" in values else None


def acceptance(before: Counters | None, after: Counters | None) -> dict[str, Any] | None:
    """Acceptance between two readings; None without speculation.

    `mean_length` is the tokens of a verified window, the target's own included (1 + accepted / windows), and `rate` the
    accepted part of the drafted tokens; both are None without a verified window.
    """
    if before is None or after is None:
        return None

    def increase(name: str) -> int:
        return round(after.values.get(name, 0) - before.values.get(name, 0))

    windows, drafted, accepted = map(increase, ("num_drafts", "num_draft_tokens", "num_accepted_tokens"))
    positions = [after.per_position[p] - before.per_position.get(p, 0) for p in sorted(after.per_position)]
    result = {
        "windows": windows,
        "drafted": drafted,
        "accepted": accepted,
        "mean_length": round(1 + accepted / windows, 4) if windows else None,
        "rate": round(accepted / drafted, 4) if drafted else None,
        "rate_by_position": [round(a / windows, 4) for a in positions] if windows else [],
    }
    return result | ({} if after.synthetic_length is None else {"synthetic_length": after.synthetic_length})


class Endpoint:
    """A server by its address, with or without the `/v1`.

    Args:
        key: sent as a bearer token.
        trust_env: whether the proxies of the environment are used.
    """

    def __init__(self, url: str, key: str | None = None, *, trust_env: bool = True):
        self.url = url.rstrip("/").removesuffix("/v1")
        self.headers = {"authorization": f"Bearer {key}"} if key else {}
        self.trust_env = trust_env

    def _get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=self.headers, timeout=30, trust_env=self.trust_env)

    def first_model(self) -> str:
        """
        Raises:
            ConfigError: no server answers, or not with a list of models.
        """
        try:
            return str(self._models()[0]["id"])
        except (LookupError, TypeError) as e:
            raise ConfigError(f"{self.url}/v1/models does not answer as OpenAI's API does: name a --model") from e

    def context(self) -> int | None:
        """Tokens of the first model's longest context; None where the server does not tell.

        Raises:
            ConfigError: as `first_model`.
        """
        try:
            told = self._models()[0].get("max_model_len")
        except (LookupError, AttributeError, TypeError):
            return None
        return told if isinstance(told, int) else None

    def _models(self) -> Any:
        try:
            response = self._get("/v1/models")
            response.raise_for_status()
            return response.json()["data"]
        except (httpx.HTTPError, httpx.InvalidURL) as e:
            raise ConfigError(f"cannot list the models of {self.url}: {e}") from e
        except (ValueError, LookupError, TypeError) as e:
            raise ConfigError(f"{self.url}/v1/models does not answer as OpenAI's API does: name a --model") from e

    def counters(self) -> Counters | None:
        try:
            response = self._get("/metrics")
        except httpx.HTTPError:
            return None
        return read_counters(response.text) if response.status_code == 200 else None

    def value(self, name: str) -> float | None:
        """Of a gauge or counter, summed over its labels, by its name after any prefix; None without it."""
        try:
            families = text_string_to_metric_families(self._get("/metrics").text)
            samples = [s for family in families for s in family.samples]
        except (httpx.HTTPError, ValueError):
            return None
        values = [s.value for s in samples if s.name.rpartition(":")[2] == name]
        return sum(values) if values else None

    def version(self) -> dict[str, Any] | None:
        """What the server says at /version, which is not part of OpenAI's API."""
        try:
            answer = self._get("/version").json()
        except (httpx.HTTPError, ValueError):
            return None
        return answer if isinstance(answer, dict) else None


def server_command(model: str, flags: Sequence[str]) -> list[str]:
    """`jaxspec serve` of this checkout on a free port."""
    code = "import sys; from serve.cli import main; sys.exit(main())"
    return [sys.executable, "-c", code, "serve", model, "--port", "0", *flags]


@dataclass(frozen=True)
class LocalServer:
    """A server that runs for the time of a benchmark, as a process with this id."""

    url: str
    pid: int


@contextmanager
def local_server(
    command: Sequence[str],
    env: Mapping[str, str] = os.environ,
    on_listening: Callable[[], None] = lambda: None,
    on_line: Callable[[str], None] = lambda _line: None,
) -> Iterator[LocalServer]:
    """Runs a server for as long as the context; yields it once it is ready. Its output until then goes to stderr.

    Args:
        env: of its process.
        on_listening: called, in another thread, when it has said its address.
        on_line: called there with each line that it prints, also later.

    Raises:
        ConfigError: the server ends before it is ready.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**env, "PYTHONPATH": path},
        start_new_session=True,  # Ctrl-C is for the client, which then stops the server
    )
    output: _Output | None = None
    try:
        output = _Output(process, on_listening, on_line)
        yield LocalServer(output.wait_until_ready(), process.pid)
        if process.poll() is not None:
            print(f"the server ended by itself with code {process.returncode}:\n{output.tail}", file=sys.stderr)
    finally:
        _stop(process)
        if output is not None:
            output.close()


def _stop(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()


class _Output:
    """Reads everything that a server prints: a full pipe would block it."""

    def __init__(
        self, process: subprocess.Popen[str], on_listening: Callable[[], None], on_line: Callable[[str], None]
    ):
        self._process = process
        self._on_listening, self._on_line = on_listening, on_line
        self._lines: deque[str] = deque(maxlen=_TAIL_LINES)
        self._url: str | None = None
        self._ready = False
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    @property
    def tail(self) -> str:
        return "".join(self._lines).rstrip()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.append(line)
            self._on_line(line)
            if not self._ready:
                sys.stderr.write(line)
            if self._url is None and line.startswith("Listening on "):
                self._url = line.removeprefix("Listening on ").strip()
                self._on_listening()

    def wait_until_ready(self) -> str:
        while True:
            if self._process.poll() is not None:
                self._thread.join()
                last = self.tail.rpartition("\n")[2] or "it printed no line"
                raise ConfigError(f"the server ended with code {self._process.returncode} before it was ready: {last}")
            if self._url is not None:
                with suppress(httpx.HTTPError):  # /ready needs no key
                    self._ready = httpx.get(f"{self._url}/ready", timeout=30, trust_env=False).status_code == 200
                if self._ready:
                    return self._url
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        self._thread.join()
        assert self._process.stdout is not None
        self._process.stdout.close()
