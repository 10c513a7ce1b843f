"""What an architecture that is not supported would need, for the error that refuses it."""

import difflib
from collections.abc import Collection, Mapping
from typing import Any

# Architectures that people have: the one that is most like it, and what that one lacks.
KNOWN: dict[str, tuple[str, str]] = {
    "DeepseekV4ForCausalLM": ("DeepseekV32ForCausalLM", "compressed keys, hash routing and mixed residual streams"),
    "LongcatFlashForCausalLM": ("DeepseekV3ForCausalLM", "two attentions a layer and experts that do nothing"),
    "Llama4ForCausalLM": ("LlamaForCausalLM", "chunked attention and layers without rotary embedding"),
    "Llama4ForConditionalGeneration": ("LlamaForCausalLM", "chunked attention and layers without rotary embedding"),
    "Qwen2ForCausalLM": ("LlamaForCausalLM", "biases of queries, keys and values that config.json does not declare"),
}
_READER = "a reader of its configuration and tensors"


def explain(hf: Mapping[str, Any], architecture: str, supported: Collection[str]) -> str:
    """The nearest supported architecture, and what it lacks for this one.

    Args:
        hf: config.json, of which any value may be nonsense.
        supported: names of architectures.
    """
    if architecture in KNOWN:
        nearest, missing = KNOWN[architecture]
    else:
        nearest, missing = _nearest(hf, architecture, supported), ", ".join(_features(hf)) or _READER
    return f"the nearest supported one is {nearest}, which lacks {missing}"


def _nearest(hf: Mapping[str, Any], architecture: str, supported: Collection[str]) -> str:
    """By its attention first, then by its name."""
    if hf.get("kv_lora_rank") is not None:
        return "DeepseekV3ForCausalLM"
    return (*difflib.get_close_matches(architecture[:100], supported, n=1, cutoff=0.6), "LlamaForCausalLM")[0]


def _features(hf: Mapping[str, Any]) -> list[str]:
    """What config.json shows that no supported family of its kind has."""
    found = []
    kinds = hf.get("layer_types")
    if isinstance(kinds, list) and "linear_attention" in kinds:
        found.append("linear attention")
    if isinstance(hf.get("text_config"), dict):
        found.append("a reader of its text part")
    if hf.get("is_encoder_decoder") is True:
        found.append("an encoder")
    return found
