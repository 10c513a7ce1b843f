"""What holds all of Python up for a moment is done where no request has come for a while, and before requests that need it."""

import dataclasses
import time

from jaxspec.grammar.compiler import GrammarCompiler
from serve import engine_thread
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

BODY = {"prompt": "hi", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


class Watched(GrammarCompiler):
    """Says when it has grown."""

    times: list[float]

    def grow(self) -> bool:
        more = super().grow()
        self.times.append(time.monotonic())
        return more


def test_trees_grow_between_requests(start_server, monkeypatch):
    monkeypatch.setattr("jaxspec.grammar.compiler.MASK_THREADS", 3)
    monkeypatch.setattr(engine_thread, "_GROW_SECONDS", 0.3)
    engine, tokenizer = MockEngine(), byte_tokenizer()
    grammars = Watched(tokenizer, engine.vocab_size, [engine.eos])
    grammars.times = []
    grammars.prepare()
    server = start_server(dataclasses.replace(served(engine, tokenizer), grammars=grammars))
    sent = []
    for _ in range(8):  # with pauses of less than the time that it waits
        sent.append(time.monotonic())
        assert server.post("/v1/completions", BODY).status_code == 200
        time.sleep(0.1)
    server.wait_until(lambda: len(grammars.times) == 2)
    for grown in grammars.times:
        assert grown - max(each for each in sent if each < grown) >= 0.3
    assert grammars.times[1] - grammars.times[0] >= 0.3
    time.sleep(0.7)
    assert len(grammars.times) == 2, "there are all"
    constrained = {"prompt": "hi", "structured_outputs": {"choice": ["yes"]}}
    assert server.post("/v1/completions", constrained).json()["choices"][0]["text"] == "yes"
