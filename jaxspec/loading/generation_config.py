"""A model's sampling defaults: what its generation_config.json says, for requests that leave it unsaid.

The file's end-of-text ids are read with the model (`hf_folder.eos_token_ids`), whatever is chosen here. Its other keys
are not read: `max_new_tokens` since limits come from requests, and `do_sample`, as in vLLM, since `temperature` says it.
"""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxspec.errors import ConfigError, InvalidRequestError, ModelFormatError, shown
from jaxspec.loading.hf_folder import GENERATION_CONFIG, naming, read_json
from jaxspec.models.fields import real, whole
from jaxspec.sampling.params import SamplingParams

AUTO = "auto"
# vLLM's word for it, and ours.
NOTHING = ("vllm", "none")
OVERRIDE = "override_generation_config (--override-generation-config)"
_SOURCE = "generation_config (--generation-config)"

_REALS = ("temperature", "top_p", "min_p", "repetition_penalty")
_KEYS = (*_REALS, "top_k")
# Far above any sensible value; `SamplingParams` has the limits.
_MOST = 100.0
_MOST_TOP_K = 2**31 - 1


@dataclass(frozen=True)
class SamplingDefaults:
    """
    Attributes:
        values: parameters of `SamplingParams` by name; only those that somebody has set.
        origin: where they come from, in words; empty where there are none.
    """

    values: Mapping[str, float] = field(default_factory=dict)
    origin: str = ""

    def __str__(self) -> str:
        if not self.values:
            return "none"
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items()) + f" (from {self.origin})"


def sampling_defaults(folder: Path, source: str = AUTO, override: Mapping[str, Any] | None = None) -> SamplingDefaults:
    """The defaults of the model in `folder`.

    Args:
        source: "auto" (the model's own generation_config.json, if it has one), "none" or "vllm" (none of it), or a folder
            with such a file.
        override: values that go before the file's; null takes one away.

    Raises:
        ModelFormatError: a value of the model's file that cannot be used.
        ConfigError: `source` or `override` cannot be used.
    """
    values, origins = _of_source(folder, source)
    if override is not None:
        given = check_override(override)
        values = {name: value for name, value in values.items() if name not in override} | given
        origins.append("--override-generation-config")
    values = {name: values[name] for name in _KEYS if name in values}
    return SamplingDefaults(values, " and ".join(origins) if values else "")


def check_override(override: Any) -> dict[str, float]:
    """The values of an override that are not null.

    Raises:
        ConfigError: it is no object, or has an unknown key or a value that cannot be used.
    """
    if not isinstance(override, Mapping):
        raise ConfigError(f'{OVERRIDE} must be an object such as {{"temperature": 0.6}}, got {shown(override)}')
    for key in override:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(_KEYS)
            raise ConfigError(f"unknown key {shown(key)} in {OVERRIDE} ({hint})")
    try:
        return _read(override, OVERRIDE)
    except ModelFormatError as e:
        raise ConfigError(str(e)) from e


def _of_source(folder: Path, source: str) -> tuple[dict[str, float], list[str]]:
    """Values, and the words for their origin if there is one."""
    if source in NOTHING:
        return {}, []
    if source == AUTO:
        if not (folder / GENERATION_CONFIG).exists():
            return {}, []
        try:
            with naming(folder):
                return _read(read_json(folder, GENERATION_CONFIG), GENERATION_CONFIG), [GENERATION_CONFIG]
        except ModelFormatError as e:
            raise ModelFormatError(f"{e} (--generation-config none leaves it out)") from e
    other = Path(source).expanduser()
    if not (other / GENERATION_CONFIG).is_file():
        raise ConfigError(
            f"{_SOURCE} must be auto, none, vllm or a folder with a {GENERATION_CONFIG}, got {shown(source)}"
        )
    try:
        with naming(other):
            return _read(read_json(other, GENERATION_CONFIG), GENERATION_CONFIG), [str(other / GENERATION_CONFIG)]
    except ModelFormatError as e:
        raise ConfigError(str(e)) from e


def _read(values: Mapping[str, Any], where: str) -> dict[str, float]:
    given = [key for key in _KEYS if values.get(key) is not None]
    found: dict[str, Any] = {
        key: real(values, key, 0, _MOST, where=where)
        if key in _REALS
        else whole(values, key, -1, _MOST_TOP_K, where=where)
        for key in given
    }
    try:
        SamplingParams(**found)
    except InvalidRequestError as e:
        raise ModelFormatError(f"{where}: {e}") from e
    return found
