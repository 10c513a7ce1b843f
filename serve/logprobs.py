"""Log-probabilities in the two forms that OpenAI's API has for them."""

import math

from jaxspec.text import Tokenizer
from serve.generation import Delta
from serve.protocol import ChatTokenLogprob, CompletionLogprobs

# JSON has no infinity.
_LOWEST = -9999.0


def completion_logprobs(tokenizer: Tokenizer | None, delta: Delta) -> CompletionLogprobs:
    """Without a tokenizer a token is shown as vLLM shows it when asked for ids: `token_id:17`."""
    tokens = [tokenizer.token_text(i) if tokenizer else f"token_id:{i}" for i in delta.ids]
    values = [_finite(p) for p in delta.logprobs]
    return {
        "tokens": tokens,
        "token_logprobs": values,
        "top_logprobs": [{token: value} for token, value in zip(tokens, values, strict=True)],
        "text_offset": delta.offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, delta: Delta) -> dict[str, list[ChatTokenLogprob]]:
    """`bytes` joined over tokens give the text even where a character is split over them."""
    return {
        "content": [
            {
                "token": tokenizer.token_text(i),
                "logprob": _finite(p),
                "bytes": list(tokenizer.token_bytes(i)),
                "top_logprobs": [],
            }
            for i, p in zip(delta.ids, delta.logprobs, strict=True)
        ]
    }


def _finite(logprob: float) -> float:
    return max(logprob, _LOWEST) if not math.isnan(logprob) else _LOWEST
