"""`jaxspec chat` in a real terminal: answers, drafts, figures, commands, Ctrl-C; and where there is no terminal."""

import contextlib
import http.server
import io
import json
import os
import re
import subprocess
import sys
import threading

import pytest

from serve import cli
from serve.terminal.conversation import Conversation
from serve.terminal.screen import Screen, figures
from serve.terminal.talkers import ModelTalker, Piece
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served
from tests.serve.terminal import GREEN, Terminal

K = 3
KEY = {"JAXSPEC_API_KEY": "secret"}


@pytest.fixture
def engine():
    return MockEngine(k=K, max_model_len=100_000, says="one two three four")


@pytest.fixture
def server(start_server, engine):
    return start_server(served(engine, byte_tokenizer()), api_keys=("secret",))


@pytest.fixture
def terminal(server):
    opened = []

    def open_terminal(*argv, **variables):
        opened.append(Terminal(["chat", *argv, server.base_url], **KEY | variables))
        return opened[-1]

    yield open_terminal
    for each in opened:
        each.close()


def test_a_chat_in_a_terminal(terminal, server, engine):
    chat = terminal("--system", "Be brief.")
    chat.wait_for_prompt()
    chat.type("hello\n")
    chat.wait_for_prompt()
    rows = chat.screen()
    (shown,) = [row for row in rows if "".join(c for c, _ in row).startswith("one two three four")]
    drafted = "".join(c for c, color in shown if color == GREEN)
    body = {"messages": [{"role": "user", "content": "hello"}], "return_draft_runs": True, "temperature": 0}
    body["messages"].insert(0, {"role": "system", "content": "Be brief."})
    headers = {"authorization": "Bearer secret"}
    (choice,) = server.post("/v1/chat/completions", body, headers=headers).json()["choices"]
    assert drafted == "".join(run["text"] for run in choice["draft_runs"] if run["accepted"])
    assert 0 < len(drafted) < len("one two three four")
    (line,) = [line for line in chat.lines() if "a step" in line]
    assert re.fullmatch(r"19 tokens, [\d.]+ tokens/s, [\d.]+ a step, drafts accepted by position: 50 %, .*", line)

    chat.type("again\n")
    chat.wait_for_prompt()
    assert "<|user|>hello<|assistant|>one two three four<|user|>again" in engine.prompts[-1]
    for line, answer in (
        ("/clear", "A new conversation."),
        ("/nothing", "no command /nothing"),
        ("/help", "Ctrl-C stops"),
    ):
        chat.type(f"{line}\n")
        chat.wait_for_text(answer)
        chat.wait_for_prompt()
    chat.type("/etc/passwd is what?\n")
    chat.wait_for(lambda: engine.prompts[-1].endswith("<|system|>Be brief.<|user|>/etc/passwd is what?<|assistant|>"))
    chat.wait_for_prompt()
    chat.type("\4")
    assert chat.end() == 0


def test_ctrl_c_stops_an_answer_and_the_figures_stay_at_the_bottom(terminal, engine):
    engine.says = "word \n" * 20_000
    chat = terminal()
    chat.wait_for_prompt()
    chat.type("hello\n")
    chat.wait_for(lambda: "drafts accepted by position" in chat.lines()[-1])
    assert all("word".startswith(line) for line in chat.lines()[2:-1])
    assert engine.has_work
    chat.type("\3")
    chat.wait_for_text("stopped: ")
    chat.wait_for(lambda: not engine.has_work)
    # The terminal scrolls as a whole again.
    assert chat.written.rindex("\033[r") > chat.written.rindex(f"\033[1;{chat.rows - 1}r")
    chat.wait_for_prompt()
    chat.press_until("\3", "/exit or Ctrl-D ends.")
    chat.wait_for_prompt()
    engine.says = "done"
    chat.type("again\n")
    chat.wait_for(lambda: engine.prompts[-1].endswith("<|user|>again<|assistant|>"))
    assert "<|user|>hello<|assistant|>word" in engine.prompts[-1]
    chat.wait_for(lambda: "done" in chat.lines())
    chat.type("/exit\n")
    assert chat.end() == 0


@pytest.mark.parametrize("variables", [{"NO_COLOR": "1"}, {"TERM": "dumb"}])
def test_without_colours_nothing_but_text_is_written(terminal, variables):
    chat = terminal(**variables)
    chat.wait_for_prompt()
    chat.type("hello\n")
    chat.wait_for_prompt()
    assert "drafts accepted by position" in chat.written
    assert not re.search(r"\033\[[\d;]*[mHr]|\0337", chat.written)
    assert "one two three four" in chat.lines()


def test_without_a_terminal_there_are_answers_only(server, engine):
    engine.says = "a\x1b[31mb\x07\tc\n"
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from serve.cli import main; sys.exit(main())", "chat", f"{server.base_url}/v1/"],
        input="hello\n/help\n\nagain\n", capture_output=True, text=True, env={**os.environ, **KEY}, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("a�[31mb�\tc\n" * 2, "")


def ask(monkeypatch, capsys, *argv, typed="hello\n"):
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    code = cli.main(["chat", *argv])
    return code, capsys.readouterr()


