"""Everything in here needs an NVIDIA GPU: JAXSPEC_TEST_GPU=1 pytest -m gpu."""

import jax
import pytest

from jaxspec.engine.buckets import bucket_table


@pytest.fixture(scope="session", autouse=True)
def gpu() -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("needs an NVIDIA GPU, and JAXSPEC_TEST_GPU=1 so that jax may use it")


def only_buckets_of(patch: pytest.MonkeyPatch, variant: str) -> None:
    """Runners compile only buckets of a variant: compiling is most of these tests, and their requests need no other."""

    def table(settings):
        return tuple(bucket for bucket in bucket_table(settings) if bucket.variant == variant)

    patch.setattr("jaxspec.engine.runner.bucket_table", table)
