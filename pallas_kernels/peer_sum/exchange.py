"""What the warpgroups of several devices tell each other through mailboxes, inside Mosaic GPU kernels.

A warpgroup has a row, and its threads never wait for each other: each writes its columns into the others' mailboxes, and reads
what their threads have written into its own. A word travels with the number of the call in one store of 64 bits, so that who
finds the number has the word: no fence, and no flag that comes after. (NCCL calls this LL.)

What two calls in turn send lies apart. A device that is in its next call but one has ended the call between, for which the
others have sent something, and so have ended the call before that: nothing is written where somebody may still read. Numbers of
calls have 32 bits. When they come round, after days of steps, a word that nobody has written for exactly so long would count.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.peer_sum.mailbox import SIDES, Layout
from pallas_kernels.row import WARPGROUP

_c = mgpu.utils.c


def room(row_bytes: int) -> int:
    """Bytes of the words of a row: each thread has one at least."""
    return max(row_bytes, 4 * WARPGROUP)


def row_layout(H: int, dtype: Any) -> Any:
    """Up to 16 bytes a load."""
    return plgpu.Layout.WG_STRIDED((H,), vec_size=math.gcd(H // WARPGROUP, 16 // jnp.dtype(dtype).itemsize))


class Told(NamedTuple):
    """Rows of one array.

    Attributes:
        given: [H] that each device is told, or the one that all are.
        own: [H], which takes this device's place among those that come.
    """

    given: Sequence[jax.Array]
    own: jax.Array


def exchange(told: Sequence[Told], mailboxes: Any, t: jax.Array, devices: int, T: int) -> Sequence[Sequence[jax.Array]]:
    """What all devices tell this one of a row of each array, in their order.

    Args:
        mailboxes: reference of `Mailboxes.addresses` of this device, [2 * devices + 1].
        t: the warpgroup's row, int32 [], of T, the blocks of the grid.
    """
    layout, layouts = Layout(devices), [row_layout(own.shape[0], own.dtype) for _, own in told]
    rooms = [2 * room(own.shape[0] * own.dtype.itemsize) for _, own in told]

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(), plgpu.Layout.WG_SPLAT,
            [(row, [row] * len(given)) for row, (given, _) in zip(layouts, told, strict=True)],
        ),
        return_type=[
            [plgpu.ShapeDtypeStruct(own.shape, own.dtype, layout=row)] * devices
            for row, (_, own) in zip(layouts, told, strict=True)
        ],
    )  # fmt: skip
    def body(_: Any, mailboxes: ir.Value, t: Any, rows: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
        def number(i: int) -> ir.Value:
            return memref.load(mailboxes, [_c(i, ir.IndexType.get())])

        bases = [
            arith.ori(_wide(number(2 * d)), arith.shli(_wide(number(2 * d + 1)), _c(32, _i64())))
            for d in range(devices)
        ]
        rank, base = number(2 * devices), bases[0]
        for d in range(1, devices):
            base = arith.select(_equal(rank, d), bases[d], base)
        thread = arith.index_cast(_i32(), gpu.thread_id(gpu.Dimension.x))
        calls: Any = llvm.inline_asm(
            _i32(), [base], f"ld.global.b32 $0, [$1+{layout.calls}];", "=r,l,~{memory}", has_side_effects=True
        )
        call = arith.addi(calls, _c(1, _i32()))
        side = arith.andi(call, _c(SIDES - 1, _i32()))
        first = arith.addi(_times(side, devices * layout.of_a_sender), _times(t.registers.item(), sum(rooms)))

        def at(i: int) -> ir.Value:
            """Where this thread's words of array i begin, after the beginning of a sender's. What the threads store at once
            lies side by side: NVLink carries whole sectors."""
            return arith.addi(
                _times(thread, _bytes_of_a_store(rows[i][0])), _plus(first, layout.words + sum(rooms[:i]))
            )

        for i, (_, given) in enumerate(rows):
            for d, row in enumerate(given if given[1:] else [*given] * devices):
                to = arith.addi(bases[d], arith.addi(at(i), _times(rank, layout.of_a_sender)))
                _send(row, to, call, unless=_equal(rank, d))
        came = [
            [
                _receive(own, arith.addi(base, _plus(at(i), d * layout.of_a_sender)), call, unless=_equal(rank, d))
                for d in range(devices)
            ]
            for i, (own, _) in enumerate(rows)
        ]
        # The last block to end counts the call: all have read the number by then.
        mgpu.utils.warpgroup_barrier()
        ptx = _END.format(calls=layout.calls, ended=layout.ended)
        args = [thread, base, _c(T - 1, _i32()), call]
        llvm.inline_asm(None, args, ptx, "r,l,r,r,~{memory}", has_side_effects=True)
        return came

    return body(mailboxes, t, [(own, [*given]) for given, own in told])


_END = """{{
.reg .pred p; .reg .b32 before;
setp.ne.s32 p, $0, 0;
@p bra out;
atom.acq_rel.gpu.global.inc.u32 before, [$1+{ended}], $2;
setp.ne.s32 p, before, $2;
@p bra out;
st.global.b32 [$1+{calls}], $3;
out:
}}"""


def _bytes_of_a_store(row: Any) -> int:
    return 8 * len(_pairs(row)[0])


def _send(row: Any, to: ir.Value, call: ir.Value, *, unless: ir.Value) -> None:
    """Stores this thread's columns of a row, each word with the number of the call."""
    stride = WARPGROUP * _bytes_of_a_store(row)
    for i, pair in enumerate(_pairs(row)):
        pairs = ", ".join(f"pair{j}" for j in range(len(pair)))
        packed = " ".join(f"mov.b64 pair{j}, {{${2 + j}, $1}};" for j in range(len(pair)))
        store = (
            f"st.relaxed.sys.global{'.v2' if len(pair) == 2 else ''}.b64 [${2 + len(pair)}+{i * stride}], {{{pairs}}};"
        )
        ptx = f"{{ .reg .pred p; .reg .b64 {pairs}; setp.eq.s32 p, $0, 0; {packed} @p {store} }}"
        args = [arith.extui(_i32(), unless), call, *pair, to]
        kinds = ",".join(["r", "r", *"r" * len(pair), "l", "~{memory}"])
        llvm.inline_asm(None, args, ptx, kinds, has_side_effects=True)


