"""Steps that another process compiles."""

import dataclasses
import functools
import pickle
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from bench.harness.models import declare
from jaxspec.compile_cache import FileStore
from jaxspec.engine import warmup
from jaxspec.engine.buckets import Bucket, bucket_table
from jaxspec.engine.compile_process import CompileProcess, compile_beside, from_bytes, to_bytes
from jaxspec.engine.executables import ExecutableStore
from jaxspec.engine.fingerprint import jax_options
from jaxspec.engine.runner import Runner
from jaxspec.engine.warmup import Preparation
from jaxspec.models.params import random_params
from tests.engine.tiny import HF_CONFIG, SETTINGS

A, B, C = (Bucket(0, 0, rows, "full") for rows in (1, 2, 3))
SMALLEST = dataclasses.replace(bucket_table(SETTINGS)[0], variant="lean")


def tiny(folder, *buckets: Bucket, k: int = 0) -> Runner:
    """Before its warm-up."""
    model, draft = declare(HF_CONFIG, np.dtype(np.float32))
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=k)
    return Runner(
        model, random_params(model, mesh, seed=3), settings, mesh, buckets=buckets or None, files=FileStore(folder),
        draft=(draft, random_params(draft, mesh, seed=4)) if k else None,
    )  # fmt: skip


@pytest.mark.parametrize("k", [0, 3])
def test_what_is_sent_has_the_same_keys(tmp_path, k):
    runner = tiny(tmp_path, k=k)
    sent = from_bytes(to_bytes(runner.compiler))
    keys = [runner.compiler.key("step", bucket) for bucket in runner.buckets]
    assert None not in keys
    assert [sent.key("step", bucket) for bucket in runner.buckets] == keys
    del sent.__dict__["_common"]  # also where it is not sent, but described anew
    assert [sent.key("step", bucket) for bucket in runner.buckets] == keys


@pytest.mark.slow
def test_a_step_of_another_process_is_found_and_computes_the_same(tmp_path):
    there, here = tmp_path / "there", tmp_path / "here"
    there.mkdir()
    here.mkdir()
    runner = tiny(there, SMALLEST)
    strange = dataclasses.replace(SMALLEST, decode_rows=5)  # has no layout
    process = CompileProcess(runner.compiler, [strange, SMALLEST])
    assert list(process.finished([strange, SMALLEST])) == [SMALLEST]
    assert list(process.finished([SMALLEST])) == [SMALLEST]
    assert compile_beside(runner.compiler, [SMALLEST]) is None
    runner.warm_up()
    assert runner.num_kept == 1
    alone = tiny(here, SMALLEST)
    alone.warm_up()
    assert alone.num_kept == 0
    ran = [np.asarray(each.run_padding(SMALLEST).packed) for each in (runner, alone)]
    np.testing.assert_array_equal(*ran)


@pytest.mark.slow
def test_it_ends_when_it_is_stopped_and_when_its_parent_ends(tmp_path):
    runner = tiny(tmp_path, SMALLEST)
    process = CompileProcess(runner.compiler, [SMALLEST])
    process.stop()
    assert list(process.finished([SMALLEST])) == []
    job = pickle.dumps((jax_options(), to_bytes((runner.compiler, (SMALLEST,)))))
    command = [sys.executable, "-m", "jaxspec.engine.compile_process"]
    ran = subprocess.run(command, input=job, stdout=subprocess.PIPE, timeout=60, check=False)  # which closes the input
    assert ran.returncode
    assert not ran.stdout
    assert not runner.compiler.store.has(runner.compiler.key("step", SMALLEST))


def test_a_process_that_cannot_start_compiles_nothing(tmp_path, monkeypatch):
    runner = tiny(tmp_path, SMALLEST)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert list(CompileProcess(runner.compiler, [SMALLEST]).finished([SMALLEST])) == []


class Beside:
    """A process that keeps some of its buckets and then ends."""

    def __init__(self, kept, keeps, buckets):
        self.buckets, self.is_stopped = tuple(buckets), False
        self._kept, self._keeps = kept, keeps

    def finished(self, buckets):
        for bucket in set(self._keeps) & set(buckets):
            self._kept[bucket] = f"beside {bucket.decode_rows}"
            yield bucket

    def stop(self):
        self.is_stopped = True


@pytest.mark.parametrize("begun", [True, False])
def test_what_another_process_keeps_is_loaded_and_the_rest_compiled_here(monkeypatch, caplog, begun):
    """Whether it has begun before or begins now; a bucket that it says to have kept, and has not, is compiled as well."""
    monkeypatch.setattr(warmup, "_QUIET_SECONDS", 0.0)
    kept, asked = {}, []

    def compile_beside(buckets):
        asked.append(Beside(kept, [B], buckets))
        return asked[-1]

    preparation = Preparation(
        kept.get, lambda bucket, *_: f"made {bucket.decode_rows}", kept.__setitem__, compile_beside
    )
    if begun:
        preparation.begin_beside([B, C])
    preparation.go_on([A, B, C])
    deadline = time.monotonic() + 30
    while len(kept) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    preparation.stop()
    assert kept == {A: "made 1", B: "beside 2", C: "made 3"}
    assert dict(preparation.take()) == kept
    assert len(asked) == 1
    assert asked[0].is_stopped
    assert set(asked[0].buckets) == ({B, C} if begun else {A, B, C})
    assert f"ended early: {1 if begun else 2} are compiled by this one" in caplog.text


def test_a_start_that_waits_for_all_takes_what_another_process_compiles():
    kept, used, announced = {A: "kept a"}, {}, []
    preparation = Preparation(
        kept.get,
        lambda bucket, *_: f"made {bucket.decode_rows}",
        kept.__setitem__,
        functools.partial(Beside, kept, [B]),
    )
    preparation.begin_beside((B, C))
    preparation.begin(())
    preparation.run((A,), used.__setitem__)
    assert list(used) == [A]  # others are not waited for
    preparation.run((A, B, C), used.__setitem__, announce=lambda number, *_: announced.append(number))
    assert used == {A: "kept a", B: "beside 2", C: "made 3"}
    assert preparation.num_kept == 1
    assert announced == [2, 3]
    preparation.save()
    assert kept == used


def test_a_store_is_sent_without_what_it_has_not_kept_yet(tmp_path):
    store = ExecutableStore(FileStore(tmp_path), Mesh(np.array(jax.devices()[:1]), ("tensor",)))
    store.load_or_make("name", lambda: jax.jit(lambda: 1).lower().compile())
    sent = from_bytes(to_bytes(store))
    sent.flush()
    assert not store.has("name")
    store.flush()
    assert sent.has("name")
    assert sent.key("what", 1) == store.key("what", 1)


def test_without_a_job_it_says_so_to_people_only():
    ran = subprocess.run(
        [sys.executable, "-m", "jaxspec.engine.compile_process"], input=b"", capture_output=True, check=False
    )
    assert ran.returncode
    assert b"EOFError" in ran.stderr
    assert not ran.stdout
