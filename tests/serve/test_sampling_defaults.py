"""The model's own sampling parameters over HTTP: for what a request leaves unsaid, and for nothing else."""

import dataclasses

import pytest

from serve import cli
from tests.serve.client_checks import client
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05}
MESSAGES = [{"role": "user", "content": "hi"}]
BODIES = [("/v1/completions", {"prompt": "hi"}), ("/v1/chat/completions", {"messages": MESSAGES})]


@pytest.fixture
def engine():
    return MockEngine()


@pytest.fixture
def server(start_server, engine):
    return start_server(dataclasses.replace(served(engine, byte_tokenizer()), sampling_defaults=DEFAULTS))


def used(server, engine, path, body) -> dict[str, float]:
    """The parameters that the engine was given, of those that have defaults."""
    assert server.post(path, body | {"max_tokens": 2}).status_code == 200
    params = engine.finished[-1].params
    return {name: getattr(params, name) for name in DEFAULTS}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_they_apply_to_what_is_left_unsaid(server, engine, path, body):
    assert used(server, engine, path, body) == DEFAULTS
    assert used(server, engine, path, body | dict.fromkeys(DEFAULTS)) == DEFAULTS  # null is as if it were not there
    for name, value in (("top_p", 1.0), ("top_k", 0), ("min_p", 0.0), ("repetition_penalty", 1.0)):
        assert used(server, engine, path, body | {name: value}) == DEFAULTS | {name: value}


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_an_explicit_temperature_of_zero_stays_greedy(server, engine, path, body):
    for zero in (0, 0.0):
        assert used(server, engine, path, body | {"temperature": zero}) == DEFAULTS | {"temperature": 0}
        assert engine.finished[-1].params.greedy


def test_the_official_client_leaves_them_unsaid(server, engine):
    client(server.base_url).chat.completions.create(model="mock", messages=MESSAGES, max_tokens=2)
    assert engine.finished[-1].params.temperature == 0.6


def test_without_defaults_the_apis_own_apply(start_server):
    engine = MockEngine()
    plain = start_server(served(engine, byte_tokenizer()))
    for path, body in BODIES:
        neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
        assert used(plain, engine, path, body) == neutral


def test_a_wrong_override_is_an_error_before_anything_loads(capsys):
    assert cli.main(["serve", "no/such/model", "--override-generation-config", '{"top_p": 2}', "--port", "0"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "error: override_generation_config (--override-generation-config): top_p must be in (0, 1], got 2.0\n"
    )
