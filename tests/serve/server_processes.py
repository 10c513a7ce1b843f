"""`jaxspec serve` with the mock engine, as processes of their own.

They are forked from one that has imported what they need, which is most of a start; from there each runs as the command
does, to the end of its interpreter. `SCRIPT` is for what starts a command itself.
"""

import asyncio
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import serve.model
import serve.server
from jaxspec.errors import GroupError, ModelFormatError
from serve.cli import main
from serve.model import ServedModel
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

ROOT = Path(__file__).parents[2]
# As a program of its own: `jaxspec` with the model's loading replaced.
SCRIPT = """
import sys
import serve.model
from serve.cli import main
from tests.serve.server_processes import load
serve.model.load_model = load
sys.exit(main())
"""


# --- the process that forks, and its children ---


def load(
    model: str, _config: object, _revision: object, progress: Any, *, group: Any = None, **_defaults: object
) -> ServedModel:
    """In place of the model's loading: an engine and a tokenizer that behave as the model is named.

    As rank 0 of a group it waits for the others, which are the tests' own.
    """
    if group is not None:
        group.join({})
    if model == "broken":
        raise ModelFormatError("the folder\nhas no config.json")
    if model == "alone":
        raise GroupError("jax's coordinator is not there")
    for i in range(3):
        progress(i + 1, 3, "compiling")
        time.sleep(100 if model == "slow" else 0.01)
    engine = MockEngine(step_seconds=0.02)
    if model == "dies":
        engine.fail = RuntimeError("out of luck")
    tokenizer: Any = byte_tokenizer()
    if model == "stuck":
        engine.gate.clear()
    if model == "frozen":
        tokenizer.least_tokens = lambda _text: time.sleep(100)  # called on the event loop
    if model == "busy":
        engine.max_model_len = 100_000
        encode = tokenizer.encode

        def slow(text: str, **options: Any) -> Any:
            if text == "sleep":
                time.sleep(100)
            return encode(text, **options)

        def loop(*_arguments: object, **_options: object) -> None:
            while True:
                pass

        tokenizer.encode, tokenizer.apply_chat_template = slow, loop
    if model == "freezes":
        least_tokens = tokenizer.least_tokens

        def freeze_soon(text: str) -> Any:
            with contextlib.suppress(RuntimeError):  # on other threads
                asyncio.get_running_loop().call_later(2.0, time.sleep, 100)
            return least_tokens(text)

        tokenizer.least_tokens = freeze_soon  # called on the event loop, too
    return served(engine, tokenizer)


def fork_on_request(control: socket.socket) -> None:
    """Answers `Servers` until that is closed; returns in each child, which has become what was asked for."""
    while True:
        message, files, *_ = socket.recv_fds(control, 2**16, 1)
        if not message:
            sys.exit()
        request = json.loads(message)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif answer := os.fork():
            os.close(files[0])
        else:
            control.close()
            become(files[0], **request)
            return
        control.sendall(json.dumps(answer).encode())


def become(output: int, arguments: list[str], descriptors: int | None, environment: dict[str, str]) -> None:
    for number in (1, 2):
        os.dup2(output, number)
    os.close(output)
    os.environ.update(environment)
    sys.argv = ["jaxspec", "serve", *arguments]
    if descriptors is not None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))


# --- the tests' side ---


class Servers:
    """The process that forks."""

    def __init__(self) -> None:
        self._control, other = socket.socketpair()
        with other:
            self._popen = subprocess.Popen(
                [sys.executable, "-m", "tests.serve.server_processes", str(other.fileno())],
                stdout=subprocess.DEVNULL,
                pass_fds=[other.fileno()],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    def ask(self, request: dict[str, Any], *files: int) -> Any:
        socket.send_fds(self._control, [json.dumps(request).encode()], files)
        return json.loads(self._control.recv(100))

    def close(self) -> None:
        self._control.close()
        assert self._popen.wait(30) == 0


class Process:
    """A server, and what it has written so far."""

    def __init__(self, servers: Servers, *arguments: str, descriptors: int | None = None, **environment: str):
        self._servers = servers
        self._code: int | None = None
        readable, writable = os.pipe()
        request = {"arguments": arguments, "descriptors": descriptors, "environment": environment}
        self._pid = servers.ask(request, writable)
        os.close(writable)
        self.output = ""
        self._reader = threading.Thread(target=self._read, args=(readable,))
        self._reader.start()

    def _read(self, readable: int) -> None:
        with os.fdopen(readable) as lines:
            for line in lines:
                self.output += line

    def _poll(self) -> int | None:
        if self._code is None:
            self._code = self._servers.ask({"poll": self._pid})
        return self._code

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + 60
        while text not in self.output:
            assert time.monotonic() < deadline, self.output
            assert self._poll() is None, self.output
            time.sleep(0.01)

    @property
    def base_url(self) -> str:
        self.wait_for("/v1/completions -H")
        return self.output.split(" at ")[1].split(". Try")[0]

    def signal(self, number: int) -> None:
        os.kill(self._pid, number)

    def exit_code(self, seconds: float = 30) -> int:
        deadline = time.monotonic() + seconds
        while (code := self._poll()) is None:
            assert time.monotonic() < deadline, self.output
            time.sleep(0.01)
        self._reader.join()
        return code

    def kill(self) -> None:
        if self._poll() is None:
            self.signal(signal.SIGKILL)
        self.exit_code()


if __name__ == "__main__":
    fork_on_request(socket.socket(fileno=int(sys.argv[1])))
    serve.model.load_model = load
    sys.exit(main())
