"""Which formats of calls there are, and which of them a model was taught: its chat template shows it.

Those of thoughts are in `jaxspec.grammar.thought`.
"""

from collections.abc import Mapping

from jaxspec.grammar.thought import NONE, chosen_name
from serve.parsers.formats import ToolFormat
from serve.parsers.json_calls import HERMES, LLAMA3_JSON
from serve.parsers.output import Harmony
from serve.parsers.sections import DEEPSEEK_V3, DEEPSEEK_V31, KIMI_K2
from serve.parsers.tagged_calls import DEEPSEEK_V32, GLM45, MINIMAX_M2, QWEN3_CODER

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
# Other names of vLLM and SGLang.
_TOOL_ALIASES = {
    "deepseekv3": "deepseek_v3", "deepseekv31": "deepseek_v31", "deepseekv32": "deepseek_v32",
    "deepseek_v4": "deepseek_v32", "deepseekv4": "deepseek_v32", "glm": "glm45", "glm47": "glm45", "openai": "gpt-oss",
    "gpt_oss": "gpt-oss", "qwen": "hermes", "qwen25": "hermes", "llama3": "llama3_json", "minimax-m2": "minimax_m2",
    "minimax": "minimax_m2", "qwen3_xml": "qwen3_coder",
}  # fmt: skip
TOOL_NAMES = (*TOOL_PARSERS, *_TOOL_ALIASES, NONE)

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


def tool_parser(chosen: str | None, template: str) -> ToolFormat | Harmony | None:
    name = tool_parser_name(chosen, template)
    return TOOL_PARSERS[name] if name else None


def tool_parser_name(chosen: str | None, template: str) -> str | None:
    """
    Args:
        chosen: one of `TOOL_NAMES`; None: as the model's template has it.
    """
    return chosen_name(chosen, _TOOL_ALIASES, _TOOL_SIGNS, template)
