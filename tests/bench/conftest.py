"""Settings of the benchmarks' tests."""

import dataclasses

import pytest

from jaxspec.engine.buckets import bucket_table


@pytest.fixture
def lean_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's engines have lean buckets too, as on a GPU: `--lean` takes those, and they compile in half the time."""

    def table(settings):
        full = bucket_table(settings)
        return tuple(sorted((*full, *(dataclasses.replace(b, variant="lean") for b in full))))

    monkeypatch.setattr("bench.step.engines.bucket_table", table)
