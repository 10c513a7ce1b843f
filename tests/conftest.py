"""Settings shared by all tests."""

import os

# Tests run on the CPU unless they are asked for a GPU with `-m gpu`; jax reads this at its first use.
if os.environ.get("JAXSPEC_TEST_GPU") is None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", derandomize=True, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def demo_llm(tmp_path_factory: pytest.TempPathFactory):
    """The embedded demo model in float32, converted, loaded and compiled once for all tests."""
    from jaxspec import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        return LLM("demo", dtype="float32", max_model_len=1024, seed=0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips the PyTorch oracle where PyTorch is not installed (Python 3.12)."""
    try:
        import torch  # noqa: F401
    except ImportError:
        for item in items:
            if item.get_closest_marker("torch"):
                item.add_marker(pytest.mark.skip(reason="needs PyTorch: pip install -e '.[test]' on Python 3.11"))
