"""The PyTorch reference of EAGLE3 heads, from their formulas."""

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from convert.torch_parts import TargetEnds, stored_tensors
from jaxspec.errors import JaxspecError, plain
from jaxspec.loading.hf_folder import naming, read_hf_config
from jaxspec.models.eagle3 import capture_layers, is_eagle3, read_eagle3_config


class TorchEagle3:
    """An EAGLE3 head from its formulas: see `jaxspec.models.eagle3`, with which it shares only what a config.json means."""

    def __init__(self, target: Any, folder: Path):
        with naming(folder):
            hf = read_hf_config(folder)
            if not is_eagle3(hf):
                named = ", ".join(map(plain, hf.get("architectures") or ["of no named architecture"]))
                raise JaxspecError(f"{folder} is {named}: there is a PyTorch reference of EAGLE3 and MTP drafts only")
            self.capture = capture_layers(read_eagle3_config(hf).layer_ids, target.config.num_hidden_layers)
        if "speculators_model_type" in hf:
            given = {key: value for key, value in hf.items() if value is not None}
            hf = {"norm_before_residual": True, **hf["transformer_layer_config"], **given}
        self._hf = hf = {**hf, **hf.get("eagle_config", {})}
        w = stored_tensors(folder, "")
        self._w = {name.removeprefix("midlayer.").removeprefix("layers.0."): array for name, array in w.items()}
        self._target = TargetEnds(target)
        self._eps = hf["rms_norm_eps"]
        self._attend = (_MlaAttention if "kv_lora_rank" in hf else _LlamaAttention)(self._w, hf)

    def inputs(self, hidden: Any, streams: Any) -> Any:  # noqa: ARG002
        import torch

        hf, w = self._hf, self._w
        joined = torch.cat([streams[i] for i in self.capture], dim=-1)
        if hf.get("norm_before_fc"):
            joined = rms(joined, w["input_norm.weight"], self._eps)
        norms = [f"fc_norm.{i}.weight" for i in range(len(self.capture))] if hf.get("fc_norm") else []
        if hf.get("fc_norm") or hf.get("use_aux_norm"):
            older = [f"aux_norm_{which}.weight" for which in ("low", "mid", "high")]
            norms = older if older[0] in w else norms
        if norms:
            chunks = zip(joined.chunk(len(norms), dim=-1), norms, strict=True)
            joined = torch.cat([rms(chunk, w[name], self._eps) for chunk, name in chunks], dim=-1)
        return joined @ w["fc.weight"].T

    def embed(self, ids: Any) -> Any:
        return self._w["embed_tokens.weight"][ids] if "embed_tokens.weight" in self._w else self._target.embed(ids)

    def layer(self, embedded: Any, x: Any, positions: Any, visible: Any) -> Any:
        import torch
        from torch.nn.functional import silu

        w, norm = self._w, partial(rms, eps=self._eps)
        normed_x = norm(x, w["hidden_norm.weight"])
        pair = torch.cat([norm(embedded, w["input_layernorm.weight"]), normed_x], dim=-1)
        residual = normed_x if self._hf.get("norm_before_residual") else x
        z = residual + self._attend(pair, positions, visible)
        normed = norm(z, w["post_attention_layernorm.weight"])
        gate, up, down = (w[f"mlp.{n}_proj.weight"].T for n in ("gate", "up", "down"))
        y = z + (silu(normed @ gate) * (normed @ up)) @ down
        return norm(y, w["norm.weight"]) if self._hf.get("norm_output") else y

    def logits(self, hidden: Any) -> Any:
        import torch

        w = self._w
        normed = hidden if self._hf.get("norm_output") else rms(hidden, w["norm.weight"], self._eps)
        if "lm_head.weight" not in w:
            return self._target.logits(normed)
        logits = normed @ w["lm_head.weight"].T
        if logits.shape[-1] == self._hf["vocab_size"]:
            return logits
        everything = torch.full((len(logits), self._hf["vocab_size"]), -math.inf)
        everything[:, torch.arange(logits.shape[-1]) + w["d2t"]] = logits
        return everything


class _LlamaAttention:
    def __init__(self, w: Mapping[str, Any], hf: Mapping[str, Any]):
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self._w = w
        self._size = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
        self._rope = LlamaRotaryEmbedding(_rope_config(LlamaConfig, hf))

    def __call__(self, a: Any, positions: Any, visible: Any) -> Any:
        q, k, v = (_linear(self._w, f"{n}_proj", a).unflatten(-1, (-1, self._size)).transpose(0, 1) for n in "qkv")
        q, k = (rotate_halves(x, positions, self._rope) for x in (q, k))
        groups = len(q) // len(k)
        k, v = (x.repeat_interleave(groups, dim=0) for x in (k, v))
        return _linear(self._w, "o_proj", attend(q, k, v, self._size**-0.5, visible))


