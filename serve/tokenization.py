"""POST /tokenize and /detokenize, with vLLM's bodies."""

from typing import Any

from serve.protocol import DetokenizeBody, TokenizeBody
from serve.service import Service


async def tokenize(service: Service, body: TokenizeBody) -> dict[str, Any]:
    service.resolve_name(body.model)
    tokenizer = service.tokenizer()
    if body.messages is not None:
        messages = [m.rendered() for m in body.messages]
        ids = await service.in_pool(
            tokenizer.apply_chat_template, messages, add_generation_prompt=body.add_generation_prompt
        )
    else:
        ids = await service.in_pool(tokenizer.encode, body.prompt, add_special_tokens=body.add_special_tokens)
    return {
        "count": len(ids),
        "max_model_len": service.model().engine.max_model_len,
        "tokens": ids,
        "token_strs": [tokenizer.token_text(i) for i in ids] if body.return_token_strs else None,
    }


async def detokenize(service: Service, body: DetokenizeBody) -> dict[str, Any]:
    service.resolve_name(body.model)
    prompt = await service.in_pool(service.tokenizer().decode, body.tokens, skip_special_tokens=False)
    return {"prompt": prompt}
