"""Kept executables: a second process traces nothing; keys tell apart what differs; damaged ones are compiled again."""

import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from jaxspec.compat import CompileCounter
from jaxspec.compile_cache import FileStore
from jaxspec.config import Settings
from jaxspec.engine import fingerprint, warmup
from jaxspec.engine.buckets import Bucket, bucket_table, choose_bucket
from jaxspec.engine.engine import Engine
from jaxspec.engine.executables import Executable, ExecutableStore
from jaxspec.engine.fingerprint import NotKeptError, canonical
from jaxspec.engine.memory import free_bytes
from jaxspec.engine.runner import Runner
from jaxspec.engine.warmup import Preparation, first_buckets
from jaxspec.models.decoder import CausalLM
from jaxspec.models.params import random_params
from jaxspec.models.registry import read_config
from tests.engine import tiny

MESH = Mesh(np.array(jax.devices()[:1]), ("tensor",))
GPU = Settings(
    max_model_len=512, max_num_seqs=128, max_num_batched_tokens=2048, num_pages=99, dtype="bfloat16", on_gpu=True
)


@pytest.fixture
def store(tmp_path):
    tmp_path.chmod(0o700)
    return ExecutableStore(FileStore(tmp_path), MESH)


def started(folder: Path, seed: int) -> dict:
    command = [sys.executable, "-m", "tests.engine.kept_process", str(folder)]
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


@pytest.mark.long
def test_a_second_process_traces_and_compiles_nothing(tmp_path):
    first, second = (started(tmp_path, seed) for seed in (1, 2))
    assert all(first["counts"].values())
    assert not any(second["counts"].values())
    assert second["packed"] == first["packed"]
    assert second["kernels"] == first["kernels"]
    assert not second["lowered"]
    for file in tmp_path.iterdir():
        file.write_bytes(file.read_bytes()[:-9])
    third = started(tmp_path, 3)
    assert third["packed"] == first["packed"]
    # Text of modules does not depend on the process: two developers' compilers see the same.
    assert third["lowered"] == first["lowered"]


def test_a_loaded_executable_computes_the_same_and_a_damaged_one_is_absent(store, tmp_path, caplog):
    key = store.key("double", (1, 2))
    made = jax.jit(lambda x: x * 2).lower(jnp.ones(3)).compile()
    assert store.load(key) is None
    store.save(key, Executable(made, {"moe": frozenset({"mosaic"})}))
    kept = store.load(key)
    assert kept.compiled(jnp.ones(3)).tolist() == [2, 2, 2]
    assert kept.kernels == {"moe": {"mosaic"}}
    FileStore(tmp_path).write(key, b"sound, but no executable")
    assert store.load(key) is None
    assert "not used" in caplog.text


def test_keys_differ_where_anything_does(store, monkeypatch):
    bucket = bucket_table(GPU)[0]
    values = [bucket, GPU, jax.ShapeDtypeStruct((2, 3), jnp.float32)]
    key = store.key("step", *values)
    assert key == store.key("step", *values)
    others = {
        store.key("step", *reversed(values)),
        store.key("zeros", *values),
        store.key("step", dataclasses.replace(bucket, decode_rows=3), *values[1:]),
        store.key("step", bucket, dataclasses.replace(GPU, num_pages=98), values[2]),
        store.key("step", *values[:2], jax.ShapeDtypeStruct((2, 3), jnp.bfloat16)),
    }
    with jax.default_matmul_precision("highest"):
        others.add(store.key("step", *values))
    monkeypatch.setattr("jaxspec.engine.fingerprint.source_digest", lambda: "other sources")
    fingerprint.forget_process()
    others.add(store.key("step", *values))
    monkeypatch.undo()
    fingerprint.forget_process()
    assert key not in others
    assert len(others) == 7
    assert None not in others


def test_a_digest_stands_for_values_that_keys_have_in_common(store):
    bucket = bucket_table(GPU)[0]
    digest = store.digest(GPU, bucket)
    key = store.key("step", digest, 1)
    assert key == store.key("step", store.digest(GPU, bucket), 1)
    others = {store.key("step", store.digest(bucket, GPU), 1), store.key("step", store.digest(GPU), 1)}
    assert key not in others | {store.key("step", digest, 2)}
    assert store.key("step", store.digest(GPU, Foreign()), 1) is None


def test_equal_sets_and_objects_are_described_equally():
    assert canonical({"b": 1, "a": frozenset("xyz")}) == canonical({"a": frozenset("zyx"), "b": 1})
    assert canonical((1, True)) != canonical((1, 1))


class Foreign:
    pass


