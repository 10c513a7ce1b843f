"""Executables that come while steps run."""

import itertools
import time

import pytest

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.executables import Executable
from jaxspec.engine.warmup import Preparation

BUCKETS = tuple(Bucket(0, 0, rows, "lean", 0) for rows in range(1, 9))


@pytest.mark.parametrize("failing", [(), (3,), range(1, 9)], ids=str)
def test_a_step_that_cannot_be_compiled_takes_no_other_along(failing, caplog, monkeypatch):
    """It is logged, and no longer waited for."""
    for name in ("gc.freeze", "sys.setswitchinterval"):  # of the whole process, for good
        monkeypatch.setattr(name, lambda *_: None)
    executables, kept, saved = {b: Executable(None, {}) for b in BUCKETS}, BUCKETS[5], []

    def make(bucket):
        assert bucket != kept
        if bucket.decode_rows in failing:
            raise RuntimeError("it does not compile")
        return executables[bucket]

    preparation = Preparation(
        lambda bucket: executables[bucket] if bucket == kept else None, make, lambda bucket, _: saved.append(bucket)
    )
    preparation.go_on(BUCKETS)
    for _ in itertools.takewhile(lambda _: preparation.num_pending, range(1000)):
        time.sleep(0.01)
    preparation.stop()
    came = [b for b in BUCKETS if b == kept or b.decode_rows not in failing]
    assert preparation.num_pending == 0
    assert dict(preparation.take()) == {b: executables[b] for b in came}
    assert set(saved) == set(came) - {kept}
    failed = sum("could not be compiled" in record.message for record in caplog.records)
    assert failed == len(BUCKETS) - len(came)
