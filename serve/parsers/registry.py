"""Which parsers there are, and which of them a model wants: its chat template shows the formats that it was taught."""

from collections.abc import Mapping

from serve.parsers.formats import ToolFormat
from serve.parsers.json_calls import HERMES, LLAMA3_JSON
from serve.parsers.output import Harmony, ThinkTags
from serve.parsers.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from serve.parsers.tagged_calls import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER

NONE = "none"
TOOL_PARSERS: Mapping[str, ToolFormat | Harmony] = {
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v31": DEEPSEEK_V31,
    "deepseek_v32": DEEPSEEK_V32,
    "glm45": GLM45,
    "gpt-oss": Harmony(),
    "hermes": HERMES,
    "kimi_k2": KIMI_K2,
    "llama3_json": LLAMA3_JSON,
    "minimax_m2": MINIMAX_M2,
    "qwen3_coder": QWEN3_CODER,
}
REASONING_PARSERS: Mapping[str, ThinkTags | Harmony] = {
    "deepseek_r1": ThinkTags(starts_inside=True),
    "deepseek_v3": ThinkTags(),
    "glm45": ThinkTags(),
    "gpt-oss": Harmony(),
    "kimi_k2": ThinkTags(),
    "minimax_m2": ThinkTags(starts_inside=True),
    "qwen3": ThinkTags(),
}
# Other names of vLLM and SGLang.
_TOOL_ALIASES = {
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32", "deepseekv4": "deepseek_v32", "glm": "glm45", "glm47": "glm45", "openai": "gpt-oss",
    "gpt_oss": "gpt-oss", "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "minimax-m2": "minimax_m2",
    "minimax": "minimax_m2", "qwen3_xml": "qwen3_coder",
}  # fmt: skip
_REASONING_ALIASES = {
    "deepseek-r1": "deepseek_r1", "deepseek_v31": "deepseek_v3", "deepseek-v3": "deepseek_v3",
    "deepseek_v32": "deepseek_v3", "deepseek_v4": "deepseek_v3", "deepseek-v4": "deepseek_v3", "glm47": "glm45",
    "openai_gptoss": "gpt-oss", "gpt_oss": "gpt-oss", "kimi": "kimi_k2", "kimi_k25": "kimi_k2", "minimax": "minimax_m2",
    "minimax-m2": "minimax_m2", "qwen3-thinking": "qwen3", "qwen3_thinking": "qwen3",
}  # fmt: skip
TOOL_NAMES = (*TOOL_PARSERS, *_TOOL_ALIASES, NONE)
REASONING_NAMES = (*REASONING_PARSERS, *_REASONING_ALIASES, NONE)

# What a template that teaches a format has in it: the first that has all of its texts counts.
_TOOL_SIGNS = (
    ("deepseek_v32", ("｜DSML｜",)),
    ("deepseek_v3", ("<｜tool▁call▁begin｜>", "```json")),
    ("deepseek_v31", ("<｜tool▁call▁begin｜>",)),
    ("kimi_k2", ("<|tool_call_begin|>",)),
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("minimax_m2", ("<minimax:tool_call>",)),
    ("glm45", ("<tool_call>", "<arg_key>")),
    ("qwen3_coder", ("<tool_call>", "<function=")),
    ("hermes", ("<tool_call>", "arguments")),
    ("llama3_json", ("<|python_tag|>",)),
    ("llama3_json", ("<|start_header_id|>", "parameters")),
)
_REASONING_SIGNS = (
    ("gpt-oss", ("<|channel|>", "<|message|>")),
    ("kimi_k2", ("<|im_middle|>", "think>")),
    ("minimax_m2", ("<minimax:tool_call>", "think>")),
    ("glm45", ("<|observation|>", "think>")),
    ("deepseek_v3", ("<｜Assistant｜>", "think>")),
    ("qwen3", ("think>",)),
)


def tool_parser(chosen: str | None, template: str) -> ToolFormat | Harmony | None:
    name = tool_parser_name(chosen, template)
    return TOOL_PARSERS[name] if name else None


def reasoning_parser(chosen: str | None, template: str) -> ThinkTags | Harmony | None:
    name = reasoning_parser_name(chosen, template)
    return REASONING_PARSERS[name] if name else None


def tool_parser_name(chosen: str | None, template: str) -> str | None:
    """
    Args:
        chosen: one of `TOOL_NAMES`; None: as the model's template has it.
    """
    return _chosen(chosen, _TOOL_ALIASES, _TOOL_SIGNS, template)


def reasoning_parser_name(chosen: str | None, template: str) -> str | None:
    return _chosen(chosen, _REASONING_ALIASES, _REASONING_SIGNS, template)


def _chosen(
    chosen: str | None, aliases: Mapping[str, str], signs: tuple[tuple[str, tuple[str, ...]], ...], template: str
) -> str | None:
    if chosen is not None:
        return None if chosen == NONE else aliases.get(chosen, chosen)
    return next((name for name, texts in signs if all(text in template for text in texts)), None)