@dataclasses.dataclass
class ForeignSpec:
    size: int


@pytest.mark.parametrize("value", [Foreign(), ForeignSpec(1), ForeignSpec, lambda: 0])
def test_what_is_defined_elsewhere_is_not_kept(store, value):
    """Its source is in no key."""
    with pytest.raises(NotKeptError):
        canonical(value)
    assert store.key("step", value) is None
    store.save(None, Executable(None, {}))
    assert store.load(None) is None


@pytest.mark.parametrize(
    "drafts", [{}, {"num_speculative_tokens": 3, "adaptive_drafts": True}], ids=["fixed", "adaptive"]
)
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("seqs", [1, 6, 8, 128])
def test_the_first_buckets_hold_every_plan_of_the_table(mixed, seqs, drafts):
    table = bucket_table(dataclasses.replace(GPU, mixed=mixed, max_num_seqs=seqs, **drafts))
    first = first_buckets(table)
    assert len(first) <= (12 if drafts else 5)
    most = max(b.prefill_tokens for b in table)
    assert drafts or sum(0 < 4 * b.prefill_tokens <= most for b in first) == 1
    if not drafts:
        assert {b.decode_rows for b in first if not b.prefill_rows} == {rows for rows in (1, 8, seqs) if rows <= seqs}
    for b in table:
        sizes = {"prefill_tokens": b.prefill_tokens, "prefill_rows": b.prefill_rows, "decode_rows": b.decode_rows}
        choose_bucket(first, **sizes, full=b.variant == "full", drafts=b.drafts)  # raises where none holds it


A, B, C = (Bucket(0, 0, rows, "full") for rows in (1, 2, 3))


def test_kept_executables_are_loaded_and_the_others_made_and_kept():
    kept, used, told = {A: "kept a"}, {}, []
    preparation = Preparation(kept.get, lambda bucket, *_: f"made {bucket.decode_rows}", kept.__setitem__)
    preparation.run(
        (A, B), used.__setitem__, lambda *report: told.append(report[:2]), lambda *begun: told.append(begun[:2])
    )
    assert used == {A: "kept a", B: "made 2"}
    assert told == [(1, 2), (2, 2), (2, 2)]
    assert set(kept) == {A}  # nothing is written while anything may compile
    preparation.save()
    assert kept[B] == "made 2"


def test_what_was_begun_is_taken_when_it_is_there():
    """Kept or made, and whatever else is prepared; what was begun and compiles still is announced."""
    kept, used, announced, go = {A: "kept a"}, {}, [], threading.Event()

    def make(bucket):
        assert go.wait(30)
        return f"made {bucket.decode_rows}"

    preparation = Preparation(kept.get, make, kept.__setitem__)
    preparation.begin((A, B))

    def announce(number, total, what):
        announced.append((number, total, what))
        go.set()

    preparation.run((A, B, C), used.__setitem__, announce=announce)
    assert used == {A: "kept a", B: "made 2", C: "made 3"}
    assert announced == [(2, 3, B.words), (3, 3, C.words)]
    assert preparation.num_kept == 1
    preparation.save()
    assert kept == used
    preparation.run((A,), lambda *_: None)
    assert preparation.num_kept == 1


def test_nothing_is_left_of_a_start_that_failed():
    preparation = Preparation({}.get, lambda bucket: bucket, lambda *_: None)
    preparation.begin((A, B))
    preparation.stop()
    preparation.save()


def test_the_rest_come_from_threads_and_a_failure_is_logged(caplog):
    """What compiled before, beside and after the one that failed is there, and is kept; it is no longer waited for."""
    kept = {}

    def make(bucket, *_):
        if bucket == C:
            raise RuntimeError("no memory")
        return f"made {bucket.decode_rows}"

    preparation = Preparation(kept.get, make, kept.__setitem__)
    preparation.run((A,), lambda *_: None)
    preparation.go_on((C, B))
    deadline = time.monotonic() + 30
    while preparation.num_pending > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    preparation.stop()
    assert preparation.num_pending == 1  # it does not serve yet
    assert preparation.take() == [(B, "made 2")]
    assert preparation.take() == []
    assert preparation.num_pending == 0
    assert kept == {A: "made 1", B: "made 2"}
    assert "larger ones go on serving" in caplog.text


