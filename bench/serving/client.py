"""A client that measures: sends completions to a server, reads their streams and notes when each chunk arrives.

One event loop reads all streams. A chunk's time is that of the read that completed it, taken before anything is parsed.
How late the loop sent a request is recorded too (`Outcome.lag`): a client that is too slow measures itself.
"""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

CONNECT_SECONDS = 10.0
REFUSED = "429"
BROKEN = "broken stream"
NO_CONNECTION = "no connection"
TIMEOUT = "timeout"
_MESSAGE_LENGTH = 300


class StreamReader:
    """Reads the server-sent events of one completion; `feed` is given the bytes as they arrive.

    A chunk's tokens are counted by its `token_ids`, else by its running `usage`; a server that sends neither counts as
    one token a chunk with text, and `exact` is False.

    Attributes:
        times: when each chunk with tokens came, in the unit of `feed`.
        counts: how many tokens each of them held.
        ids: of all tokens, as far as the server tells them.
        usage: of the last chunk that had one.
        error: message of an error event.
    """

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.ids: list[int] = []
        self.exact = True
        self.done = False
        self.finish_reason: str | None = None
        self.usage: Mapping[str, Any] = {}
        self.error: str | None = None
        self._rest = b""

    @property
    def tokens(self) -> int:
        """Tokens of the stream, as the server counts them where the chunks do not say."""
        return sum(self.counts) if self.exact else self.usage.get("completion_tokens", sum(self.counts))

    def feed(self, data: bytes, now: float) -> None:
        """
        Raises:
            ValueError: an event that is not a JSON object.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip(), now)

    def _event(self, data: bytes, now: float) -> None:
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if not isinstance(event, dict):
            raise ValueError(f"an event is not an object: {event!r}")
        if "error" in event:
            error = event["error"]
            self.error = str(error.get("message") if isinstance(error, dict) else error)
            return
        before, self.usage = self.usage.get("completion_tokens", 0), event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
            if choice.get("token_ids") is not None:
                count = len(choice["token_ids"])
                self.ids += choice["token_ids"]
            elif event.get("usage"):
                count = self.usage.get("completion_tokens", 0) - before
            else:
                count = 1 if choice.get("text") else 0
                self.exact = self.exact and not count
            if count > 0:
                self.times.append(now)
                self.counts.append(count)

    def problem(self, asked: int | None) -> str | None:
        """What is wrong with a stream that has ended; `asked`: tokens that it had to have, None if it was free to stop."""
        if self.error is not None:
            return f"error in the stream: {self.error}"
        if not self.done:
            return f"it ended after {self.tokens} tokens without [DONE]"
        if self.finish_reason is None:
            return f"it ended after {self.tokens} tokens without a finish_reason"
        counted = self.usage.get("completion_tokens", self.tokens)
        if counted != self.tokens:
            return f"it held {self.tokens} tokens, and its usage says {counted}"
        known = self.exact or "completion_tokens" in self.usage
        if asked is not None and known and self.tokens != asked:
            return f"it held {self.tokens} tokens, and {asked} were asked for"
        return None


@dataclass
class Outcome:
    """One request. Times are in seconds on the clock of `time.perf_counter`.

    Attributes:
        sent, ended: when its sending began, and when its answer ended, complete or not.
        lag: how much later than planned it was sent.
        failure: None for a complete answer, else its HTTP status, `BROKEN`, `NO_CONNECTION` or `TIMEOUT`.
        message: what was wrong.
    """

    sent: float
    lag: float = 0.0
    ended: float = 0.0
    stream: StreamReader = field(default_factory=StreamReader)
    failure: str | None = None
    message: str = ""


@dataclass(frozen=True)
class Turn:
    """One request of a session: `new` ids after all that was said, so many `tokens` back, sent after a `pause` (s)."""

    new: list[int]
    tokens: int
    pause: float = 0.0


@dataclass(frozen=True)
class Session:
    """Requests one after another, each of which sends the whole conversation.

    Attributes:
        arrival: seconds after the start of the load at which the first is sent.
        body: of each request, without prompt and length.
    """

    arrival: float
    body: Mapping[str, Any]
    turns: tuple[Turn, ...]


async def complete(client: httpx.AsyncClient, body: Mapping[str, Any], timeout: float, lag: float = 0.0) -> Outcome:
    """Sends one completion and reads its stream to the end. Failures of the server or the network are outcomes, not exceptions.

    Args:
        timeout: seconds for the whole request.
    """
    outcome = Outcome(time.perf_counter(), lag)
    asked = body["max_tokens"] if body.get("ignore_eos") else None
    status: int | None = None
    try:
        async with asyncio.timeout(timeout), client.stream("POST", "/v1/completions", json=body) as response:
            status = response.status_code
            if status != 200:
                outcome.failure, outcome.message = str(status), _message(await response.aread())
            else:
                async for data in response.aiter_raw():
                    outcome.stream.feed(data, time.perf_counter())
                if problem := outcome.stream.problem(asked):
                    outcome.failure, outcome.message = BROKEN, problem
    except TimeoutError:
        outcome.failure, outcome.message = TIMEOUT, f"no complete answer within {timeout:g} s"
    except httpx.HTTPError as e:
        what = BROKEN if status == 200 else NO_CONNECTION
        outcome.failure, outcome.message = what, f"{type(e).__name__}: {e}"
    except ValueError as e:
        outcome.failure, outcome.message = BROKEN, f"an event is not JSON: {e}"
    outcome.ended = time.perf_counter()
    outcome.message = outcome.message[:_MESSAGE_LENGTH]
    return outcome


def _message(body: bytes) -> str:
    """Of an error in OpenAI's shape; else the body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode("utf-8", "replace").strip()


