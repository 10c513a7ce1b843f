"""Decode windows of linear attention with the gated delta rule, over states that no rejected token enters."""

import jax

from pallas_kernels.backend import choose, current
from pallas_kernels.gated_delta import mosaic, reference
from pallas_kernels.gated_delta.reference import Tokens


def unsupported_reason(states: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why no kernel supports calls with such states, or None if one does."""
    return mosaic.unsupported_reason(states)


def replay_and_read(
    states: jax.Array, slots: jax.Array, counts: jax.Array, tokens: Tokens, *, replayed: int
) -> tuple[jax.Array, jax.Array]:
    """Brings each row's state up to the accepted tokens of its last window, then lets a new window read from there.

    The state is written between the two: what the new window adds is repeated once it is known to be accepted. The rule is
    that of arXiv 2412.06464, equation 10, or of arXiv 2510.26692 where each channel of a key fades by itself.

    Args:
        states: float32 [slots, 1, K, R, dv, dk], updated in place where it is donated.
        slots: int32 [D] each row's; slot 0 is padding, and stays as it is.
        counts: int32 [D] how many tokens of the last window were accepted, 0 to `replayed`.
        tokens: [D, replayed + n, ...] the last window's, of which those past `counts` may hold anything, then the new
            window's. float32.
        replayed: most tokens of a last window.

    Returns:
        What the new tokens read, float32 [D, n, K, R, dv], and the states.

    Raises:
        UnsupportedError: the requested attention backend does not support this call.
    """
    reason = unsupported_reason(states)
    # "triton" selects a decode kernel of attention; this operation then runs on the fastest implementation it has.
    chosen = choose("gated_delta", current().attention, {"mosaic": reason}, same_as_auto=("triton",))
    run = mosaic if chosen == "mosaic" else reference
    return run.replay_and_read(states, slots, counts, tokens, replayed=replayed)
