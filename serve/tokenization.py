"""POST /tokenize and /detokenize, with vLLM's bodies."""

from fastapi.responses import JSONResponse
from starlette.responses import Response

from jaxspec.errors import InvalidRequestError
from jaxspec.text import Tokenizer
from serve.protocol import DetokenizeBody, TokenizeBody
from serve.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> Response:
    """
    Raises:
        InvalidRequestError: the text is so long that the context holds less than half of it.
    """
    service.resolve_name(body.model)
    limit = service.model().engine.max_model_len
    return await service.in_pool(_tokenize, service.tokenizer(), body, limit)


def _tokenize(tokenizer: Tokenizer, body: TokenizeBody, max_model_len: int) -> Response:
    if body.messages is not None:
        messages = [m.rendered() for m in body.messages]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=body.add_generation_prompt, limit=max_model_len
        )
    else:
        ids = tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens, limit=max_model_len)
    # Written here, off the event loop: there may be many.
    return JSONResponse(
        {
            "count": len(ids),
            "max_model_len": max_model_len,
            "tokens": ids,
            "token_strs": [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
        }
    )


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
