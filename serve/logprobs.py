"""Log-probabilities in the two forms that OpenAI's API has for them."""

import math
from collections.abc import Sequence

from jaxspec.engine.output import Alternatives, FinishReason, PromptLogprob
from jaxspec.sampling.params import SamplingParams
from jaxspec.text import TextStream, Tokenizer
from serve.generation import Delta
from serve.protocol import ChatTokenLogprob, CompletionLogprobs, PromptTokenLogprob, TokenLogprob

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
    tops: list[dict[str, float] | None] = []
    for token, value, alternatives in zip(tokens, values, _alternatives(delta), strict=True):
        top: dict[str, float] = {}
        for i, p in alternatives:
            top.setdefault(spelt(i), _finite(p))
        tops.append(top | {token: value})
    return {"tokens": tokens, "token_logprobs": [*values], "top_logprobs": tops, "text_offset": delta.offsets}


def echoed_logprobs(
    tokenizer: Tokenizer | None, prompt_ids: Sequence[int], delta: Delta, echo: str, *, count: int
) -> CompletionLogprobs:
    """Those of the prompt, then those of the output, whose text follows `echo`.

    Args:
        count: alternatives of each token.
    """
    scores = delta.prompt_logprobs or ()
    shown = Delta(
        ids=list(prompt_ids[1:]),
        logprobs=[score.logprob for score in scores],
        alternatives=[score.alternatives[:count] for score in scores],
        offsets=_offsets(tokenizer, prompt_ids)[1:],
    )
    first = completion_logprobs(tokenizer, Delta(ids=list(prompt_ids[:1]), logprobs=[0.0], offsets=[0]))
    prompt, output = completion_logprobs(tokenizer, shown), completion_logprobs(tokenizer, delta)
    return {
        "tokens": [*first["tokens"], *prompt["tokens"], *output["tokens"]],
        "token_logprobs": [None, *prompt["token_logprobs"], *output["token_logprobs"]],
        "top_logprobs": [None, *prompt["top_logprobs"], *output["top_logprobs"]],
        "text_offset": [0, *prompt["text_offset"], *(len(echo) + offset for offset in output["text_offset"])],
    }


def _offsets(tokenizer: Tokenizer | None, ids: Sequence[int]) -> list[int]:
    """The number of characters before each id."""
    if tokenizer is None:
        return [0] * len(ids)
    return list(TextStream(tokenizer, (), SamplingParams()).feed(ids, FinishReason.LENGTH).text_offsets)


def prompt_logprobs(
    tokenizer: Tokenizer | None, prompt_ids: Sequence[int], scores: Sequence[PromptLogprob], *, count: int
) -> list[dict[str, PromptTokenLogprob] | None]:
    """As vLLM shows them: of each prompt token the token itself and its `count` likeliest alternatives, by id."""

    def entry(token_id: int, logprob: float, rank: int) -> PromptTokenLogprob:
        text = tokenizer.token_text(token_id) if tokenizer else f"token_id:{token_id}"
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    shown: list[dict[str, PromptTokenLogprob] | None] = [None]
    for token_id, score in zip(prompt_ids[1:], scores, strict=True):
        pairs = enumerate(score.alternatives[:count], 1)
        entries = {str(i): entry(i, value, rank) for rank, (i, value) in pairs}
        shown.append({str(token_id): entry(token_id, score.logprob, score.rank)} | entries)
    return shown


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
