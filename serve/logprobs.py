"""Log-probabilities in the two forms that OpenAI's API has for them."""

import math
from collections.abc import Sequence

from jaxspec.engine.output import Alternatives
from jaxspec.text import Tokenizer
from serve.generation import Delta
from serve.protocol import ChatTokenLogprob, CompletionLogprobs, TokenLogprob

# JSON has no infinity.
_LOWEST = -9999.0


def completion_logprobs(tokenizer: Tokenizer | None, delta: Delta) -> CompletionLogprobs:
    """Without a tokenizer a token is shown as vLLM shows it when asked for ids: `token_id:17`.

    `top_logprobs` always hold the chosen token. Ids that are spelt alike (parts of characters are) share one entry, of
    the chosen id or else of the likeliest.
    """

    def spelt(token_id: int) -> str:
        return tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"

    tokens = [spelt(i) for i in delta.ids]
    values = [_finite(p) for p in delta.logprobs]
    tops = []
    for token, value, alternatives in zip(tokens, values, _alternatives(delta), strict=True):
        top: dict[str, float] = {}
        for i, p in alternatives:
            top.setdefault(spelt(i), _finite(p))
        tops.append(top | {token: value})
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": delta.offsets}


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, list[ChatTokenLogprob]]:
    """`bytes` joined over tokens give the text even where a character is split over them."""

    def entry(token_id: int, logprob: float) -> TokenLogprob:
        return {
            "token": tokenizer.token_text(token_id),
            "logprob": _finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)),
        }

    return {
        "content": [
            {**entry(i, p), "top_logprobs": [entry(*pair) for pair in alternatives]}
            for i, p, alternatives in zip(delta.ids, delta.logprobs, _alternatives(delta), strict=True)
        ]
    }


def _alternatives(delta: Delta) -> Sequence[Alternatives]:
    """One for each id; empty where the request asked for none."""
    return delta.alternatives or [()] * len(delta.ids)


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if not math.isnan(logprob) else _LOWEST
