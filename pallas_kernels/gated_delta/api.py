"""Linear attention with the gated delta rule: decode windows, over states that no rejected token enters, and prompts.

The rule is that of arXiv 2412.06464, equation 10, or of arXiv 2510.26692 where each channel of a key fades by itself.
"""

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import choose, current
from pallas_kernels.gated_delta import chunk_walk, chunks, mosaic, reference
from pallas_kernels.gated_delta.chunks import Chunks
from pallas_kernels.gated_delta.reference import Tokens


def unsupported_reason(states: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why no kernel supports decode windows over such states, or None if one does."""
    return mosaic.unsupported_reason(states)


def replay_and_read(
    states: jax.Array, slots: jax.Array, counts: jax.Array, tokens: Tokens, *, replayed: int
) -> tuple[jax.Array, jax.Array]:
    """Brings each row's state up to the accepted tokens of its last window, then lets a new window read from there.

    The state is written between the two: what the new window adds is repeated once it is known to be accepted.

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


def read_prompts(states: jax.Array, tokens: Tokens, cuts: Chunks) -> tuple[jax.Array, jax.Array]:
    """Lets the tokens of prompts read, each row from its state, and brings the states up to the rows' last tokens.

    Each row goes through its chunks as section 3.3 of arXiv 2412.06464 has it. A kernel walks over them where
    `Tuning.delta_chunk_kernel` says so and it supports the call, and plain XLA otherwise.

    Args:
        states: float32 [E, K, R, dv, dk] before the tokens. Of a row without tokens it stays as it is.
        tokens: [P, ...] the rows' one after the other, then padding, which may hold anything. float32.
        cuts: from `chunks.cut`.

    Returns:
        What the tokens read, float32 [P, K, R, dv], of padding 0, and the states after them.
    """
    is_chosen = tuning.current().delta_chunk_kernel
    reason = chunk_walk.unsupported_reason(states, cuts) if is_chosen else "no record shows that it is faster here"
    # A kernel that was asked for by name is one of attention: short prompts run on plain XLA then too.
    wanted = "reference" if current().attention == "reference" else "auto"
    chosen = choose("gated_delta_prompts", wanted, {"mosaic": reason})
    run = chunk_walk if chosen == "mosaic" else chunks
    return run.chunked(states, tokens, cuts)
