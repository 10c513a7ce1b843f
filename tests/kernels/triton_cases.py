"""Cases of mla_decode for Triton's interpreter."""

from typing import NamedTuple


class Case(NamedTuple):
    """Lengths, window, heads and type of a call; multiprocessors and compute capability that it is cut for."""

    lengths: tuple[int, ...]
    n: int
    heads: int
    sms: int
    capability: int
    dtype: str = "float32"  # the interpreter multiplies the bits of bfloat16 as if they were whole numbers


CASES = {
    "some requests split, a window longer than its context": Case((70, 200, 64, 333, 1), 4, 4, 4, 90),
    "more requests than programs, whole pages": Case((130, 128, 64), 1, 8, 1, 80),
    "two blocks of rows, rows of padding, tiles of 64 rows": Case((65, 300), 3, 32, 6, 90),
    "tiles of 32 rows, a window that is no power of two": Case((200, 3), 5, 5, 2, 90),
    "small shared memory": Case((130, 1), 2, 32, 4, 86),
    "more parts than are merged at once": Case((2200,), 1, 4, 20, 90),
    "float16": Case((100, 257), 8, 2, 3, 80, "float16"),
}