def _client(url: str, headers: Mapping[str, str], *, trust_env: bool) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        headers={"accept-encoding": "identity", **headers},  # a compressor would hold chunks back
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),
        trust_env=trust_env,
    )


async def run_load(
    url: str,
    headers: Mapping[str, str],
    bodies: Sequence[Mapping[str, Any]],
    *,
    arrivals: Sequence[float] | None,
    concurrency: int | None,
    timeout: float,
    trust_env: bool = True,
) -> list[Outcome]:
    """Sends all requests, either each at its time or as many at once as `concurrency` says.

    Args:
        arrivals: seconds after the start at which each request is sent, whether earlier ones have ended or not.
        timeout: seconds for each request.
        trust_env: whether the proxies of the environment are used.
    """
    async with _client(url, headers, trust_env=trust_env) as client:
        if arrivals is not None:
            start = time.perf_counter()

            async def send_at(arrival: float, body: Mapping[str, Any]) -> Outcome:
                await asyncio.sleep(start + arrival - time.perf_counter())
                return await complete(client, body, timeout, max(time.perf_counter() - start - arrival, 0.0))

            return await asyncio.gather(*map(send_at, arrivals, bodies))
        outcomes: dict[int, Outcome] = {}
        queue = iter(enumerate(bodies))

        async def work() -> None:
            for index, body in queue:
                outcomes[index] = await complete(client, body, timeout)

        await asyncio.gather(*(work() for _ in range(concurrency or 1)))
        return [outcomes[i] for i in range(len(bodies))]


async def run_sessions(
    url: str, headers: Mapping[str, str], sessions: Sequence[Session], *, timeout: float, trust_env: bool = True
) -> list[Outcome]:
    """Holds all sessions; a session ends with its last turn, or with the first that fails. Outcomes are in their order.

    Args:
        timeout: seconds for each request.
        trust_env: whether the proxies of the environment are used.
    """
    async with _client(url, headers, trust_env=trust_env) as client:
        start = time.perf_counter()

        async def hold(session: Session) -> list[Outcome]:
            outcomes: list[Outcome] = []
            said: list[int] = []
            due = session.arrival
            for turn in session.turns:
                due += turn.pause
                await asyncio.sleep(start + due - time.perf_counter())
                said = said + turn.new
                body = {**session.body, "prompt": said, "max_tokens": turn.tokens}
                outcome = await complete(client, body, timeout, max(time.perf_counter() - start - due, 0.0))
                if outcome.failure is None and len(outcome.stream.ids) != outcome.stream.tokens:
                    outcome.failure = BROKEN
                    outcome.message = "it has no token_ids, which the next turn's prompt is made of (return_token_ids)"
                outcomes.append(outcome)
                if outcome.failure is not None:
                    break
                said = said + outcome.stream.ids
                due = time.perf_counter() - start
            return outcomes

        return [outcome for held in await asyncio.gather(*map(hold, sessions)) for outcome in held]
