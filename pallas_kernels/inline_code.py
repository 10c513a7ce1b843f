"""PTX inside Mosaic GPU kernels: what threads do that Pallas has no words for."""

from collections.abc import Sequence
from typing import Any

import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector


def word(bits: int = 32) -> Any:
    """The type of a register."""
    return ir.IntegerType.get_signless(bits)


def ptx(code: str, args: Sequence[Any] = (), result: Any = None) -> Any:
    """Emits code that a thread runs in its place, whatever it reads and writes.

    Args:
        args: words of 32 bits, or addresses of 64.
        result: type of $0, before the arguments, if there is one.
    """
    kinds = ["l" if arg.type == word(64) else "r" for arg in args]
    made = [] if result is None else ["=l" if result == word(64) else "=r"]
    constraints = ",".join([*made, *kinds, "~{memory}"])
    return llvm.inline_asm(result, list(args), code, constraints, has_side_effects=True)


def address(ref: Any, bits: int) -> Any:
    """Where a reference begins: of 32 bits in shared memory, of 64 in global memory."""
    return llvm.ptrtoint(word(bits), mgpu.utils.memref_ptr(ref))


def elements(register: Any) -> list[Any]:
    """Of a vector that a thread holds."""
    return [vector.extract(register, [], [i]) for i in range(ir.VectorType(register.type).shape[0])]


def publish(emulated: bool, *, copies: bool = False) -> None:
    """Orders stores to shared memory before multiplications, which read it through another proxy.

    A thread calls it for what it stored itself, before it arrives at a barrier, or for what others stored, after it has waited
    for them. It waits for every load of the thread that is on its way (ptxas makes it a `MEMBAR.ALL.CTA` too), but unlike
    `plgpu.commit_smem` for no other thread.

    Args:
        emulated: for the interpreter, which takes no PTX.
        copies: waits for this thread's asynchronous copies too.
    """
    if emulated:
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        ptx(("cp.async.wait_all; " if copies else "") + "fence.proxy.async.shared::cta;")

    fence()