def _receive(like: Any, at: ir.Value, call: ir.Value, *, unless: ir.Value) -> Any:
    """The row that was stored so in this device's mailbox; `like` itself, a row of this shape, if `unless`."""
    stride = WARPGROUP * _bytes_of_a_store(like)
    sizes = [len(pair) for pair in _pairs(like)]
    count = sum(sizes)
    loads, found, n = [], [], 0
    for i, size in enumerate(sizes):
        pairs = ", ".join(f"pair{j}" for j in range(n, n + size))
        vector = ".v2" if size == 2 else ""
        loads.append(f"ld.relaxed.sys.global{vector}.b64 {{{pairs}}}, [${count}+{i * stride}];")
        for j in range(n, n + size):
            found.append(
                f"mov.b64 {{${j}, seen}}, pair{j}; setp.ne.and.s32 late, seen, ${count + 1}, others; @late bra again;"
            )
        n += size
    names = ", ".join(f"pair{j}" for j in range(count))
    ptx = "\n".join(
        [
            "{", f".reg .pred others, late; .reg .b64 {names}; .reg .b32 seen;",
            f"setp.eq.s32 others, ${count + 2}, 0;", "again:", *loads, *found, "}",
        ]
    )  # fmt: skip
    struct = llvm.StructType.get_literal([_i32()] * count)
    kinds = ",".join([*["=&r"] * count, "l", "r", "r", "~{memory}"])
    args = [at, call, arith.extui(_i32(), unless)]
    got: Any = llvm.inline_asm(struct if count > 1 else _i32(), args, ptx, kinds, has_side_effects=True)
    words = iter([llvm.extractvalue(_i32(), got, [j]) for j in range(count)] if count > 1 else [got])
    registers = like.registers.copy()
    for i, register in enumerate(like.registers.flat):
        came = _from_words([next(words) for _ in _words(register)], register.type)
        registers.flat[i] = arith.select(unless, register, came)
    return mgpu.FragmentedArray(_registers=registers, _layout=like.layout, _is_signed=like.is_signed)


def _words(register: ir.Value) -> list[ir.Value]:
    """The bits of a vector, as int32."""
    kind = ir.VectorType(register.type)
    bits = kind.shape[0] * mgpu.utils.bitwidth(kind.element_type)
    if bits < 32:
        whole = vector.bitcast(ir.VectorType.get((1,), ir.IntegerType.get_signless(bits)), register)
        return [arith.extui(_i32(), vector.extract(whole, [], [0]))]
    words = vector.bitcast(ir.VectorType.get((bits // 32,), _i32()), register)
    return [vector.extract(words, [], [i]) for i in range(bits // 32)]


def _from_words(words: Sequence[ir.Value], kind: ir.Type) -> ir.Value:
    bits = ir.VectorType(kind).shape[0] * mgpu.utils.bitwidth(ir.VectorType(kind).element_type)
    if bits < 32:
        short = ir.IntegerType.get_signless(bits)
        return vector.bitcast(kind, vector.broadcast(ir.VectorType.get((1,), short), arith.trunci(short, words[0])))
    return vector.bitcast(kind, vector.from_elements(ir.VectorType.get((len(words),), _i32()), list(words)))


def _pairs(row: Any) -> list[list[ir.Value]]:
    """This thread's words of a row, as each store takes them: two, or one where a register has no more."""
    words = [_words(register) for register in row.registers.flat]
    return [several[i : i + 2] for several in words for i in range(0, len(several), 2)]


def _i32() -> ir.Type:
    return ir.IntegerType.get_signless(32)


def _i64() -> ir.Type:
    return ir.IntegerType.get_signless(64)


def _wide(x: ir.Value) -> ir.Value:
    return arith.extui(_i64(), x)


def _times(x: ir.Value, factor: int) -> ir.Value:
    return arith.muli(_wide(x), _c(factor, _i64()))


def _equal(x: ir.Value, number: int) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, x, _c(number, x.type))


def _plus(x: ir.Value, number: int) -> ir.Value:
    return arith.addi(x, _c(number, x.type)) if number else x
