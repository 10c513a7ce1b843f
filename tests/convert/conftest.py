"""Checkpoints are made and converted once for all tests that only read them."""

from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from convert.convert import convert_checkpoint
from jaxspec.models.params import TENSOR_AXIS
from tests.tiny_models import tiny_checkpoint


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant -> its Hugging Face folder, read only."""
    root, made = tmp_path_factory.mktemp("sources"), {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = tiny_checkpoint(variant, root / variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def converted(source: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Variant -> its converted folder, read only."""
    root, made = tmp_path_factory.mktemp("converted"), {}

    def get(variant: str) -> Path:
        if variant not in made:
            made[variant] = convert_checkpoint(source(variant), root / variant)
        return made[variant]

    return get


@pytest.fixture(scope="session")
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))
