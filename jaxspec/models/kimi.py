"""Kimi-K2.5, K2.6 and K2.7: the language model of a multimodal checkpoint, which is a DeepSeek-V3 under a prefix.

The vision tower changes nothing for text: positions have one dimension. Its tensors are left unread.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.models import deepseek
from jaxspec.models.config import ModelConfig, Published
from jaxspec.models.decoder import decoder_key_map
from jaxspec.models.hf_fields import KIMI_K25
from jaxspec.models.keymap import KeyMap, any_of
from jaxspec.models.mtp import nextn_key_map

PREFIX = "language_model."
ARCHITECTURES = {KIMI_K25: Published("Kimi-K2.5, K2.6, K2.7", mtp=True, note="text only")}


def read_config(hf: Mapping[str, Any], architecture: str) -> ModelConfig:
    """Of the text part, which `hf_fields.text_part` has taken out of the wrapper."""
    return replace(deepseek.read_config(hf, deepseek.V3), architecture=architecture)


def harmless(config: ModelConfig) -> re.Pattern[str]:
    inner = deepseek.harmless(config).pattern
    return any_of([r"(vision_tower|mm_projector)\..*", f"{re.escape(PREFIX)}(?:{inner})"])


def target_key_map(config: ModelConfig) -> KeyMap:
    return _prefixed(decoder_key_map(config))


def draft_key_map(config: ModelConfig) -> KeyMap:
    return _prefixed(nextn_key_map(config))


def _prefixed(keys: KeyMap) -> KeyMap:
    return {path: tuple(replace(p, name=PREFIX + p.name) for p in pieces) for path, pieces in keys.items()}
