"""What is written to a connection is what h11 would write, and silence on a stream is noticed once."""

import h11
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve import generation
from serve.connection import StrictH11
from serve.generation import Silence

ANSWERS = {
    "stream": (200, [("content-type", "text/event-stream")]),
    "whole": (200, [("content-length", "11")]),
    "nothing": (204, []),
    "looks like a stream": (200, [("x-note", "transfer-encoding: chunked"), ("content-length", "11")]),
}


def written(connection: h11.Connection, method: str, version: bytes, answer: str, parts: list[bytes]) -> list[bytes]:
    """The bytes of an answer and, where the connection goes on, of another one after it."""
    out = []
    for _ in range(2):
        connection.receive_data(b"%b / HTTP/%b\r\nhost: here\r\n\r\n" % (method.encode(), version))
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        status, headers = ANSWERS[answer]
        out.append(connection.send(h11.Response(status_code=status, headers=headers, reason=b"")))
        out += [connection.send(h11.Data(data=b"" if method == "HEAD" else part)) for part in parts]
        out.append(connection.send(h11.EndOfMessage()))
        if connection.our_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return out


@given(
    method=st.sampled_from(["GET", "HEAD"]),
    version=st.sampled_from([b"1.0", b"1.1"]),
    parts=st.lists(st.binary(max_size=40), max_size=4),
)
def test_a_stream_is_framed_as_h11_frames_it(method: str, version: bytes, parts: list[bytes]):
    ours, theirs = StrictH11(1 << 16, lambda: None), h11.Connection(h11.SERVER)
    assert written(ours, method, version, "stream", parts) == written(theirs, method, version, "stream", parts)


@pytest.mark.parametrize("version", [b"1.0", b"1.1"])
@pytest.mark.parametrize("answer", ["whole", "nothing", "looks like a stream"])
def test_so_are_other_answers(answer: str, version: bytes):
    parts = [] if answer == "nothing" else [b"hello ", b"world"]
    ours, theirs = StrictH11(1 << 16, lambda: None), h11.Connection(h11.SERVER)
    assert written(ours, "GET", version, answer, parts) == written(theirs, "GET", version, answer, parts)


def test_nothing_is_sent_after_the_end():
    connection = StrictH11(1 << 16, lambda: None)
    written(connection, "GET", b"1.1", "stream", [b"all"])
    with pytest.raises(h11.LocalProtocolError):
        connection.send(h11.Data(data=b"more"))


class Clock:
    """An event loop's, which is moved by hand."""

    def __init__(self):
        self.now = 0.0
        self.calls = []

    def time(self):
        return self.now

    def call_at(self, when, call):
        self.calls.append((when, call))
        return self

    def cancel(self):
        self.calls.clear()

    def move_to(self, now):
        while self.calls and min(self.calls)[0] <= now:
            when, call = self.calls.pop(0)
            self.now = when
            call()
        self.now = now


def test_silence_is_noticed_once_for_each_of_its_lengths(monkeypatch):
    clock, woken = Clock(), []
    monkeypatch.setattr(generation.asyncio, "get_running_loop", lambda: clock)
    silence = Silence(10.0, lambda: woken.append(clock.now))
    clock.move_to(6.0)
    silence.end()
    clock.move_to(15.9)
    assert not woken
    assert not silence.was_long()
    clock.move_to(16.0)
    assert woken == [16.0]
    assert silence.was_long()
    assert not silence.was_long()
    clock.move_to(36.0)
    assert woken == [16.0, 26.0, 36.0]
    assert len(clock.calls) == 1
    silence.close()
    assert not clock.calls
