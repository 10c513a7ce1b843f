"""Log-probabilities of prompts: how likely the target found each prompt token, given those before it.

The step hands on its prompt tokens' hidden states; a second executable reads the head over them, a block of rows after
the other, so that logits of a whole chunk never exist. It runs only for steps with a row that asked.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec import comm
from jaxspec.engine.output import PromptLogprob
from jaxspec.engine.plan import PrefillRow, StepPlan
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.params import MAX_LOGPROBS
from pallas_kernels.sampling.api import Likeliest

# Rows whose logits exist at a time.
BLOCK_ROWS = 64


class Scores(NamedTuple):
    """Of the token after each of a step's prompt tokens: logprobs float32 [P], ranks int32 [P] from 1 on, and the
    likeliest ids at its place, top_ids int32 and top_logprobs float32 [P, N].
    """

    logprobs: np.ndarray
    ranks: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray


def score(target_def: nnx.GraphDef, params: Any, hidden_PH: jax.Array, following_P: jax.Array) -> jax.Array:
    """int32 [P, 2 + 2N]: log-probability of each following id as bits, its rank, likeliest ids, their values as bits.

    Args:
        hidden_PH: after the final norm.
        following_P: int32, the token after each; any id where there is none.
    """
    target = nnx.merge(target_def, params)
    columns = Columns(target.config.vocab_size)

    def of_block(block: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden_BH, following_B = block
        logits_BV = target.logits(hidden_BH).astype(jnp.float32)
        log_z_B1 = columns.logsumexp(logits_BV)
        chosen_B1 = columns.pick(lambda at_B1: jnp.take_along_axis(logits_BV, at_B1, axis=1), following_B[:, None])
        rank_B1 = 1 + comm.total((logits_BV > chosen_B1).sum(axis=1, dtype=jnp.int32, keepdims=True))
        # Not part of a decode step: a sort may break its graph.
        values_BN, ids_BN = lax.top_k(logits_BV, min(MAX_LOGPROBS, columns.width))
        ids_BN, values_BN = columns.best_of(Likeliest(ids_BN, values_BN), min(MAX_LOGPROBS, columns.vocab))

        def bits(x: jax.Array) -> jax.Array:
            return lax.bitcast_convert_type(x, jnp.int32)

        return jnp.concatenate([bits(chosen_B1 - log_z_B1), rank_B1, ids_BN, bits(values_BN - log_z_B1)], axis=1)

    P = following_P.shape[0]
    pad = -P % BLOCK_ROWS
    hidden = jnp.pad(hidden_PH, ((0, pad), (0, 0))).reshape(-1, BLOCK_ROWS, hidden_PH.shape[1])
    following = jnp.pad(following_P, (0, pad)).reshape(-1, BLOCK_ROWS)
    packed = lax.map(of_block, (hidden, following))
    return packed.reshape(P + pad, -1)[:P]


def unpack(packed: np.ndarray, plan: StepPlan) -> Scores:
    """Of `score`'s output, which has each rank's after the other's: of the plan's prompt tokens."""
    ranks = np.split(packed, len(plan.parts))
    packed = np.concatenate([own[: part.prefill_tokens] for own, part in zip(ranks, plan.parts, strict=True)])
    count = (packed.shape[1] - 2) // 2

    def floats(bits: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(bits).view(np.float32)

    return Scores(floats(packed[:, 0]), packed[:, 1], packed[:, 2 : 2 + count], floats(packed[:, 2 + count :]))


def following_ids(plan: StepPlan, size: int) -> np.ndarray:
    """int32 [ranks * size]: the known token after each of a plan's prompt tokens, 0 where the host knows none."""
    ids = np.zeros((len(plan.parts), size), np.int32)
    for own, part in zip(ids, plan.parts, strict=True):
        offset = 0
        for row in part.prefill:
            known = row.request.tokens[row.start + 1 : row.start + row.length + 1]
            own[offset : offset + len(known)] = known
            offset += row.length
    return ids.reshape(-1)


def record_scores(rows: tuple[PrefillRow, ...], scores: Scores | None) -> None:
    """Gives each row that asked the scores of its prompt's tokens."""
    offset = 0
    for row in rows:
        if scores is not None and wants_scores(row):
            request, count = row.request, row.request.params.prompt_logprobs
            for i in range(offset, offset + min(row.length, request.prompt_len - 1 - row.start)):
                pairs = zip(scores.top_ids[i, :count].tolist(), scores.top_logprobs[i, :count].tolist(), strict=True)
                entry = PromptLogprob(float(scores.logprobs[i]), int(scores.ranks[i]), tuple(pairs))
                request.prompt_scores[row.start + i - offset + 1] = entry
        offset += row.length


def wants_scores(row: PrefillRow) -> bool:
    """It asked, and has not been told already."""
    return row.request.params.prompt_logprobs is not None and not row.request.resuming
