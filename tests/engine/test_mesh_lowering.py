"""What steps over several devices lower to."""

import dataclasses
from typing import Any

import jax
import pytest

from jaxspec.engine.buckets import bucket_table, parts
from jaxspec.engine.runner import Runner
from tests.engine.test_mesh import Case, mesh_of, nextn, params_of
from tests.engine.tiny import SETTINGS


class LoweredOnlyError(Exception):
    """Raised where a step would be compiled."""


@pytest.mark.slow
def test_steps_over_devices_read_no_empty_constant(monkeypatch):
    """XLA's partitioner may find that nothing reads it after all, and then crashes: seen in windows without prompts, whole
    and in two parts."""
    lowered = []

    def stop(step: jax.stages.Lowered, *_: Any) -> None:
        lowered.append(step.as_text())
        raise LoweredOnlyError

    mesh, model, draft = mesh_of(2), Case().target(), nextn()
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=2)
    buckets = tuple(
        b for b in bucket_table(settings) if not b.prefill_tokens and b.decode_rows == settings.max_num_seqs
    )
    assert {b.drafts for b in buckets} == {2}
    runner = Runner(
        model, params_of(model, 1, mesh), settings, mesh, draft=(draft, params_of(draft, 2, mesh)), buckets=buckets,
        split=buckets[-1:],
    )  # fmt: skip
    steps = (*buckets, *parts(buckets[-1]))
    monkeypatch.setattr(jax.stages.Lowered, "compile", stop)
    for step in steps:
        with pytest.raises(LoweredOnlyError):
            runner.compiler.compile(step)
    assert len(lowered) == len(steps)
    for text in lowered:
        (called,) = (line for line in text.splitlines() if "manual_computation" in line)
        assert "tensor<0x" not in called
