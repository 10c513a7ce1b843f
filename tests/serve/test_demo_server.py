"""The client checks once more, with the real engine and the embedded demo model behind the server."""

import pytest

from jaxspec.compat import compiles
from serve.model import ServedModel
from tests.serve import client_checks
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
