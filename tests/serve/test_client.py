"""The client checks against the mock engine. The same checks run against the real one where that is tested."""

import pytest

from tests.serve import client_checks


@pytest.mark.slow
@pytest.mark.parametrize("check", client_checks.ALL, ids=lambda check: check.__name__)
def test_client(mock_server, check):
    check(mock_server.base_url)
