"""Mosaic GPU kernels in which every device writes rows to the others: `peer_sum`, `peer_scatter_sum`, `peer_gather` in traces.

A warpgroup has one row of each device's result, and its threads never wait for each other: each writes its columns into the
others' mailboxes, and reads what their threads have written into its own. A word travels with the number of the call in one
store of 64 bits, so that who finds the number has the word: no fence, and no flag that comes after. (NCCL calls this LL.)

What two calls in turn send lies apart. A device that is in its next call but one has ended the call between, for which the
others have sent something, and so have ended the call before that: nothing is written where somebody may still read. Numbers of
calls have 32 bits. When they come round, after days of steps, a word that nobody has written for exactly so long would count.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, gpu, llvm, memref, vector

from pallas_kernels.backend import hopper_unsupported_reason
from pallas_kernels.compat import load
from pallas_kernels.peer_sum.mailbox import MOST_BYTES, MOST_DEVICES, SIDES, Layout
from pallas_kernels.row import PARAMS, WARPGROUP, f32, inverse_rms, normed_row, row_unsupported_reason, whole_row

# Over more than two devices a sum in two phases writes less: each device adds up a part of the rows, then gathers all. In the
# time of the second call, and of the kernel that then makes the norm, a device writes about so many bytes.
BYTES_OF_A_PHASE = 2_000_000

_c = mgpu.utils.c


def unsupported_reason(part: jax.Array, axis: str) -> str | None:
    """Why the kernels do not support this part, or None if they do."""
    if part.ndim != 2:
        return f"it needs rows, and the part has {part.ndim} axes"
    if (reason := row_unsupported_reason(part.shape[1])) is not None:
        return reason
    if (size := part.shape[0] * _room(part.shape[1] * part.dtype.itemsize)) > MOST_BYTES:
        return f"a mailbox holds at most {MOST_BYTES} bytes of each device, not {size}"
    if (devices := lax.axis_size(axis)) > MOST_DEVICES:
        return f"it writes to the memory of at most {MOST_DEVICES} devices, not of {devices}"
    return hopper_unsupported_reason()


@jax.jit
def total(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.total`, [T, H] in bfloat16. Jitted, so that the layers of a model share one lowering."""
    T, H = part.shape
    devices = _devices(mailboxes)
    if _in_two_phases(part, devices):
        return gather([scatter_sum(part, mailboxes)], mailboxes)[0]

    def peer_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        own = load(part, (t, pl.ds(0, H)), layout=whole_row(H))
        (came,) = _exchange([Told([own], own)], mailboxes, t, devices, T)
        summed[t, :] = _sum_of(came)

    return _by_rows(peer_sum, T, jax.ShapeDtypeStruct((T, H), part.dtype))(part, mailboxes.reshape(-1))


