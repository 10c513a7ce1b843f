"""Programs of one kernel each, cut out of a lowered step."""

import io
from collections.abc import Mapping
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func

# As jax 0.10 and 0.11 lower a Mosaic GPU kernel: a custom call with these attributes.
_TARGET, _CONFIG, _HASH = "mosaic_gpu_v2", "mhlo.backend_config", "kernel_hash"
# Of a kernel that speaks to other devices: it depends on the program around it.
_COMMUNICATION = ("xla_replica_ids", "symmetric_memory_parameters")


def kernel_programs(step: ir.Module) -> Mapping[bytes, bytes]:
    """The Mosaic GPU kernels of a step that run on one device alone, each as a program of its own.

    Args:
        step: StableHLO, as `jax.stages.Lowered.compiler_ir` gives it.

    Returns:
        MLIR bytecode by the hash under which XLA keeps what it has compiled of a kernel.
    """
    calls: dict[bytes, ir.Operation] = {}

    def visit(operation: ir.Operation) -> ir.WalkResult:
        attributes = operation.attributes
        if operation.name == "stablehlo.custom_call" and ir.StringAttr(attributes["call_target_name"]).value == _TARGET:
            config = ir.DictAttr(attributes[_CONFIG])
            if not any(name in config for name in _COMMUNICATION):
                calls.setdefault(ir.StringAttr(config[_HASH]).value_bytes, operation)
        return ir.WalkResult.ADVANCE

    step.operation.walk(visit)
    return {kernel: _program(call) for kernel, call in calls.items()}


def _program(call: ir.Operation) -> bytes:
    """main(operands of the call) -> its results."""
    operands, results = [value.type for value in call.operands], [value.type for value in call.results]
    with call.context, ir.Location.unknown():
        program = ir.Module.create()
        program.operation.attributes["sym_name"] = ir.StringAttr.get("kernel")
        with ir.InsertionPoint(program.body):
            main: Any = func.FuncOp("main", ir.FunctionType.get(operands, results), visibility="public")  # type: ignore[call-arg]
        block = main.add_entry_block()
        with ir.InsertionPoint(block):
            alone = call.clone()
            for i, argument in enumerate(block.arguments):
                alone.operands[i] = argument
            func.ReturnOp(alone.results)
    code = io.BytesIO()
    program.operation.write_bytecode(code)
    return code.getvalue()