def test_while_requests_run_nothing_is_prepared(monkeypatch):
    """Nor just after, and all of it once they have ended for a while."""
    monkeypatch.setattr(warmup, "_QUIET_SECONDS", 0.2)
    made = []
    preparation = Preparation({}.get, lambda bucket, *_: made.append(time.monotonic()) or bucket, lambda *_: None)
    preparation.go_on((A, B, C))
    for _ in range(10):
        preparation.working(busy=True)
        ended = time.monotonic()
        preparation.working(busy=False)
        time.sleep(0.05)
    assert not made
    deadline = ended + 30
    while len(made) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    preparation.stop()
    assert len(made) == 3
    assert min(made) - ended >= 0.2
    assert preparation.num_pending == 3


def test_requests_that_come_wait_for_one_trace_at_most(monkeypatch):
    """Threads that had begun trace no more until the requests have ended for a while."""
    monkeypatch.setattr(warmup, "_QUIET_SECONDS", 0.2)
    monkeypatch.setattr(warmup, "_PATIENCE_SECONDS", 60.0)
    monkeypatch.setattr(warmup, "os", SimpleNamespace(cpu_count=lambda: 8))  # a thread for each
    tracing, begun, traced, go = threading.Lock(), threading.Semaphore(0), [], threading.Event()

    def make(bucket, may_trace):
        begun.release()
        with tracing:
            may_trace()
            traced.append(time.monotonic())
            assert go.wait(30)
        return bucket

    preparation = Preparation({}.get, make, lambda *_: None)
    preparation.go_on((A, B, C))
    for _ in range(3):
        assert begun.acquire(timeout=30)
    deadline = time.monotonic() + 30
    while not traced and time.monotonic() < deadline:
        time.sleep(0.01)
    preparation.working(busy=True)
    go.set()
    time.sleep(0.5)
    assert len(traced) == 1
    preparation.working(busy=False)
    ended = time.monotonic()
    deadline = ended + 30
    while len(traced) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    preparation.stop()
    assert len(traced) == 3
    assert traced[1] - ended >= 0.19


def test_under_a_load_without_end_executables_come_one_by_one(monkeypatch):
    """Got at intervals by any thread, and taken at intervals."""
    monkeypatch.setattr(warmup, "_PATIENCE_SECONDS", 0.6)
    monkeypatch.setattr(warmup, "_PACE_SECONDS", 0.3)
    made = []
    preparation = Preparation({}.get, lambda bucket, *_: made.append(time.monotonic()) or bucket, lambda *_: None)
    began = time.monotonic()
    preparation.go_on((A, B))
    preparation.working(busy=True)
    taken, deadline = [], time.monotonic() + 30
    while len(taken) < 2 and time.monotonic() < deadline:
        taken += [time.monotonic() for _ in preparation.take_under_load()]
        time.sleep(0.01)
    preparation.stop()
    assert preparation.num_pending == 0
    for times in (made, taken):
        first, second = times
        assert first - began >= 0.59
        assert second - first >= 0.29


@pytest.mark.long
def test_an_idle_engine_takes_what_was_prepared():
    """No request need come before the steps that are compiled after the start have run and serve."""
    model, mesh = CausalLM(read_config(tiny.HF_CONFIG), jnp.float32), MESH
    params = random_params(model, mesh, seed=3, randomize_norms=True)
    settings = dataclasses.replace(tiny.SETTINGS, on_gpu=True)
    late, *first = Bucket(0, 0, 2, "lean"), Bucket(0, 0, 4, "lean"), Bucket(64, 8, 8, "lean")
    runner = Runner(model, params, settings, mesh, buckets=(late, *first))
    engine = Engine(runner, vocab_size=tiny.VOCAB)
    engine.warm_up(wait_for_all=False)
    deadline = time.monotonic() + 60
    while engine.prepare() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert engine.stats().buckets_pending == 0
    assert not engine.prepare()
    assert runner.executable(late) is not None


def test_compilations_apart_are_no_faults():
    counter = CompileCounter()
    counter.mark_warm()
    before = counter.total
    with counter.apart():
        jax.jit(lambda x: x + 41).lower(1).compile()
    assert (counter.total - before, counter.num_apart, counter.after_warmup) == (1, 1, 0)
    jax.jit(lambda x: x + 42).lower(1).compile()
    assert (counter.total - before, counter.num_apart, counter.after_warmup) == (2, 1, 1)


def test_free_memory_is_measured_once_unless_more_is_in_use(store):
    device = SimpleNamespace(in_use=1000, memory_stats=lambda: {"bytes_in_use": device.in_use})
    key, measured = store.key("memory", 1), iter((5, 6))

    def ask():
        return free_bytes(lambda: next(measured), store, key, [device], slack=10)

    assert [ask(), ask()] == [5, 5]
    device.in_use = 1011
    assert [ask(), ask()] == [6, 6]
