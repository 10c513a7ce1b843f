"""Speculation as vLLM's `--speculative-config` gives it, in our own options."""

import difflib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jaxspec.config import DEFAULT_SPECULATIVE_TOKENS, EngineConfig, flagged
from jaxspec.errors import ConfigError, shown

# Keys, their types, and the options that they set.
_KEYS: dict[str, tuple[type, str]] = {
    "method": (str, "speculative_method"),
    "model": (str, "speculative_model"),
    "num_speculative_tokens": (int, "num_speculative_tokens"),
    "prompt_lookup_max": (int, "prompt_lookup_max"),
    "prompt_lookup_min": (int, "prompt_lookup_min"),
    "suffix_decoding_max_tree_depth": (int, "prompt_lookup_max"),
}
SPECULATIVE_OPTIONS = tuple(dict.fromkeys(option for _, option in _KEYS.values()))
# What cannot be chosen here: its value, and why.
_FIXED: dict[str, tuple[float, str]] = {
    "suffix_decoding_max_spec_factor": (1, "there are as many drafts as tokens that are equal"),
    "suffix_decoding_max_cached_requests": (0, "drafts are looked up in the text of their own request only"),
}
_EXAMPLE = '{"method": "eagle3", "model": "demo/eagle3-mla", "num_speculative_tokens": 3}'


def with_speculative_config(config: EngineConfig, given: Mapping[str, Any]) -> EngineConfig:
    """The options with speculation given as vLLM gives it: a method with its keys, a model, num_speculative_tokens.

    The number is 3 by default. Without a method, a model means eagle3 and no model means mtp.

    Raises:
        ConfigError: an unknown key, a wrong type, an option that `config` sets too, or a contradiction, which `EngineConfig`
            finds.
    """
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config must be an object such as {_EXAMPLE}, got {shown(given)}")
    options: dict[str, Any] = {}
    for key, value in given.items():
        if key in _FIXED:
            only, why = _FIXED[key]
            if value != only:
                raise ConfigError(f"{key} in speculative_config can only be {only}, for {why}; got {shown(value)}")
            continue
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "known are " + ", ".join(_KEYS)
            raise ConfigError(f"unknown key {shown(key)} in speculative_config ({hint})")
        kind, option = _KEYS[key]
        if type(value) is not kind:  # bool is a subclass of int
            wanted = {str: "a text", int: "a whole number"}[kind]
            raise ConfigError(f"{key} in speculative_config must be {wanted}, got {shown(value)}")
        if option in options or getattr(config, option) is not None:
            raise ConfigError(f"{flagged(option)} is given twice: as an option and as {key} in speculative_config")
        options[option] = value
    if config.num_speculative_tokens is None:
        options.setdefault("num_speculative_tokens", DEFAULT_SPECULATIVE_TOKENS)
    config = replace(config, **options)
    # These two are what is drafted with anyway.
    return replace(config, speculative_method=None) if config.speculative_method in ("mtp", "eagle3") else config
