"""Who answers in a chat: a server at a URL, or a model in this process."""

import contextlib
import http.client
import json
import signal
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from jaxspec.errors import ConfigError, InvalidRequestError, shown
from serve.drafts import DraftRun, DraftRuns

if TYPE_CHECKING:
    from jaxspec.llm import LLM
    from jaxspec.sampling.params import SamplingParams

Messages = Sequence[Mapping[str, str]]
# A server that works sends at least a comment line in this time.
_READ_SECONDS = 60.0
_CONNECT_SECONDS = 10.0


@dataclass(frozen=True)
class Piece:
    """What was added to an answer.

    Attributes:
        text: of the answer without its thought; it goes into the history.
        runs: all text, by whether its tokens are accepted drafts.
        num_tokens: new ones.
        histogram: how many windows accepted how many drafts, once the answer has ended; None without speculation.
    """

    text: str
    runs: Sequence[DraftRun]
    num_tokens: int
    histogram: Sequence[int] | None = None


class Talker(Protocol):
    @property
    def name(self) -> str:
        """Of the model, for people."""
        ...

    def answer(self, messages: Messages) -> Iterator[Piece]:
        """The answer as it comes. Who stops reading, or KeyboardInterrupt, ends it.

        Raises:
            JaxspecError: the request is refused or fails.
        """
        ...

    def histogram(self) -> Sequence[int] | None:
        """Windows since the start, by how many drafts they accepted; None without speculation, or if it is not known."""
        ...


class ServerTalker:
    """
    Args:
        url: of the server, with or without /v1.
        key: its API key, if it wants one.
        parameters: of each request, by OpenAI's names.

    Raises:
        ConfigError: no server of OpenAI's API answers there, or it wants another key.
    """

    def __init__(self, url: str, key: str | None, parameters: Mapping[str, Any]):
        self._url = url
        self._place = _place(url)
        self._path = self._place.path.rstrip("/").removesuffix("/v1")
        self._headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._parameters = parameters
        try:
            self._name = str(self._document("/v1/models")["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as e:
            raise ConfigError(f"what answers at {url} names no model at /v1/models") from e
        self._has_figures = True

    @property
    def name(self) -> str:
        return self._name

    def answer(self, messages: Messages) -> Iterator[Piece]:
        body = {
            "model": self._name,
            "messages": messages,
            "stream": True,
            "return_draft_runs": True,
            "return_token_ids": True,
            "return_metrics": True,
            **self._parameters,
        }
        with self._asked("POST", "/v1/chat/completions", json.dumps(body)) as response:
            for event in self._events(response):
                for choice in event["choices"]:
                    figures = (choice.get("metrics") or {}).get("speculative_decoding") or {}
                    text = choice["delta"].get("content") or ""
                    yield Piece(
                        text,
                        choice.get("draft_runs", [DraftRun(text=text, accepted=False)]),  # only we tell them
                        len(choice.get("token_ids") or ()),
                        figures.get("acceptance_histogram"),
                    )

    def histogram(self) -> Sequence[int] | None:
        """A server that does not tell is asked once only."""
        if not self._has_figures:
            return None
        try:
            return (self._document("/server_info")["engine"] or {}).get("acceptance_histogram")
        except (ConfigError, InvalidRequestError, ValueError, LookupError, TypeError):
            self._has_figures = False
            return None

    def _document(self, path: str) -> Any:
        """
        Raises:
            ConfigError, InvalidRequestError: as `_asked`.
            ValueError: what is there is no JSON.
        """
        with self._asked("GET", path) as response:
            return json.loads(response.read())

    def _events(self, response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
        """
        Raises:
            InvalidRequestError: the server tells of an error.
            ConfigError: the stream breaks off.
        """
        for line in response:
            data = line.decode("utf-8").rstrip("\r\n")
            if data == "data: [DONE]":
                return
            if data.startswith("data: "):
                event = json.loads(data.removeprefix("data: "))
                if "error" in event:
                    raise InvalidRequestError(event["error"]["message"])
                yield event
        raise ConfigError(f"the server at {self._url} has broken off its answer")

    @contextlib.contextmanager
    def _asked(self, method: str, path: str, body: str | None = None) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request, on a connection of its own, which a server watches: closing it ends the request.

        Raises:
            ConfigError: there is no answer, it breaks off, or the key is wrong.
            InvalidRequestError: the server refuses the request.
        """
        kind = http.client.HTTPSConnection if self._place.scheme == "https" else http.client.HTTPConnection
        host = str(self._place.hostname)
        with contextlib.closing(kind(host, self._place.port, timeout=_CONNECT_SECONDS)) as connection:
            try:
                connection.connect()
                connection.sock.settimeout(_READ_SECONDS)
                connection.request(method, self._path + path, body, self._headers)
                response = connection.getresponse()
                failure = response.read() if response.status != http.client.OK else b""
            except (OSError, http.client.HTTPException) as e:
                why = getattr(e, "strerror", None) or e or type(e).__name__
                raise ConfigError(f"no server answers at {self._url}: {why}") from e
            if response.status == http.client.UNAUTHORIZED:
                raise ConfigError(f"{self._url} wants a key: give --api-key, or set JAXSPEC_API_KEY")
            if response.status != http.client.OK:
                raise InvalidRequestError(_message(failure) or f"{self._url} answered {response.status}")
            try:
                yield response
            except (OSError, http.client.HTTPException) as e:
                raise ConfigError(f"the server at {self._url} has gone away: {e or type(e).__name__}") from e


def _place(url: str) -> urllib.parse.SplitResult:
    """
    Raises:
        ConfigError: it is no URL of a server.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        if parts.hostname and (parts.port is None or parts.port > 0):
            return parts
    except ValueError:  # a port that is no number
        pass
    raise ConfigError(f"{shown(url)} names no server: give a URL such as http://127.0.0.1:8000")


def _message(body: bytes) -> str | None:
    """Of an error in OpenAI's form."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return None


class ModelTalker:
    """
    Args:
        params: of each answer.
    """

    def __init__(self, llm: "LLM", params: "SamplingParams"):
        self._llm = llm
        self._params = params

    @property
    def name(self) -> str:
        return self._llm.model_name

    def answer(self, messages: Messages) -> Iterator[Piece]:
        prompt = self._llm.chat_prompt(messages)
        runs = DraftRuns()
        with _deferred_interrupt() as raise_if_interrupted:
            for output in self._llm.stream(prompt, self._params):
                accepted = [i < output.num_accepted for i in range(len(output.new_ids))]
                acceptance = output.stats.acceptance if output.stats else None
                yield Piece(
                    output.new_text,
                    runs.add(output.new_text, output.new_text_offsets, accepted),
                    len(output.new_ids),
                    acceptance.histogram if acceptance else None,
                )
                if output.error:
                    raise InvalidRequestError(output.error)
                raise_if_interrupted()

    def histogram(self) -> Sequence[int] | None:
        acceptance = self._llm.engine.stats().acceptance
        return acceptance.histogram if acceptance else None


@contextlib.contextmanager
def _deferred_interrupt() -> Iterator[Callable[[], None]]:
    """Ctrl-C waits until it is asked for: it may not stop a step of the engine in the middle."""
    interrupted = False

    def note(_number: int, _frame: Any) -> None:
        nonlocal interrupted
        interrupted = True

    def raise_if_interrupted() -> None:
        if interrupted:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, note)
    try:
        yield raise_if_interrupted
    finally:
        signal.signal(signal.SIGINT, before)