def test_what_cannot_work_is_one_line(server, engine, monkeypatch, capsys):
    url = server.base_url
    for argv, message in (
        ([url], "wants a key: give --api-key, or set JAXSPEC_API_KEY"),
        (["http://127.0.0.1:9"], "no server answers at http://127.0.0.1:9: Connection refused"),
        (["http://"], "names no server"),
        (["http://a:b"], "names no server"),
        ([url, "--max-model-len", "9"], "--max-model-len is for a model"),
        ([url, "--sytem", "x"], "did you mean --system?"),
    ):
        code, said = ask(monkeypatch, capsys, *argv)
        assert code in (1, 2)
        assert message in said.err
        assert said.err.count("\n") == 1
    code, said = ask(monkeypatch, capsys, url, "--api-key", "secret", "--max-tokens", "100000000")
    assert (code, said.err) == (1, "")
    assert said.out.startswith("error: ")
    engine.nan_in = 256
    code, said = ask(monkeypatch, capsys, url, "--api-key", "secret", "--temperature", "0")
    assert (code, said.out) == (1, "error: the model produced NaN\n")


@contextlib.contextmanager
def other_server(models: bytes, events: bytes = b"", *, cut: bool = False):
    """The URL of a server that is not ours; with `cut` it breaks its answers off."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self._answer(200 if self.path == "/v1/models" else 404, models)

        def do_POST(self):
            self._answer(200, events)

        def _answer(self, status, content):
            self.send_response(status)
            self.send_header("content-length", str(len(content) + cut))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("models", "message"),
    [(each, "names no model") for each in (b"<html>", b"[]", b'{"data": []}', b"null", b"\xff")]
    + [(b'{"data"', "has gone away")],
)
def test_what_is_no_server_of_a_model_is_one_line(monkeypatch, capsys, models, message):
    with other_server(models, cut=message == "has gone away") as url:
        code, said = ask(monkeypatch, capsys, url)
    assert (code, said.out, said.err.count("\n")) == (1, "", 1)
    assert message in said.err


def test_a_server_that_tells_no_drafts(monkeypatch, capsys):
    """Its text is shown, and nothing that it says can move the cursor."""
    deltas = [{"role": "assistant"}, {"content": "one "}, {"content": "two"}]
    events = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    stream = "".join(f"data: {json.dumps(event)}\n\n" for event in events)
    models = b'{"data": [{"id": "other"}]}'
    with other_server(models, stream.encode() + b"data: [DONE]\n\n") as url:
        assert ask(monkeypatch, capsys, url) == (0, ("one two\n", ""))
    failed = stream + f"data: {json.dumps({'error': {'message': 'bad' + chr(27) + '[2J'}})}\n\n"
    with other_server(models, failed.encode()) as url:
        assert ask(monkeypatch, capsys, url) == (1, ("one two\nerror: bad\ufffd[2J\n", ""))


class _Interrupted:
    """A talker that Ctrl-C meets in one of its methods."""

    name = "mock"

    def __init__(self, where):
        self.where = where

    def answer(self, _messages):
        yield Piece("text", [{"text": "text", "accepted": False}], 1)
        if self.where == "answer":
            raise KeyboardInterrupt

    def histogram(self):
        if self.where == "histogram":
            raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["answer", "histogram"])
def test_ctrl_c_ends_what_is_no_terminal_and_no_conversation_on_one(monkeypatch, where):
    screen = Screen(io.StringIO("hello\n"), io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        Conversation(_Interrupted(where), screen).run()
    monkeypatch.setattr(screen, "interactive", True)
    monkeypatch.setattr(screen, "ask", iter(["hello\n", None]).__next__)
    assert Conversation(_Interrupted(where), screen).run() == 0


class _Llm:
    """As much of `LLM` as a chat uses, around the mock engine."""

    model_name = "mock"

    def __init__(self, engine):
        from jaxspec.grammar.compiler import GrammarCompiler
        from jaxspec.llm import LLM

        self.engine, self.tokenizer = engine, byte_tokenizer()
        self.grammars = GrammarCompiler(self.tokenizer, engine.vocab_size, [])
        self._counter = iter(range(100))
        for name in ("chat_prompt", "stream", "make_request"):
            setattr(self, name, getattr(LLM, name).__get__(self))


def test_a_model_in_this_process(engine):
    from jaxspec import SamplingParams

    params = SamplingParams(max_tokens=None, temperature=0)
    talker = ModelTalker(_Llm(engine), params)
    out = io.StringIO()
    assert Conversation(talker, Screen(io.StringIO("hello\nagain\n"), out), "Be brief.").run() == 0
    assert out.getvalue() == "one two three four\n" * 2
    assert engine.prompts[-1].startswith("<|begin|><|system|>Be brief.<|user|>hello<|assistant|>one two")
    pieces = list(talker.answer([{"role": "user", "content": "x"}]))
    assert {run["accepted"] for piece in pieces for run in piece.runs} == {True, False}
    assert sum(pieces[-1].histogram) > 0
    assert sum(piece.num_tokens for piece in pieces) == 19


def test_ctrl_c_waits_for_the_end_of_a_step(engine):
    import signal

    from jaxspec import SamplingParams

    inside = threading.Event()
    step = engine.step

    def interrupted_step():
        signal.raise_signal(signal.SIGINT)
        inside.set()
        return step()

    engine.step = interrupted_step
    before = signal.getsignal(signal.SIGINT)
    answer = ModelTalker(_Llm(engine), SamplingParams(max_tokens=None)).answer([{"role": "user", "content": "x"}])
    assert next(answer)
    with pytest.raises(KeyboardInterrupt):
        next(answer)
    assert inside.is_set()
    assert not engine.has_work or len(engine.aborted) == 1
    assert signal.getsignal(signal.SIGINT) is before


def test_figures():
    assert figures(1, 0, None) == "1 token"
    assert figures(30, 2.0, [0, 0, 0]) == "30 tokens, 15.0 tokens/s"
    assert figures(30, 2.0, [5, 3, 2]) == (
        "30 tokens, 15.0 tokens/s, 1.70 a step, drafts accepted by position: 50 %, 20 %"
    )