@functools.partial(jax.jit, static_argnames="eps")
def add_total(
    x: jax.Array, part: jax.Array, norm_weight: jax.Array, mailboxes: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """x + the total of all devices' parts and its norm, [T, H] each, rounded like `total` and `add_norm` after it.

    Args:
        x: [T, H], the same on all devices. norm_weight: [H].
        part: [T, H], or [parts, T, H], whose sum is rounded before it is told.
    """
    T, H = x.shape
    devices, whole = _devices(mailboxes), whole_row(H)

    def peer_add_norm(x: Any, part: Any, norm_weight: Any, mailboxes: Any, summed: Any, normed: Any) -> None:
        t = lax.axis_index("row")
        pieces = [(i,) for i in range(part.shape[0])] if len(part.shape) == 3 else [()]
        # All loads come first, so that they are in flight together.
        own = [load(part, (*piece, t, pl.ds(0, H)), layout=whole) for piece in pieces]
        row = load(x, (t, pl.ds(0, H)), layout=whole)
        weight = load(norm_weight, (pl.ds(0, H),), layout=whole)
        told = _sum_of(own) if own[1:] else own[0]
        (came,) = _exchange([Told([told], told)], mailboxes, t, devices, T)
        row = row + _sum_of(came)
        summed[t, :] = row
        normed[t, :] = normed_row(row, inverse_rms(row, eps), weight)

    kernel = _by_rows(peer_add_norm, T, (jax.ShapeDtypeStruct((T, H), x.dtype),) * 2)
    return kernel(x, part, norm_weight, mailboxes.reshape(-1))


@jax.jit
def scatter_sum(part: jax.Array, mailboxes: jax.Array) -> jax.Array:
    """As `api.scatter_sum`: [T, H] of parts [devices * T, H]."""
    devices, H = _devices(mailboxes), part.shape[1]
    T = part.shape[0] // devices

    def peer_scatter_sum(part: Any, mailboxes: Any, summed: Any) -> None:
        t = lax.axis_index("row")
        places = [*(device * T for device in range(devices)), mailboxes[2 * devices] * T]
        *given, own = (load(part, (place + t, pl.ds(0, H)), layout=whole_row(H)) for place in places)
        (came,) = _exchange([Told(given, own)], mailboxes, t, devices, T)
        summed[t, :] = _sum_of(came)

    return _by_rows(peer_scatter_sum, T, jax.ShapeDtypeStruct((T, H), part.dtype))(part, mailboxes.reshape(-1))


@functools.partial(jax.jit, static_argnames="eps")
def scatter_add(
    x: jax.Array,
    part: jax.Array,
    beside: jax.Array | None,
    norm_weight: jax.Array,
    mailboxes: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array]:
    """x + (`scatter_sum` + beside) and its norm, [T, H] each, rounded in this order.

    Args:
        x, beside: [T, H] of this device. part: [devices * T, H]. norm_weight: [H].
    """
    T, H = x.shape
    devices, whole = _devices(mailboxes), whole_row(H)

    def peer_scatter_add_norm(x: Any, part: Any, norm_weight: Any, mailboxes: Any, *refs: Any) -> None:
        *others, summed, normed = refs
        t = lax.axis_index("row")
        places = [*(device * T for device in range(devices)), mailboxes[2 * devices] * T]
        *given, own = (load(part, (place + t, pl.ds(0, H)), layout=whole) for place in places)
        row, *added = (load(ref, (t, pl.ds(0, H)), layout=whole) for ref in (x, *others))
        weight = load(norm_weight, (pl.ds(0, H),), layout=whole)
        (came,) = _exchange([Told(given, own)], mailboxes, t, devices, T)
        total = _sum_of(came)
        for each in added:
            total = total + each
        row = row + total
        summed[t, :] = row
        normed[t, :] = normed_row(row, inverse_rms(row, eps), weight)

    kernel = _by_rows(peer_scatter_add_norm, T, (jax.ShapeDtypeStruct((T, H), x.dtype),) * 2)
    return kernel(x, part, norm_weight, mailboxes.reshape(-1), *(() if beside is None else (beside,)))


@jax.jit
def gather(parts: Sequence[jax.Array], mailboxes: jax.Array) -> tuple[jax.Array, ...]:
    """As `api.gather`: each [devices * T, H] of parts [T, H], of any dtypes of 2 or 4 bytes, at once."""
    T, devices = parts[0].shape[0], _devices(mailboxes)

    def peer_gather(*refs: Any) -> None:
        given, mailboxes, wholes = refs[: len(parts)], refs[len(parts)], refs[len(parts) + 1 :]
        t = lax.axis_index("row")
        own = [load(ref, (t, pl.ds(0, ref.shape[1])), layout=_row_layout(ref.shape[1], ref.dtype)) for ref in given]
        for whole, came in zip(wholes, _exchange([Told([o], o) for o in own], mailboxes, t, devices, T), strict=True):
            for device, row in enumerate(came):
                whole[device * T + t, :] = row

    out = tuple(jax.ShapeDtypeStruct((devices * T, part.shape[1]), part.dtype) for part in parts)
    return tuple(_by_rows(peer_gather, T, out)(*parts, mailboxes.reshape(-1)))


def in_one_phase(part: Any, axis: str) -> bool:
    """Whether `total` of [T, H] is one exchange."""
    return not _in_two_phases(part, lax.axis_size(axis))


def _in_two_phases(part: Any, devices: int) -> bool:
    if part.shape[0] % devices:
        return False
    at_once, in_two = devices - 1, 2 * (devices - 1) / devices
    return 2 * (at_once - in_two) * part.size * part.dtype.itemsize > BYTES_OF_A_PHASE


def _room(row_bytes: int) -> int:
    """Bytes of the words of a row: each thread has one at least."""
    return max(row_bytes, 4 * WARPGROUP)


def _devices(mailboxes: jax.Array) -> int:
    return (mailboxes.shape[-1] - 1) // 2


def _by_rows(kernel: Callable[..., None], rows: int, out_type: Any) -> Callable[..., Any]:
    return plgpu.kernel(kernel, out_type=out_type, grid=(rows,), grid_names=("row",), compiler_params=PARAMS)


def _row_layout(H: int, dtype: Any) -> Any:
    """Up to 16 bytes a load."""
    return plgpu.Layout.WG_STRIDED((H,), vec_size=math.gcd(H // WARPGROUP, 16 // jnp.dtype(dtype).itemsize))


def _sum_of(rows: Sequence[jax.Array]) -> jax.Array:
    """Rows added in float32 in their order, and rounded once."""
    first, *others = (row.astype(f32) for row in rows)
    for other in others:
        first = first + other
    return first.astype(rows[0].dtype)


class Told(NamedTuple):
    """Rows of one array.

    Attributes:
        given: [H] that each device is told, or the one that all are.
        own: [H], which takes this device's place among those that come.
    """

    given: Sequence[jax.Array]
    own: jax.Array


def _exchange(
    told: Sequence[Told], mailboxes: Any, t: jax.Array, devices: int, T: int
) -> Sequence[Sequence[jax.Array]]:
    """What all devices tell this one of a row of each array, in their order.

    Args:
        mailboxes: reference of `Mailboxes.addresses` of this device, [2 * devices + 1].
        t: the warpgroup's row, int32 [], of T, the blocks of the grid.
    """
    layout, layouts = Layout(devices), [_row_layout(own.shape[0], own.dtype) for _, own in told]
    rooms = [2 * _room(own.shape[0] * own.dtype.itemsize) for _, own in told]

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
    def exchange(_: Any, mailboxes: ir.Value, t: Any, rows: Sequence[tuple[Any, Sequence[Any]]]) -> Any:
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

    return exchange(mailboxes, t, [(own, [*given]) for given, own in told])


_END = """{{
.reg .pred p; .reg .b32 before, none;
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
