"""The rules of requests for their logits: bias, penalties, no stop before min_tokens, and the ids that masks allow."""

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import choose, current
from pallas_kernels.logit_rules import mosaic, reference
from pallas_kernels.logit_rules.reference import LogitRules


def adjust(
    logits_WnV: jax.Array,
    drafts_Wk: jax.Array,
    rules: LogitRules,
    positions_W: jax.Array,
    wanted_Wn: jax.Array,
    *,
    vocab: int,
    first_column: jax.Array | None = None,
) -> tuple[jax.Array, bool]:
    """Logits float32 [W, n, V] after the rules, and whether rows that are not wanted are there too, as they were.

    In order: bias; repetition penalty (Keskar et al., arXiv 1909.05858, section 4.1, extended to negative logits); frequency
    and presence penalty (OpenAI's API reference); min_tokens; masks. A position of a window counts the drafts before it as
    output.

    There is no backend option of its own, as for `norm_linear`.

    Args:
        logits_WnV: raw; row i of a window follows its first i drafts.
        drafts_Wk: int32 [W, n - 1].
        positions_W: int32 [W] absolute position of the first token to choose.
        wanted_Wn: bool [W, n].
        vocab: ids of the vocabulary, of which V columns are at hand.
        first_column: int32 [] the id of the first of them; None: all are there.
    """
    sizes = (logits_WnV, drafts_Wk, rules, positions_W)
    if _chosen(logits_WnV, vocab) == "mosaic":
        return mosaic.adjust(*sizes, wanted_Wn, vocab=vocab, first_column=first_column), False
    return reference.adjust(*sizes, vocab, first_column), True


def _chosen(logits_WnV: jax.Array, vocab: int) -> str:
    wanted = "reference" if current().attention == "reference" else "auto"
    off = None if tuning.current().rule_kernel else "it is off for this kind of device"
    return choose("logit_rules", wanted, {"mosaic": off or mosaic.unsupported_reason(logits_WnV, vocab)})
