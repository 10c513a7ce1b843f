"""The client checks once more, with the real engine and the embedded demo model behind the server."""

import pytest

from jaxspec.compat import compiles
from serve.model import ServedModel
from tests.serve import client_checks
from tests.serve.client_checks import PROMPTS
from tests.serve.conftest import _start


@pytest.fixture(scope="module")
def demo_server(demo_llm):
    stops = []
    counts = lambda: (compiles.total, compiles.after_warmup)  # noqa: E731
    model = ServedModel(demo_llm.engine, demo_llm.tokenizer, demo_llm.describe(), counts)
    yield _start(lambda _progress: model, stops, model="demo")
    for stop in stops:
        stop()


@pytest.mark.slow
@pytest.mark.parametrize("check", client_checks.ALL, ids=lambda check: check.__name__)
def test_client(demo_server, check):
    check(demo_server.base_url)


@pytest.mark.slow
def test_metrics_of_a_request(demo_server):
    body = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_metrics": True}
    answer = demo_server.post("/v1/completions", body).json()
    for choice in answer["choices"]:
        figures = choice["metrics"]["speculative_decoding"]
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        assert 24 <= 1 + figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] <= 24 + 3
        assert 1 <= figures["mean_acceptance_length"] <= 4
