"""A GPU's steps compile while the weights are on their way; here a CPU takes itself for one."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

import jaxspec.loading.engine as loading
from jaxspec import SamplingParams
from jaxspec.compile_cache import FileStore
from jaxspec.config import EngineConfig
from jaxspec.engine import warmup
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.warmup import Preparation
from jaxspec.errors import ConfigError, ModelFormatError
from jaxspec.loading.checkpoint import load_params, open_checkpoint
from tests.conftest import few_buckets
from tests.engine.tiny import run

pytestmark = pytest.mark.torch
CONFIG = EngineConfig(dtype="float32", max_model_len=128, max_num_seqs=2, max_num_batched_tokens=64, readout_depth=0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """With memory for every model of a test. Returns where its executables are kept."""
    plan = loading.plan_engine
    monkeypatch.setattr(loading, "plan_engine", lambda *given: dataclasses.replace(plan(*given), on_gpu=True))
    monkeypatch.setattr(loading.Plan, "free_bytes", lambda _: 1 << 40)
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path / "cache"))
    few_buckets(monkeypatch, decode=False)
    return tmp_path / "cache" / "executables"


def text(engine: Engine) -> list[int]:
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    return run(engine, [Request("r", [5, 6, 7], params)])[0]["r"]


@pytest.mark.slow
def test_steps_compile_while_weights_load(source: Callable[[str], Path], gpu: Path, monkeypatch: pytest.MonkeyPatch):
    """They are those of the parameters themselves, by name and by result."""
    begun, load, begin = threading.Event(), loading.load_params, Preparation.begin

    def begin_told(self, *buckets):
        begin(self, *buckets)
        begun.set()

    def load_then(*given, **options):
        assert begun.is_set()
        return load(*given, **options)

    monkeypatch.setattr(Preparation, "begin", begin_told)
    monkeypatch.setattr(loading, "load_params", load_then)
    folder = source("llama")
    engine, _ = loading.build_engine(folder, CONFIG)
    engine.warm_up()
    assert engine.runner.num_kept == 0

    mesh = engine.runner.launcher.leaves[0].sharding.mesh
    model, params = load_params(open_checkpoint(folder), mesh, "float32")
    for ours, loaded in zip(engine.runner.launcher.leaves, jax.tree.leaves(params), strict=True):
        assert (ours.shape, ours.sharding) == (loaded.shape, loaded.sharding)
    later = Runner(model, params, engine.settings, mesh, files=FileStore(gpu))
    second = Engine(later, vocab_size=model.config.vocab_size)
    second.warm_up()
    assert later.num_kept == len(later.buckets)
    assert text(second) == text(engine)


@pytest.mark.slow
def test_a_second_start_loads_what_the_first_has_kept(
    source: Callable[[str], Path], gpu: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Those that it is ready with and, while it serves, the others, which another process compiled for the first one."""
    caplog.set_level(logging.INFO, "jaxspec.warmup")

    def table(settings):
        largest = max(bucket_table(settings), key=lambda bucket: (bucket.tokens, bucket.variant == "full"))
        return dataclasses.replace(largest, variant="lean"), largest

    monkeypatch.setattr("jaxspec.engine.runner.bucket_table", table)
    monkeypatch.setattr(warmup, "_QUIET_SECONDS", 0.0)
    engines = []
    for _ in range(2):
        engine, _ = loading.build_engine(source("llama"), CONFIG)
        engine.warm_up(wait_for_all=False)
        assert engine.runner.num_pending == 1
        deadline = time.monotonic() + 120
        while engine.prepare() and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.runner.stop()
        assert len(engine.runner.ready) == 2
        engines.append(engine)
    first, second = engines
    assert (first.runner.num_kept, second.runner.num_kept) == (0, 1)
    assert [message.split(",")[0] for message in caplog.messages if "while serving" in message] == [
        "loaded 1 of 1 while serving"
    ] * 2
    assert len(list(gpu.iterdir())) >= 2
    assert text(first) == text(second)


def test_a_folder_that_does_not_load(source: Callable[[str], Path], gpu: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: ARG001
    """The error is the loader's, and the threads are told."""
    stopped: list[bool] = []

    def fail(*_, **__):
        raise ModelFormatError("part 001 is damaged")

    monkeypatch.setattr(loading, "load_params", fail)
    monkeypatch.setattr(Preparation, "begin", lambda *_: None)
    monkeypatch.setattr(Preparation, "stop", lambda _: stopped.append(True))
    with pytest.raises(ModelFormatError, match="part 001 is damaged"):
        loading.build_engine(source("llama"), CONFIG)
    assert len(stopped) == 1


def test_a_pool_that_does_not_fit(source: Callable[[str], Path], gpu: Path, monkeypatch: pytest.MonkeyPatch):  # noqa: ARG001
    """Threads have begun by then, and are told."""
    told: list[str] = []

    def out_of_memory():
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: pages")

    monkeypatch.setattr("jaxspec.engine.runner.compile_zeros", lambda _: out_of_memory)
    monkeypatch.setattr(Preparation, "begin", lambda *_: told.append("begin"))
    monkeypatch.setattr(Preparation, "stop", lambda _: told.append("stop"))
    with pytest.raises(ConfigError, match="leave too little memory"):
        loading.build_engine(source("llama"), CONFIG)
    assert told == ["begin", "stop"]
