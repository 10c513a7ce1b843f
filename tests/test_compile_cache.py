"""The folder of compiled steps: this user's alone, and only where it is used."""

import jax
import pytest

from jaxspec import compile_cache
from jaxspec.errors import ConfigError
from jaxspec.llm import LLM


@pytest.fixture
def settings(monkeypatch):
    """What would be told to jax, instead of telling it."""
    told = {}
    monkeypatch.setattr(jax.config, "update", told.__setitem__)
    return told


def test_a_new_folder_is_closed_to_others(settings, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    compile_cache.enable(None)
    folder = tmp_path / "xla"
    assert settings["jax_compilation_cache_dir"] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_off(settings):
    compile_cache.enable(compile_cache.OFF)
    assert not settings


def test_a_folder_that_others_may_enter_is_refused(settings, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(ConfigError, match="yours alone"):
        compile_cache.enable(str(tmp_path))
    assert not settings


def test_an_explicit_folder_is_not_ignored_on_a_cpu(tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="is for GPUs"):
        LLM("demo", compilation_cache_dir=str(tmp_path / "xla"))
