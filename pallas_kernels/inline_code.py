"""PTX inside Mosaic GPU kernels: what threads do that Pallas has no words for."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

# LLVM's number of global memory: without it the compiler asks at each access which memory an address is of. And the most bytes
# that a thread stores at once.
_GLOBAL, _MOST_BYTES = 1, 16


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


def pure_ptx(code: str, results: int, *inputs: Any) -> list[Any]:
    """Emits code on words of 32 bits without side effects.

    Args:
        results: how many there are, $0 and up.
        inputs: words or numbers, which come after the results.
    """
    values = [mgpu.utils.c(value, word()) if isinstance(value, int) else value for value in inputs]
    constraints = ",".join(["=&r"] * results + ["r"] * len(values))
    out = word() if results == 1 else llvm.StructType.get_literal([word()] * results)
    value: Any = llvm.inline_asm(out, values, code, constraints, asm_dialect=0, has_side_effects=False)
    return [value] if results == 1 else [llvm.extractvalue(word(), value, [n]) for n in range(results)]


def words_layout(n: int) -> Any:
    """The layout of an array int32 [128 n] of which each thread of a warpgroup has n words."""
    return plgpu.Layout.WG_STRIDED((128 * n,), vec_size=n)


def as_words(values: Sequence[Any]) -> mgpu.FragmentedArray:
    """An array in `words_layout` of which each thread has these words."""
    whole = llvm.mlir_undef(ir.VectorType.get((len(values),), word()))
    for n, value in enumerate(values):
        whole = llvm.insertelement(whole, value, mgpu.utils.c(n, word()))
    layout = words_layout(len(values)).to_mgpu()
    return mgpu.FragmentedArray(_registers=np.array([whole], dtype=object), _layout=layout, _is_signed=True)


def words_of(array: mgpu.FragmentedArray) -> list[Any]:
    """The words that `as_words` has put together."""
    (whole,) = array.registers.flat
    (n,) = ir.VectorType(whole.type).shape
    return [llvm.extractelement(whole, mgpu.utils.c(i, word())) for i in range(n)]


def load_shared(start: Any, offset: Any, kind: Any, fixed: int = 0) -> Any:
    """What lies `offset + fixed` bytes after a pointer to shared memory; `fixed` becomes part of the instruction.

    Args:
        offset: a word of 32 bits.
        kind: the type to load.
    """
    place = mgpu.utils.getelementptr(start, [offset], word(8))
    return llvm.load(kind, mgpu.utils.getelementptr(place, [fixed], word(8)) if fixed else place)


def address(ref: Any, bits: int) -> Any:
    """Where a reference begins: of 32 bits in shared memory, of 64 in global memory."""
    return llvm.ptrtoint(word(bits), mgpu.utils.memref_ptr(ref))


def store(target: Any, value: jax.Array, layout: Any, *, emulated: bool) -> None:
    """Each thread's vector of an array to a place in global memory that is aligned as such vectors are.

    In Pallas's words a store has a barrier of the block before and after it, and may become stores of two bytes each, where the
    compiler does not see how the place is aligned.
    """
    if emulated:
        target[...] = value
        return
    itemsize = value.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def store(_: Any, target: ir.Value, value: mgpu.FragmentedArray) -> None:
        (register,) = value.registers.flat
        size = ir.VectorType(register.type).shape[0] * itemsize
        start = llvm.addrspacecast(llvm.PointerType.get(_GLOBAL), mgpu.utils.memref_ptr(target))
        offset = arith.muli(mgpu.utils.thread_idx(), mgpu.utils.c(size, word()))
        llvm.store(register, mgpu.utils.getelementptr(start, [offset], word(8)), alignment=min(size, _MOST_BYTES))

    store(target, value)


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
