"""Orders: what an executable's launch follows from, as bytes too, numbered and hashed."""

import enum
import hashlib
import math
import struct
from dataclasses import dataclass

import numpy as np

DIGEST_BYTES = 16
_DTYPES = tuple(map(np.dtype, (np.int32, np.float32, np.bool_)))
_HEAD = struct.Struct("<BIB")  # kind, which, number of arrays
_ARRAY = struct.Struct("<BB")  # dtype, number of axes; then the axes, and the values
_NUMBER = struct.Struct("<Q")


class Kind(enum.IntEnum):
    """Of orders.

    STEP: of the bucket `which`, in the launcher's order, or one of the two parts of one: int32 [size of its layout], or
        nothing for the second part.
    MASKS, COUNTS, STATES: what `MaskUpload`, `CountUpload` and `StateCopies` take.
    SCORE: of a chunk of `which` tokens: int32 [which], the ids that follow, see `jaxspec.engine.scoring`.
    PUT: the field `which` of the state: its values. Not between steps of requests: it waits.
    HOLD: every slot holds `which` drafts.
    """

    STEP, MASKS, COUNTS, SCORE, PUT, STATES, HOLD = range(1, 8)


@dataclass(frozen=True)
class Order:
    """One launch. `arrays` may be read as long as it runs: nobody writes into them."""

    kind: Kind
    which: int
    arrays: tuple[np.ndarray, ...]


def encode(order: Order) -> bytes:
    """The bytes of an order, the same on every machine."""
    parts = [_HEAD.pack(order.kind, order.which, len(order.arrays))]
    for array in order.arrays:
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        parts.append(_ARRAY.pack(_DTYPES.index(array.dtype), array.ndim))
        parts += [struct.pack(f"<{array.ndim}I", *array.shape), little.tobytes()]
    return b"".join(parts)


def decode(data: bytes) -> Order:
    """What `encode` was given.

    Raises:
        ValueError: it was not.
    """
    try:
        kind, which, count = _HEAD.unpack_from(data)
        offset, arrays = _HEAD.size, []
        for _ in range(count):
            code, ndim = _ARRAY.unpack_from(data, offset)
            shape = struct.unpack_from(f"<{ndim}I", data, offset + _ARRAY.size)
            offset += _ARRAY.size + 4 * ndim
            dtype = _DTYPES[code]
            size = math.prod(shape)
            values = np.frombuffer(data, dtype.newbyteorder("<"), size, offset)
            arrays.append(values.astype(dtype).reshape(shape))  # aligned, and its own
            offset += size * dtype.itemsize
        order = Order(Kind(kind), which, tuple(arrays))
    except (struct.error, IndexError, ValueError) as error:
        raise ValueError(f"no order: {error}") from error
    if offset != len(data):
        raise ValueError(f"{len(data) - offset} bytes follow the order")
    return order


class Chain:
    """Numbers orders from 1, and hashes each with all before it.

    Attributes:
        number, digest: of the newest; two chains with equal digests hold the same orders in the same places.
    """

    def __init__(self) -> None:
        self.number, self.digest = 0, bytes(DIGEST_BYTES)

    def add(self, data: bytes) -> None:
        self.number += 1
        digest = hashlib.blake2b(self.digest, digest_size=DIGEST_BYTES)
        digest.update(_NUMBER.pack(self.number))
        digest.update(data)
        self.digest = digest.digest()
