"""Reading a Hugging Face `config.json`: what the families have in common, and how large a model may claim to be.

Both spellings are accepted: the hub's (`rope_theta` + `rope_scaling`, `torch_dtype`) and the one that transformers 5
writes (`rope_parameters`, `dtype`, and no `scoring_func`/`topk_method`).
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jaxspec.errors import ModelFormatError, shown
from jaxspec.models.config import RopeConfig
from jaxspec.models.fields import (
    CONFIG,
    check_whole,
    flag,
    real,
    real_list,
    real_or,
    real_or_none,
    require,
    section,
    text_list,
    text_or,
    whole,
    whole_list,
    whole_or,
    wrong,
)

# Several times those of the largest published models: they stop a hostile file before anything grows with its numbers.
MAX_LAYERS = 1024
MAX_SIZE = 2**20  # of a hidden size, an MLP, a rank, a head; and the number of heads
MAX_VOCAB = 2**24
MAX_POSITION = 2**30
# Of a causal convolution; each is a product of its own in a step.
MAX_TAPS = 64
_MAX_EOS_IDS = 1024
_MAX_TOKEN_ID = 2**31 - 1
_DTYPES = ("bfloat16", "float16", "float32")

# Architectures whose config.json wraps that of a language model, and what counts there although the part says it too.
KIMI_K25 = "KimiK25ForConditionalGeneration"
QWEN3_5, QWEN3_5_MOE = "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"
_WRAPPERS = {KIMI_K25: (), QWEN3_5: ("tie_word_embeddings",), QWEN3_5_MOE: ("tie_word_embeddings",)}
# What such a file may say beside the part that it is about.
_OF_THE_WRAPPER = ("architectures", "quantization_config", "torch_dtype", "dtype", "eos_token_id")


def unsupported(key: str, value: object, supported: str) -> ModelFormatError:
    return ModelFormatError(f"config.json has {key}={shown(value)}, which is not supported (supported: {supported})")


def text_part(hf: dict[str, Any]) -> dict[str, Any]:
    """What a config.json says about its language model, under its own `architectures`; any other file as it is.

    Raises:
        ModelFormatError: a multimodal wrapper without that part.
    """
    wrapper = next((name for name in text_list(hf, "architectures") if name in _WRAPPERS), None)
    if wrapper is None or ("vocab_size" in hf and "text_config" not in hf):
        return hf
    require(hf, key := "text_config")
    inner = {name: value for name, value in section(hf, key).items() if value is not None}
    require(inner, "vocab_size", where=f"{key} of {CONFIG}")
    outer = {name: hf[name] for name in _OF_THE_WRAPPER if name in hf}
    above = {name: hf[name] for name in _WRAPPERS[wrapper] if hf.get(name) is not None}
    return outer | inner | above | {"architectures": hf["architectures"]}


def size(hf: Mapping[str, Any], key: str) -> int:
    """A size of a matrix, or a number of heads."""
    return whole(hf, key, 1, MAX_SIZE)


def divisible(hf: Mapping[str, Any], key: str, number: int, by: str, divisor: int) -> None:
    """Raises `ModelFormatError` where the number at `key` is no multiple of the one at `by`."""
    if number % divisor:
        raise ModelFormatError(
            f"{key} in config.json must be a multiple of {by}, got {shown(hf.get(key))} and {shown(hf.get(by))}"
        )


def rotary_dim(key: str, dim: int) -> int:
    if dim % 2:
        raise wrong(key, "even, because rotary embeddings turn pairs", dim)
    return dim


def common_fields(hf: Mapping[str, Any], architecture: str, *, biases: bool = False) -> dict[str, Any]:
    """Arguments of `ModelConfig` that every family reads alike: all but its layers.

    Args:
        biases: the family has biases of its attention where `attention_bias` says so.
    """
    require(
        hf, "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "rms_norm_eps",
        "max_position_embeddings",
    )  # fmt: skip
    for key in ("attention_bias", "mlp_bias"):
        if flag(hf, key) and not (biases and key == "attention_bias"):
            raise unsupported(key, hf[key], "false")
    if (activation := text_or(hf, "hidden_act", "silu")) != "silu":
        raise unsupported("hidden_act", activation, "silu")
    return {
        "architecture": architecture,
        "vocab_size": whole(hf, "vocab_size", 1, MAX_VOCAB),
        "hidden_size": size(hf, "hidden_size"),
        "rms_norm_eps": norm_eps(hf),
        "max_position": whole(hf, "max_position_embeddings", 1, MAX_POSITION),
        "tie_embeddings": flag(hf, "tie_word_embeddings"),
        "dtype": _dtype(hf),
        "eos_token_ids": eos_ids(hf),
    }


def num_layers(hf: Mapping[str, Any]) -> int:
    return whole(hf, "num_hidden_layers", 1, MAX_LAYERS)


def layer_kinds(hf: Mapping[str, Any], key: str, *kinds: str) -> Sequence[str]:
    """The kind of each layer, one of `kinds`, as a list in config.json says it; none where there is no list."""
    listed, layers = text_list(hf, key), num_layers(hf)
    if unknown := [kind for kind in listed if kind not in kinds]:
        raise unsupported(key, unknown[0], ", ".join(kinds))
    if listed and len(listed) != layers:
        raise ModelFormatError(f"config.json has {len(listed)} {key} and num_hidden_layers={layers}")
    return listed


def norm_eps(hf: Mapping[str, Any]) -> float:
    return real(hf, "rms_norm_eps", 0, 1)


def _dtype(hf: Mapping[str, Any]) -> str:
    key = "dtype" if hf.get("dtype") is not None else "torch_dtype"
    dtype = text_or(hf, key, "bfloat16")
    if dtype not in _DTYPES:
        raise unsupported(key, dtype, ", ".join(_DTYPES))
    return dtype


def eos_ids(values: Mapping[str, Any], *, where: str = CONFIG) -> tuple[int, ...]:
    """`eos_token_id` of config.json or generation_config.json, which is one id or a list."""
    key = "eos_token_id"
    value = values.get(key)
    if value is None:
        return ()
    if isinstance(value, list):
        return whole_list(value, key, items=_MAX_EOS_IDS, least=0, most=_MAX_TOKEN_ID, where=where)
    return (check_whole(value, key, 0, _MAX_TOKEN_ID, where=where),)


def partial_rotary_dim(hf: Mapping[str, Any], head_dim: int, *, default: float) -> int:
    """How many columns of a head are rotated, from the share that `partial_rotary_factor` says."""
    raw = _rope_section(hf)
    key = "partial_rotary_factor"
    share = real_or(raw if key in raw else hf, key, default, 0, 1)
    return rotary_dim(f"{key} times head_dim", max(int(head_dim * share), 1))


def _rope_section(hf: Mapping[str, Any]) -> dict[str, Any]:
    inner = section(hf, "rope_scaling") | section(hf, "rope_parameters")
    return {key: value for key, value in inner.items() if value is not None}


def read_rope(hf: Mapping[str, Any], dim: int, *, interleaved: bool) -> RopeConfig:
    """The rotary embedding of a Hugging Face config."""
    raw = _rope_section(hf)
    # Some writers repeat the base inside, most do not; 1 has no logarithm that YaRN could divide by.
    theta = real_or(raw if "rope_theta" in raw else hf, "rope_theta", 10000.0, 1.001, 1e15)
    kind: Any = raw.get("rope_type", raw.get("type", "default"))
    if kind not in ("default", "linear", "yarn", "llama3", "longrope"):
        raise unsupported("rope type", kind, "default, linear, yarn, llama3, longrope")
    if kind == "default":
        return RopeConfig(dim, theta, interleaved=interleaved)
    where = f"{'rope_parameters' if hf.get('rope_parameters') else 'rope_scaling'} of {CONFIG}"
    if kind == "longrope":
        return _read_longrope(hf, raw, RopeConfig(dim, theta, kind, interleaved), where)
    low = real_or(raw, "low_freq_factor", 1.0, 1e-6, 1e6, where=where)
    high = real_or(raw, "high_freq_factor", 4.0, 1e-6, 1e6, where=where)
    if kind == "llama3" and low >= high:
        raise wrong("high_freq_factor", f"over low_freq_factor {low:g}", high, where)
    original = "original_max_position_embeddings"
    trained = raw if original in raw else {original: whole(hf, "max_position_embeddings", 1, MAX_POSITION)}
    return RopeConfig(
        dim,
        theta,
        kind,
        interleaved,
        factor=real_or(raw, "factor", 1.0, 1, 1e6, where=where),
        original_max_position=whole_or(trained, original, 0, 1, MAX_POSITION, where=where),
        beta_fast=real_or(raw, "beta_fast", 32.0, 1e-6, 1e6, where=where),
        beta_slow=real_or(raw, "beta_slow", 1.0, 1e-6, 1e6, where=where),
        mscale=real_or_none(raw, "mscale", 0, 1e3, where=where),
        mscale_all_dim=real_or_none(raw, "mscale_all_dim", 0, 1e3, where=where),
        attention_factor=real_or_none(raw, "attention_factor", 1e-6, 1e6, where=where),
        low_freq_factor=low,
        high_freq_factor=high,
        truncate=flag(raw, "truncate", default=True, where=where),
    )


def _read_longrope(hf: Mapping[str, Any], raw: dict[str, Any], rope: RopeConfig, where: str) -> RopeConfig:
    """Factors of each frequency. Those for contexts beyond the original one must be those for shorter ones, as in
    MiniCPM3: with others the length of a text would change the keys that are cached."""
    short, long = (
        real_list(raw, f"{kind}_factor", rope.dim // 2, 1e-6, 1e6, where=where) for kind in ("short", "long")
    )
    if short != long:
        raise unsupported("long_factor", raw["long_factor"], "the same as short_factor")
    original = whole(raw, "original_max_position_embeddings", 2, MAX_POSITION, where=where)
    stretch = whole(hf, "max_position_embeddings", 1, MAX_POSITION) / original
    factor = real_or(raw, "factor", stretch, 1e-6, 1e9, where=where)
    default = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return replace(
        rope,
        factors=short,
        factor=factor,
        original_max_position=original,
        attention_factor=real_or(raw, "attention_factor", default, 1e-6, 1e6, where=where),
    )
