"""Copying whole rows to the slots of requests, in place where the array is donated; rows without a slot cost nothing."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.row_write import mosaic, reference


def write_rows(array_SkV: jax.Array, i: int, rows_RV: jax.Array, slots_R: jax.Array) -> jax.Array:
    """Writes row r to [slots[r], i] of the array.

    There is no backend option of its own, as for `norm_linear`.

    Args:
        array_SkV: [S, k, V].
        i: 0 to k - 1 (static).
        rows_RV: [R, V], of the array's dtype.
        slots_R: int32 [R], from 0 on, each below S once at most; S or more for rows that are not written, and not read either.

    Returns:
        The array with the rows written.
    """
    wanted = "reference" if current().attention == "reference" else "auto"
    chosen = choose("row_write", wanted, {"mosaic": mosaic.unsupported_reason(array_SkV, rows_RV)})
    return (mosaic if chosen == "mosaic" else reference).write_rows(array_SkV, i, rows_RV, slots_R)
