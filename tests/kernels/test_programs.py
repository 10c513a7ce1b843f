"""The kernels of a step, each as a program that XLA compiles by itself."""

import jax
import jax.numpy as jnp
from jaxlib.mlir import ir

from pallas_kernels.norm_linear.add_norm import add_norm
from pallas_kernels.programs import kernel_programs


def lowered(tokens: int) -> ir.Module:
    """Two layers in functions of their own, which have the same kernel, and a third with another."""
    x, gain = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((tokens, 256), (256,)))

    def step(x, y, gain):
        layer = jax.jit(lambda x, y: add_norm(x, y, gain, eps=1e-5))
        x, y = layer(x, y)
        x, y = layer(y, x * 2)
        return add_norm(x, y, gain, eps=1e-2)

    return jax.jit(step).trace(x, x, gain).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")


def calls(module: ir.Module) -> list[ir.Operation]:
    found: list[ir.Operation] = []

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if operation.name == "stablehlo.custom_call":
            found.append(operation)
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def attributes(operation: ir.Operation) -> dict[str, ir.Attribute]:
    """How a mapping of them is iterated over depends on jaxlib's version."""
    named = [operation.attributes[i] for i in range(len(operation.attributes))]
    return {each.name: each.attr for each in named}


def test_each_kernel_is_a_program_once():
    step = lowered(4)
    programs = kernel_programs(step)
    assert len(programs) == 2
    of_step = {ir.DictAttr(call.attributes["mhlo.backend_config"])["kernel_hash"]: call for call in calls(step)}
    assert len(of_step) == 2
    for name, code in programs.items():
        with step.context:
            program = ir.Module.parse(code)
            [call] = calls(program)
            [theirs] = [each for key, each in of_step.items() if ir.StringAttr(key).value_bytes == name]
            assert program.operation.verify()
            assert attributes(call) == attributes(theirs)
            assert [value.type for value in call.operands] == [value.type for value in theirs.operands]
            assert [value.type for value in call.results] == [value.type for value in theirs.results]


def test_the_same_kernel_has_the_same_program_in_another_step():
    assert kernel_programs(lowered(4)) == kernel_programs(lowered(4))
    assert not kernel_programs(lowered(4)).keys() & kernel_programs(lowered(8)).keys()


def test_a_step_without_kernels_has_no_programs():
    step = jax.jit(lambda x: x @ x).lower(jnp.ones((2, 2)))
    assert kernel_programs(step.compiler_ir("stablehlo")) == {}
