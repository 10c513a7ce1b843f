"""Which members of a matrix run by default: one of each path through the code."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def members(cases: Iterable[Any], default: Collection[Any]) -> list[Any]:
    """Parameters of a test: those in `default` as they are, the others for full runs."""
    cases = list(cases)
    unknown = [case for case in default if case not in cases]
    assert not unknown, f"{unknown} are not in the matrix"
    return [case if case in default else full(case)[0] for case in cases]


def full(*cases: Any) -> list[Any]:
    """Parameters of a test that only full runs have."""
    return [pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.full) for case in cases]
