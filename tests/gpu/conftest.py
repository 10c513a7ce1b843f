"""Everything in here needs an NVIDIA GPU: JAXSPEC_TEST_GPU=1 pytest -m gpu."""

import jax
import pytest


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU, and JAXSPEC_TEST_GPU=1 so that jax may use it")
