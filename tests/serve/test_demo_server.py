"""The client checks once more, with the real engine and the embedded demo model behind the server."""

import pytest

from jaxspec.compat import compiles
from serve.model import ServedModel
from tests.matrices import members
from tests.serve import client_checks
from tests.serve.client_checks import PROMPTS
from tests.serve.conftest import serve_in_thread


@pytest.fixture(scope="module")
def demo_server(demo_llm):
    stops = []
    counts = lambda: (compiles.total, compiles.after_warmup)  # noqa: E731
    model = ServedModel(demo_llm.engine, demo_llm.tokenizer, demo_llm.describe(), counts)
    yield serve_in_thread(lambda _progress: model, stops, model="demo")
    for stop in stops:
        stop()


# What needs no model's own text is as it is with the mock engine.
AS_WITH_THE_MOCK_ENGINE = (
    client_checks.check_bad_requests,
    client_checks.check_choices,
    client_checks.check_neutral_values_pass,
    client_checks.check_stream_contract,
)
OF_MODELS = [check for check in client_checks.ALL if check not in AS_WITH_THE_MOCK_ENGINE]


@pytest.mark.long
@pytest.mark.parametrize("check", members(client_checks.ALL, default=OF_MODELS), ids=lambda check: check.__name__)
def test_client(demo_server, check):
    check(demo_server.base_url)


@pytest.mark.long
def test_metrics_of_a_request(demo_server):
    body = {"prompt": PROMPTS, "max_tokens": 24, "temperature": 0, "ignore_eos": True, "return_metrics": True}
    answer = demo_server.post("/v1/completions", body).json()
    for choice in answer["choices"]:
        figures = choice["metrics"]["speculative_decoding"]
        assert sum(figures["acceptance_histogram"]) == figures["num_spec_steps"]
        assert 24 <= 1 + figures["num_spec_steps"] + figures["num_accepted_draft_tokens"] <= 24 + 3
        assert 1 <= figures["mean_acceptance_length"] <= 4


@pytest.mark.long
def test_prompts_that_begin_alike_share_pages_under_one_salt(demo_server):
    def answer(**extra):
        body = {"prompt": "def double(x):\n    return 2 * x\n" * 12, "max_tokens": 12, "temperature": 0, **extra}
        whole = demo_server.post("/v1/completions", body).json()
        return whole["choices"][0]["text"], whole["usage"]["prompt_tokens_details"]["cached_tokens"], whole["usage"]

    def hits():
        lines = demo_server.get("/metrics").text.splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith("jaxspec:prefix_cache_hits_total{"))

    before = hits()
    text, cached, usage = answer(cache_salt="one")
    assert cached == 0
    again, cached, _ = answer(cache_salt="one")
    assert cached >= 64
    assert cached % 64 == 0
    assert cached < usage["prompt_tokens"]
    assert hits() == before + cached
    other, cached, _ = answer(cache_salt="two")
    assert cached == 0
    assert text == again == other
    error = demo_server.post("/v1/completions", {"prompt": "x", "cache_salt": ""})
    assert error.status_code == 400
    assert error.json()["error"]["param"] == "cache_salt"
