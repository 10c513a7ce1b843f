"""Kernels are compiled once in a process, several at a time, and a step waits for those that it has."""

import io
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp

from jaxspec.compat import compile_program, compiles
from jaxspec.engine.kernel_compiler import KernelCompiler, wait_for


def step_with(programs):
    """A lowered step, of which `dict` makes programs."""
    return SimpleNamespace(compiler_ir=lambda _: programs)


def test_kernels_of_several_steps_are_compiled_once():
    compiled, together = [], threading.Barrier(2)

    def compile_program(code):
        together.wait(30)  # two at a time
        compiled.append(code)

    compiler = KernelCompiler(compile_program, programs=dict, workers=2)
    first = compiler.begin(step_with({b"a": b"1", b"b": b"2"}))
    second = compiler.begin(step_with({b"b": b"2", b"c": b"3", b"d": b"4"}))
    wait_for(second)
    wait_for(first)
    assert sorted(compiled) == [b"1", b"2", b"3", b"4"]
    wait_for(compiler.begin(step_with({b"a": b"1"})))
    assert len(compiled) == 4


def test_a_step_waits_for_its_kernels():
    go = threading.Event()
    compiler = KernelCompiler(lambda _: go.wait(30), programs=dict, workers=1)
    kernels = compiler.begin(step_with({b"a": b"1"}))
    assert not kernels[0].done()
    go.set()
    wait_for(kernels)
    assert kernels[0].done()


def test_what_does_not_work_is_left_to_the_step(caplog):
    """Which says what is wrong with it."""

    def broken(_):
        raise RuntimeError("no such kernel")

    wait_for(KernelCompiler(broken, programs=dict, workers=1).begin(step_with({b"a": b"1"})))
    assert "did not compile by itself" in caplog.text
    assert KernelCompiler(broken, programs=broken, workers=1).begin(step_with({})) == ()
    assert "one after the other" in caplog.text


def test_a_program_that_jax_has_not_traced_compiles_uncounted():
    lowered, code = jax.jit(lambda x: x + 1).lower(jnp.ones(4)), io.BytesIO()
    lowered.compiler_ir("stablehlo").operation.write_bytecode(code)
    before = compiles.total
    assert compile_program(jax.devices()[0], code.getvalue()) is not None
    assert compiles.total == before
