"""How DeepSeek and Kimi publish quantised weights: which ones, as which tensors, and what config.json says of them.

What is quantised here has the codes and scales that `jaxspec convert` would give it, in the tensors that
`jaxspec.loading.stored` reads, so that other engines load the same folder.

- FP8 as DeepSeek-V3 (its config.json and README_WEIGHTS.md): all projections of attention, of dense MLPs and of experts, the
  MTP layer's too. Its embedding, head, norms, routers and `eh_proj` are not, and its configuration has no list of them.
- INT4 as Kimi-K2-Thinking (compressed-tensors, "pack-quantized"): routed experts. Its list of what is ignored has all other
  projections and the head; that of its MTP layer is ours, since Kimi publishes none.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench.harness.shards import Tensor
from jaxspec.errors import ConfigError
from jaxspec.loading.quantise import quantise
from jaxspec.loading.safetensors_reader import FP8
from jaxspec.models.deepseek import V3
from pallas_kernels.quant.schemes import FP8_BLOCK, INT4_G32, Scheme


@dataclass(frozen=True)
class Published:
    """A format that quantised weights are published in.

    Attributes:
        config: the `quantization_config` of config.json.
        scheme: of the codes and scales.
        names: match the weights that are quantised.
    """

    config: Mapping[str, Any]
    scheme: Scheme
    names: re.Pattern[str]

    def tensors(self, name: str, shape: tuple[int, int]) -> dict[str, Tensor]:
        """What a weight [out, in] of `names` is stored as."""
        blocks = self.scheme.blocks(shape)
        if self.scheme is FP8_BLOCK:
            return {name: Tensor(FP8, shape), f"{name}_scale_inv": Tensor("F32", blocks)}
        out, inputs = shape
        return {
            f"{name}_packed": Tensor("I32", (out, inputs // 8)),
            f"{name}_scale": Tensor("BF16", blocks),
            f"{name}_shape": Tensor("I64", (2,)),
        }

    def quantise(self, name: str, weight: np.ndarray) -> dict[str, np.ndarray]:
        """The tensors of `tensors`, of a weight float32 [out, in]."""
        codes, scale = quantise(weight, self.scheme)
        if self.scheme is FP8_BLOCK:
            return {name: codes, f"{name}_scale_inv": scale}
        # Eight codes to a word, the first one lowest, each plus 8: two's complement but for the first bit.
        words = (codes ^ np.uint8(0x88)).view("<i4")
        return {f"{name}_packed": words, f"{name}_scale": scale, f"{name}_shape": np.array(weight.shape, np.int64)}


PUBLISHED = {
    "fp8": Published(
        config={
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        scheme=FP8_BLOCK,
        names=re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\..*_proj(_with_mqa)?\.weight"),
    ),
    "int4": Published(
        config={
            "config_groups": {
                "group_0": {
                    "input_activations": None, "output_activations": None, "targets": ["Linear"],
                    "weights": {
                        "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                        "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
                    },
                },
            },
            "format": "pack-quantized",
            "ignore": [
                "lm_head", r"re:.*self_attn.*", r"re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
            "kv_cache_scheme": None, "quant_method": "compressed-tensors", "quantization_status": "compressed",
        },
        scheme=INT4_G32,
        names=re.compile(r"model\.layers\.\d+\.mlp\.experts\.\d+\.\w+_proj\.weight"),
    ),
}  # fmt: skip


def published(quantization: str, hf: Mapping[str, Any]) -> Published | None:
    """The format of `--quantization`, None for "bf16".

    Args:
        hf: the config.json of the model.

    Raises:
        ConfigError: models of this architecture are not published so.
    """
    if quantization == "bf16":
        return None
    if hf["architectures"] != [V3]:
        raise ConfigError(f"--quantization {quantization} is for {V3}, and this model is {hf['architectures'][0]}")
    return PUBLISHED[quantization]
