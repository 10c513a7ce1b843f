"""A step log on a full disk ends; the engine that writes it goes on."""

import logging
from pathlib import Path

import pytest

from jaxspec.engine.buckets import Bucket
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.step_log import StepLog, StepTimes


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_disk_is_one_warning(caplog: pytest.LogCaptureFixture):
    log = StepLog("/dev/full")
    with caplog.at_level(logging.WARNING, logger="jaxspec"):
        for _ in range(3):
            log.write(StepPlan((), ()), Bucket(0, 0, 1, "full"), StepTimes(0, 0, 0, 0, 0), [], [], waiting=0)
        log.close()
    assert [record.getMessage() for record in caplog.records] == ["the step log ends here: No space left on device"]
