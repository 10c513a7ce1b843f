"""The values that pass between the parts of a step: `forward` -> Forwarded -> `choose` -> Chosen -> `propose`, which tells
in Drafted what the draft read and said."""

from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding

from jaxspec.models.metadata import StepMetadata
from jaxspec.models.params import num_ranks, of_ranks, partition_spec
from jaxspec.sampling.sampler import SamplingRows

# Bits of a row's flags: a stop that the device knows was met; the row's logits held a NaN.
FLAG_DONE, FLAG_NAN = 1, 2


class Forwarded(NamedTuple):
    """The target's pass over a step's T = P + D * n tokens.

    Attributes:
        meta: where each token sits.
        hidden: [T, H] after the final norm.
        captured: the residual streams [T, H] that were asked for, by layer id.
        experts: where asked for, the experts that each mixture layer chose, int32 [T, top_k].
        logits: [E + D * n, V] of the rows that choose: the last token of each chunk, then all window tokens. The only one
            of these of which several devices have their columns each; the others are the same on all.
        inputs: int32 [size] what the step was given: the host brings it once, whether the step has one part or two. None until
            the pass is over.
    """

    meta: StepMetadata
    hidden: jax.Array
    captured: dict[int, jax.Array]
    experts: tuple[jax.Array, ...]
    logits: jax.Array
    inputs: jax.Array | None = None


def on_devices(shapes: Forwarded, mesh: Mesh) -> Forwarded:
    """Shapes of one rank with how those of all lie on a mesh between the parts of a step."""

    def placed(shape: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
        first, *others = shape.shape
        return jax.ShapeDtypeStruct((num_ranks(mesh) * first, *others), shape.dtype, sharding=sharding)

    by_id = NamedSharding(mesh, partition_spec(("ranks", "vocab"), mesh))
    placed_shapes = jax.tree.map(lambda shape: placed(shape, of_ranks(mesh)), shapes)
    return placed_shapes._replace(logits=placed(shapes.logits, by_id))


class Chosen(NamedTuple):
    """The outcome of each row of R = E + D.

    Attributes:
        ids, logprobs: [R, n]; the first `emitted` count, those after `accepted` are stale but legal ids.
        emitted: int32 [R] tokens that the request gains, cut at its first stop; 0 for middle chunks and dead rows.
        verified: int32 [R] drafts that could be accepted: those that the slot held and its request allows; 0 for prompt rows.
        accepted: int32 [R] drafts that the target agreed with, before any cut; 0 for prompt rows.
        flags: int32 [R] of FLAG_DONE and FLAG_NAN.
        lengths: int32 [R] tokens whose KV is valid after the step; `last` int32 [R], the token that follows them.
        rows: the sampling parameters [R].
        top: int32 [R, n, 2N]: the N likeliest ids at the position of each of `ids`, then the bits of their log-probabilities;
            None in a "lean" bucket.
    """

    ids: jax.Array
    logprobs: jax.Array
    emitted: jax.Array
    verified: jax.Array
    accepted: jax.Array
    flags: jax.Array
    lengths: jax.Array
    last: jax.Array
    rows: SamplingRows
    top: jax.Array | None


class Drafted(NamedTuple):
    """What a model that drafts k tokens for each of R rows read and said, for a probe.

    Attributes:
        inputs: [T, H] what it read of the target at each token of the step.
        hidden: of each draft step, hidden states [R, H].
        logits: of each draft step, [R, V]; -inf for tokens that the draft cannot propose.
    """

    inputs: jax.Array
    hidden: tuple[jax.Array, ...]
    logits: tuple[jax.Array, ...]
