"""Mosaic GPU kernel that writes words into the host's memory.

Each word travels with a number in one store of 64 bits, as between devices (`peer_sum/exchange.py`): who finds the number has
the word.
"""

from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref

from pallas_kernels.row import PARAMS, WARPGROUP

_WORDS_OF_A_THREAD = 8
_WORDS_OF_A_BLOCK = WARPGROUP * _WORDS_OF_A_THREAD
_c = mgpu.utils.c

_STORE = """{
.reg .pred p; .reg .b64 pair;
setp.ne.s64 p, $0, 0;
mov.b64 pair, {$2, $3};
@p st.relaxed.sys.global.b64 [$1], pair;
}"""


@jax.jit
def write(words: jax.Array, to: jax.Array) -> jax.Array:
    """Writes words where the host waits for them.

    Args:
        words: int32 of any shape.
        to: int32 [3], low and high word of the address of the host's int32 [words, 2], and the number that travels with each
            word. Address 0: nothing is written.

    Returns:
        int32 [1], the number: ready when all is written.
    """
    count = words.size

    def readback(words: Any, to: Any, written: Any) -> None:
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType()))
        def body(_: Any, words: ir.Value, to: ir.Value, written: ir.Value) -> None:
            i64, index = ir.IntegerType.get_signless(64), ir.IndexType.get()
            low, high, number = (memref.load(to, [_c(i, index)]) for i in range(3))
            address = arith.ori(arith.extui(i64, low), arith.shli(arith.extui(i64, high), _c(32, i64)))
            first = arith.addi(
                arith.muli(gpu.block_id(gpu.Dimension.x), _c(_WORDS_OF_A_BLOCK, index)),
                gpu.thread_id(gpu.Dimension.x),
            )
            for i in range(_WORDS_OF_A_THREAD):
                # Past the end the last word is written again.
                place = arith.minui(arith.addi(first, _c(i * WARPGROUP, index)), _c(count - 1, index))
                at = arith.addi(address, arith.muli(arith.index_cast(i64, place), _c(8, i64)))
                args = [address, at, memref.load(words, [place]), number]
                llvm.inline_asm(None, args, _STORE, "l,l,r,r,~{memory}", has_side_effects=True)
            memref.store(number, written, [_c(0, index)])

        body(words, to, written)

    kernel = plgpu.kernel(
        readback,
        out_type=jax.ShapeDtypeStruct((1,), jnp.int32),
        grid=(-(-count // _WORDS_OF_A_BLOCK),),
        grid_names=("block",),
        compiler_params=PARAMS,
    )
    return kernel(words.reshape(-1), to)
