"""POST /tokenize and /detokenize, with vLLM's bodies."""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.responses import JSONResponse, Response

from jaxspec.errors import InvalidRequestError
from jaxspec.text import Tokenizer
from serve.protocol import DetokenizeBody, TokenizeBody, template_variables
from serve.service import Service
from serve.text_pool import text_bytes

MAX_TEXT_BYTES = 2**20
# Written in one go: other threads run in between.
_PIECE = 4096


async def tokenize(service: Service, body: TokenizeBody) -> Response:
    """Of any text, whether or not the context holds it: to count tokens is what most ask for.

    Raises:
        InvalidRequestError: the text is too long to be tokenised in one call.
    """
    service.resolve_name(body.model)
    tokenizer, max_model_len = service.tokenizer(), service.model().engine.max_model_len
    texts: Any = body.prompt if body.messages is None else [m.rendered() for m in body.messages]
    if text_bytes(texts) > MAX_TEXT_BYTES:
        raise InvalidRequestError(
            f"/tokenize takes at most {MAX_TEXT_BYTES} bytes of text at once",
            param="prompt" if body.messages is None else "messages",
        )

    def encode(texts: Any) -> list[int]:
        if body.messages is None:
            return tokenizer.encode(texts, add_special_tokens=body.add_special_tokens)
        return tokenizer.apply_chat_template(
            texts,
            add_generation_prompt=body.add_generation_prompt,
            variables=template_variables(body.tools, None, body.chat_template_kwargs),
        )

    content = await service.in_pool(_answer, texts, encode, tokenizer, max_model_len, with_texts=body.return_token_strs)
    return Response(content, media_type="application/json")


def _answer(
    texts: Any, encode: Callable[[Any], list[int]], tokenizer: Tokenizer, max_model_len: int, *, with_texts: bool
) -> bytes:
    """The whole JSON: of a long text it takes too long for the event loop."""
    ids = encode(texts)
    token_texts = "null"
    if with_texts:
        token_texts = _array([tokenizer.token_text(i) for i in piece] for piece in _pieces(ids))
    head = f'{{"count":{len(ids)},"max_model_len":{max_model_len},"tokens":'
    return f'{head}{_array(_pieces(ids))},"token_strs":{token_texts}}}'.encode()


def _pieces(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    return (ids[i : i + _PIECE] for i in range(0, len(ids), _PIECE))


def _array(pieces: Iterator[Sequence[Any]]) -> str:
    return "[" + ",".join(json.dumps(piece, ensure_ascii=False)[1:-1] for piece in pieces) + "]"


def describe_tokenizer(service: Service) -> Response:
    """What evaluators need to build prompts: lm-eval reads it.

    Raises:
        InvalidRequestError: the model has no tokenizer.
    """
    tokenizer = service.tokenizer()
    info = tokenizer.special_tokens | {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": service.model().engine.max_model_len,
        "chat_template": tokenizer.chat_template or None,
    }
    return JSONResponse(info)


async def detokenize(service: Service, body: DetokenizeBody) -> Response:
    """
    Raises:
        InvalidRequestError: there are more ids than the context holds.
    """
    service.resolve_name(body.model)
    limit = service.model().engine.max_model_len
    if len(body.tokens) > limit:
        raise InvalidRequestError(
            f"there are {len(body.tokens)} ids, but the maximum context length is {limit} tokens",
            param="tokens",
            code="context_length_exceeded",
        )
    prompt = await service.in_pool(service.tokenizer().decode, body.tokens, skip_special_tokens=False)
    return JSONResponse({"prompt": prompt})
