"""Reading the number of experts from a Hugging Face `config.json`."""

from collections.abc import Mapping
from typing import Any

from jaxspec.errors import ModelFormatError
from jaxspec.models.fields import require, whole
from jaxspec.models.hf_fields import num_layers

# Kimi-K2, the largest, has 384 experts in 60 layers. Each expert of each layer is three entries of the key map.
MAX_EXPERTS = 4096
_MAX_EXPERTS_OF_ALL_LAYERS = 2**16


def read_experts(hf: Mapping[str, Any], *keys: str, chosen: str = "num_experts_per_tok") -> tuple[int, int]:
    """Routed experts of a layer, and how many of them a token goes to.

    Args:
        keys: of the number of experts; the first that is there counts.
        chosen: of the number that a token goes to.

    Raises:
        ModelFormatError: no such numbers, or some that do not fit each other.
    """
    key = next((key for key in keys if hf.get(key) is not None), keys[0])
    require(hf, key, chosen)
    experts, top_k = whole(hf, key, 1, MAX_EXPERTS), whole(hf, chosen, 1, MAX_EXPERTS)
    if (layers := num_layers(hf)) * experts > _MAX_EXPERTS_OF_ALL_LAYERS:
        raise ModelFormatError(
            f"config.json has num_hidden_layers={layers} and {key}={experts}; "
            f"at most {_MAX_EXPERTS_OF_ALL_LAYERS} experts in all layers are supported"
        )
    if top_k > experts:
        raise ModelFormatError(f"config.json has {chosen}={top_k} and only {key}={experts}")
    return experts, top_k
