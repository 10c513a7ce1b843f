"""Fields that clients send and that ask for nothing: which values of which fields are accepted.

Clients and frameworks write out defaults, and send back what an answer had. A value that changes nothing passes; any
other value of such a field is refused by name, never ignored. Null always passes: it is as if the field were not there.
"""

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxspec.errors import SHOWN_CHARACTERS
from serve.fields import invalid


@dataclass(frozen=True)
class Known:
    """
    Attributes:
        neutral: fields that are not supported, with the values that ask for nothing.
        ignored: fields that may have any value, since they do not touch the output.
    """

    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def plus(self, neutral: Mapping[str, tuple[Any, ...]], ignored: Iterable[str] = ()) -> "Known":
        return Known({**self.neutral, **neutral}, self.ignored | frozenset(ignored))

    def check(self, extra: Mapping[str, Any], fields: Iterable[str], at: str = "") -> None:
        """Refuses the first of the fields beyond the model's own that is not known or asks for something."""
        for name, value in extra.items():
            if value is None or name in self.ignored:
                continue
            if name not in self.neutral:
                short = name[:SHOWN_CHARACTERS]
                close = difflib.get_close_matches(short, [*fields, *self.neutral], n=1)
                hint = f": did you mean {close[0]!r}?" if close else ""
                raise invalid(f"unknown parameter{hint}", f"{at}.{short}")
            if not any(_same(value, each) for each in self.neutral[name]):
                passing = " or ".join(map(repr, self.neutral[name]))
                raise invalid("not supported yet" + (f" (only {passing})" if passing else ""), f"{at}.{name}")

    def json_schema(self) -> dict[str, Any]:
        """The properties of these fields."""
        only = {name: {"enum": [*values, None]} for name, values in self.neutral.items()}
        return only | {name: {"description": "Accepted and ignored."} for name in sorted(self.ignored)}


def _same(value: Any, neutral: Any) -> bool:
    return isinstance(value, bool) == isinstance(neutral, bool) and value == neutral


# What frameworks attach to anything: marks for a prompt cache that here needs none, and notes to themselves.
_NOTES = frozenset({"cache_control", "provider_specific_fields"})

STREAM_OPTIONS = Known(ignored=frozenset({"include_obfuscation"}))

TEXT_PART = Known({"annotations": ([],), "logprobs": ([],), "citations": ([],)}, _NOTES)

MESSAGE = Known(
    {
        "annotations": ([],),
        "audio": (),
        "function_call": (),
        "images": ([],),
        "partial": (False,),
        "prefix": (False,),
        "reasoning_details": ([],),
        "refusal": ("",),
        "thinking": ("",),
        "thinking_blocks": ([],),
    },
    _NOTES | {"id", "example", "weight", "token_ids"},
)

_NAMES = Known(
    {
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    },
    frozenset({"user", "request_id"}),
)
# Of chats only.
_CHATS: Mapping[str, tuple[Any, ...]] = {"chat_template_kwargs": ({},), "tools": ([],)}

TOKENIZE = _NAMES.plus({"continue_final_message": (False,)})
DETOKENIZE = _NAMES.plus(_CHATS)

GENERATION = _NAMES.plus(
    {
        # OpenAI
        "suffix": ("",),
        "verbosity": ("medium",),
        # vLLM
        "allowed_token_ids": (),
        "bad_words": ([],),
        "detokenize": (True,),
        "early_stopping": (False,),
        "flat_logprobs": (False,),
        "guided_choice": (),
        "guided_decoding_backend": (),
        "guided_grammar": (),
        "guided_json": (),
        "guided_regex": (),
        "kv_transfer_params": (),
        "length_penalty": (1.0,),
        "logits_processors": ([],),
        "prompt_embeds": (),
        "return_tokens_as_token_ids": (False,),
        "spaces_between_special_tokens": (True,),
        "thinking_token_budget": (),
        "truncate_prompt_tokens": (),
        "use_beam_search": (False,),
        "vllm_xargs": ({},),
        # SGLang and TGI
        "custom_logit_processor": (),
        "custom_params": ({},),
        "ebnf": (),
        "json_schema": (),
        "lora_path": (),
        "no_stop_trim": (False,),
        "regex": (),
        "return_hidden_states": (False,),
        "session_params": ({},),
        "stop_regex": ("", []),
        "typical_p": (1.0,),
    },
    (
        "cache_control",
        "metadata",
        "prediction",  # a guess at the output, to draft from: the text is the same without it
        "prompt_cache_key",
        "prompt_cache_retention",
        "rid",
        "safety_identifier",
        "service_tier",
        "store",
        "truncation_side",  # of truncate_prompt_tokens
    ),
)

COMPLETION = GENERATION.plus(
    {**_CHATS, "reasoning_effort": ("none",), "tool_choice": ("none", "auto")}, ("parallel_tool_calls",)
)

CHAT = GENERATION.plus(
    {
        "add_special_tokens": (False,),
        "audio": (),
        "chat_template_content_format": ("auto", "string"),
        "continue_final_message": (False,),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "media_io_kwargs": ({},),
        "modalities": (["text"],),
        "reasoning": (),
        "stream_reasoning": (True,),
        "web_search_options": (),
    }
)

# Anthropic's.
MESSAGES = Known(
    {"container": (), "mcp_servers": ([],), "output_format": ()},
    frozenset(
        {
            "betas",
            "cache_control",
            "context_management",  # what to leave out of long chats: the client's own to do
            "diagnostics",
            "inference_geo",
            "metadata",
            "speed",
            "user_profile_id",
        }
    ),
)

# OpenAI's Responses.
RESPONSES = Known(
    {
        "background": (False,),
        "context_management": ([],),
        "max_tool_calls": (),
        "moderation": (),
        "prompt": (),
        "top_logprobs": (0,),
        "truncation": ("disabled",),
    },
    frozenset(
        {
            "client_metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "safety_identifier",
            "service_tier",
            "store",
            "stream_options",
            "user",
        }
    ),
)
