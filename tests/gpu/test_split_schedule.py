"""The kernel of split attention's schedule on the GPU, to the bit what XLA computes, and attention that follows it."""

import functools

import pytest

from tests.kernels.schedule_cases import (
    CASES,
    MANY_REQUESTS,
    check_attention,
    check_schedules,
    gqa_decode,
    mla_decode,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(
    "case", [*CASES, MANY_REQUESTS, (512, 1, 2048, 1, 132, 1), (128, 4, 16384, 8, 264, 1)], ids=str
)
def test_is_that_of_plain_xla(case):
    check_schedules(case)


@pytest.mark.parametrize(
    "attend",
    [
        gqa_decode,
        functools.partial(gqa_decode, window=70),
        functools.partial(mla_decode, n=4),
        functools.partial(mla_decode, values=True),
    ],
    ids=["gqa", "gqa, sliding", "mla", "mla, values"],
)
def test_attention_is_the_same(attend):
    check_attention(attend)