class _MlaAttention:
    """Decompressed: no latent is absorbed."""

    def __init__(self, w: Mapping[str, Any], hf: Mapping[str, Any]):
        from transformers import DeepseekV3Config
        from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

        self._w, self._hf = w, hf
        self._rope = DeepseekV3RotaryEmbedding(_rope_config(DeepseekV3Config, hf))
        self._rotate = rotate_pairs if hf.get("rope_interleave", True) else rotate_halves
        self._scale = (hf["qk_nope_head_dim"] + hf["qk_rope_head_dim"]) ** -0.5
        scaling = hf.get("rope_scaling") or {}
        if scaling.get("mscale_all_dim") and scaling["factor"] > 1:  # YaRN's temperature, in queries and in keys
            self._scale *= (0.1 * scaling["mscale_all_dim"] * math.log(scaling["factor"]) + 1) ** 2

    def __call__(self, a: Any, positions: Any, visible: Any) -> Any:
        import torch

        hf, w, linear = self._hf, self._w, partial(_linear, self._w)
        heads, nope, eps = hf["num_attention_heads"], hf["qk_nope_head_dim"], hf["rms_norm_eps"]
        normed = lambda x, name: rms(x, w[f"self_attn.{name}.weight"], eps)  # noqa: E731
        split = lambda x: x.unflatten(-1, (heads, -1)).transpose(0, 1)  # noqa: E731
        rotate = lambda x: self._rotate(x, positions, self._rope)  # noqa: E731
        if hf.get("q_lora_rank") is None:
            q = split(linear("q_proj", a))
        else:
            q = split(linear("q_b_proj", normed(linear("q_a_proj", a), "q_a_layernorm")))
        latent, shared = linear("kv_a_proj_with_mqa", a).split([hf["kv_lora_rank"], hf["qk_rope_head_dim"]], dim=-1)
        kv = split(linear("kv_b_proj", normed(latent, "kv_a_layernorm")))
        q = torch.cat([q[..., :nope], rotate(q[..., nope:])], dim=-1)
        k = torch.cat([kv[..., :nope], rotate(shared).expand(heads, -1, -1)], dim=-1)
        return linear("o_proj", attend(q, k, kv[..., nope:], self._scale, visible))


def rms(x: Any, weight: Any, eps: float) -> Any:
    import torch

    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


def rotate_halves(x: Any, positions: Any, rope: Any) -> Any:
    """x [..., X, d] at positions [X], dimension j paired with j + d / 2."""
    import torch

    a, b = x.chunk(2, dim=-1)
    return torch.cat(_turned(a, b, positions, rope), dim=-1)


def rotate_pairs(x: Any, positions: Any, rope: Any) -> Any:
    """As `rotate_halves`, dimension 2j paired with 2j + 1."""
    import torch

    return torch.stack(_turned(x[..., 0::2], x[..., 1::2], positions, rope), -1).flatten(-2)


def _turned(a: Any, b: Any, positions: Any, rope: Any) -> tuple[Any, Any]:
    angles = positions[:, None] * rope.inv_freq
    cos, sin = (rope.attention_scaling * f for f in (angles.cos(), angles.sin()))
    return a * cos - b * sin, b * cos + a * sin


def attend(q: Any, k: Any, v: Any, scale: float, visible: Any) -> Any:
    """Attention of [heads, X, .] under a mask [X, X]; [X, heads * .]."""
    scores = scale * q @ k.transpose(1, 2)
    return (scores.masked_fill(~visible, -math.inf).softmax(-1) @ v).transpose(0, 1).flatten(1)


def _linear(w: Mapping[str, Any], name: str, x: Any) -> Any:
    out, bias = x @ w[f"self_attn.{name}.weight"].T, f"self_attn.{name}.bias"
    return out + w[bias] if bias in w else out


def _rope_config(cls: Any, hf: Mapping[str, Any]) -> Any:
    """A configuration of the class for its rotary embedding, which computes frequencies and temperature."""
    keys = (
        "hidden_size", "num_attention_heads", "head_dim", "qk_rope_head_dim", "max_position_embeddings", "rope_theta",
        "rope_scaling", "rope_parameters",
    )  # fmt: skip
    return cls(**{key: hf[key] for key in keys if hf.get(key) is not None})
