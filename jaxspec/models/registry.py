"""The families of models, by the names in `architectures` of config.json. Adding one touches its module and this list."""

import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jaxspec.errors import ModelFormatError, plain
from jaxspec.models import (
    deepseek,
    glm4_moe,
    gpt_oss,
    kimi,
    kimi_linear,
    llama,
    minicpm,
    minimax_m2,
    qwen3_5,
    qwen3_moe,
)
from jaxspec.models.config import ModelConfig, Published
from jaxspec.models.decoder import decoder_key_map
from jaxspec.models.fields import text_list
from jaxspec.models.keymap import KeyMap
from jaxspec.models.mtp import nextn_key_map
from jaxspec.models.unsupported import explain


class Family(NamedTuple):
    """How one family's checkpoints are read.

    Attributes:
        read_config: from config.json and the architecture found there.
        harmless: matches tensors that its checkpoints are known to hold and no model needs.
        published: what people know it by.
        key_map: of the target, paths of `CausalLM`.
        nextn_key_map: of the first NextN layer, paths of `NextN`.
    """

    read_config: Callable[[Mapping[str, Any], str], ModelConfig]
    harmless: Callable[[ModelConfig], re.Pattern[str]]
    published: Published
    key_map: Callable[[ModelConfig], KeyMap] = decoder_key_map
    nextn_key_map: Callable[[ModelConfig], KeyMap] = nextn_key_map


# Each family's module, and its key maps where its tensors have names of their own.
_MODULES: tuple[tuple[Any, dict[str, Callable[[ModelConfig], KeyMap]]], ...] = (
    (deepseek, {}),
    (llama, {}),
    (minicpm, {}),
    (qwen3_moe, {}),
    (glm4_moe, {}),
    (gpt_oss, {}),
    (kimi, {"key_map": kimi.target_key_map, "nextn_key_map": kimi.draft_key_map}),
    (minimax_m2, {"key_map": minimax_m2.key_map}),
    (kimi_linear, {"key_map": kimi_linear.key_map}),
    (qwen3_5, {"key_map": qwen3_5.key_map, "nextn_key_map": qwen3_5.nextn_key_map}),
)
FAMILIES: dict[str, Family] = {
    name: Family(module.read_config, module.harmless, published, **key_maps)
    for module, key_maps in _MODULES
    for name, published in module.ARCHITECTURES.items()
}


def family_of(config: ModelConfig) -> Family:
    return FAMILIES[config.architecture]


def read_config(hf: Mapping[str, Any]) -> ModelConfig:
    """The configuration of a Hugging Face `config.json`, as `hf_folder.read_hf_config` returns it.

    Raises:
        ModelFormatError: an architecture or option that is not supported; the text says what is missing.
    """
    architectures = text_list(hf, "architectures")
    for architecture in architectures:
        if architecture in FAMILIES:
            return FAMILIES[architecture].read_config(hf, architecture)
    if not architectures:
        raise ModelFormatError("unsupported architecture (none named in config.json); `jaxspec models` lists what is")
    raise ModelFormatError(
        f"unsupported architecture {', '.join(map(plain, architectures[:4]))}; "
        f"{explain(hf, architectures[0], FAMILIES)}; `jaxspec models` lists what is supported"
    )
