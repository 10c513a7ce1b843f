"""Which checkpoint tensors make up each parameter: one declarative key map per architecture family.

A parameter is filled by pieces, each saying `parameter[at] = tensor.reshape(view)[take]`. Every conversion that the
models need (splits, fusions, stacked experts, reordered rotary rows) is of that form, so a map is data: it can be
checked against a checkpoint's headers before a single weight is read.

Names and shapes: DeepSeek-V2/V3 and Llama/Qwen3 as on the Hugging Face hub.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import numpy as np

from jaxspec.models.config import GQAConfig, MLAConfig, ModelConfig, MoEConfig
from jaxspec.models.eagle3 import Eagle3Config

ParamPath = tuple[str | int, ...]
Index = int | slice | EllipsisType | tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Piece:
    """`parameter[at] = tensor.reshape(view)[take]`; the tensor must have exactly `shape`. `view` () leaves it."""

    name: str
    shape: tuple[int, ...]
    at: Index = ...
    view: tuple[int, ...] = ()
    take: Index = ...


Pieces = tuple[Piece, ...]
KeyMap = dict[ParamPath, Pieces]


def assemble(
    pieces: Pieces,
    shape: tuple[int, ...],
    dtype: Any,
    read: Callable[[str], np.ndarray],
    run: Callable[[Callable[[Piece], None], Pieces], Iterable[None]] = map,
) -> np.ndarray:
    """One parameter, cast to `dtype`.

    Args:
        read: the tensor of a name.
        run: calls a function with every piece. `map` has one source tensor in memory at a time; that of a pool reads
            several at once.
    """
    out = np.empty(shape, dtype)
    bits = f"u{out.dtype.itemsize}"

    def fill(piece: Piece) -> None:
        tensor, target = read(piece.name), out
        if tensor.dtype == out.dtype:  # as integers: NumPy holds Python's lock while it copies bfloat16
            tensor, target = tensor.view(bits), out.view(bits)
        target[piece.at] = tensor.reshape(piece.view or piece.shape)[piece.take]

    for _ in run(fill, pieces):
        pass
    return out


def key_map(config: ModelConfig) -> KeyMap:
    """The target model: paths of `CausalLM` -> pieces."""
    H, V = config.hidden_size, config.vocab_size
    out: KeyMap = {
        ("embed", "weight"): (Piece("model.embed_tokens.weight", (V, H)),),
        ("norm", "weight"): (Piece("model.norm.weight", (H,)),),
    }
    if not config.tie_embeddings:
        out["head", "weight"] = (Piece("lm_head.weight", (V, H)),)
    for i in range(config.num_layers):
        block = _block(config, f"model.layers.{i}.", moe=config.is_moe_layer(i))
        out |= {("layers", i, *path): pieces for path, pieces in block.items()}
    return out


def nextn_key_map(config: ModelConfig) -> KeyMap:
    """The NextN (MTP) layer, which checkpoints store behind the last layer: paths of `NextN` -> pieces."""
    H, prefix = config.hidden_size, nextn_prefix(config)
    block = _block(config, prefix, moe=config.moe is not None)
    return {
        ("enorm", "weight"): (Piece(f"{prefix}enorm.weight", (H,)),),
        ("hnorm", "weight"): (Piece(f"{prefix}hnorm.weight", (H,)),),
        ("eh_proj",): (Piece(f"{prefix}eh_proj.weight", (H, 2 * H)),),
        ("norm", "weight"): (Piece(f"{prefix}shared_head.norm.weight", (H,)),),
    } | {("layer", *path): pieces for path, pieces in block.items()}


def nextn_prefix(config: ModelConfig) -> str:
    return f"model.layers.{config.num_layers}."


def eagle3_key_map(config: Eagle3Config, *, prefix: str, own_embedding: bool, own_head: bool) -> KeyMap:
    """An EAGLE3 head: paths of `Eagle3` -> pieces. Its layer is stored under `prefix`, "midlayer." or "layers.0."."""
    model = config.model
    H, Vd = model.hidden_size, config.draft_vocab_size
    out: KeyMap = {
        ("fc",): (Piece("fc.weight", (H, config.num_captured * H)),),
        ("norm", "weight"): (Piece("norm.weight", (H,)),),
    }
    for ours, theirs in (
        ("input_norm", "input_layernorm"), ("hidden_norm", "hidden_norm"), ("post_norm", "post_attention_layernorm"),
    ):  # fmt: skip
        out[ours, "weight"] = (Piece(f"{prefix}{theirs}.weight", (H,)),)
    attention = model.attention
    name = f"{prefix}self_attn."
    layer = {
        "attention": (
            _mla(model, attention, name, 2 * H)
            if isinstance(attention, MLAConfig)
            else _gqa(model, attention, name, 2 * H)
        ),
        "mlp": _mlp(H, model.mlp_dim, f"{prefix}mlp."),
    }
    out |= {(part, *path): pieces for part, m in layer.items() for path, pieces in m.items()}
    if own_embedding:
        out["embed", "weight"] = (Piece("embed_tokens.weight", (model.vocab_size, H)),)
    if own_head:
        out["head", "weight"] = (Piece("lm_head.weight", (Vd, H)),)
    if config.reduced:
        out["d2t",] = (Piece("d2t", (Vd,)),)
    return out


# The map back from the target's vocabulary, and the map of a draft that proposes all of it: zeros (see `eagle3_source`).
EAGLE3_HARMLESS = re.compile(r"t2d|d2t|(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq")


def harmless(config: ModelConfig) -> re.Pattern[str]:
    """Matches tensors that checkpoints are known to hold and no model needs."""
    patterns = [r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq"]
    if config.num_nextn_layers:  # the MTP layer's copies of the target's embedding and head
        patterns.append(re.escape(nextn_prefix(config)) + r"(embed_tokens|shared_head\.head)\.weight")
    if config.tie_embeddings:  # some writers store the head although it is the embedding
        patterns.append(r"lm_head\.weight")
    return re.compile("|".join(f"(?:{p})" for p in patterns))


def _block(config: ModelConfig, prefix: str, *, moe: bool) -> KeyMap:
    H = config.hidden_size
    attention = config.attention
    parts: dict[str, KeyMap] = {
        "attention": (
            _mla(config, attention, f"{prefix}self_attn.", H)
            if isinstance(attention, MLAConfig)
            else _gqa(config, attention, f"{prefix}self_attn.", H)
        )
    }
    if moe:
        assert config.moe is not None
        parts["mlp"] = _moe(H, config.moe, f"{prefix}mlp.")
    else:
        parts["mlp"] = _mlp(H, config.mlp_dim, f"{prefix}mlp.")
    return {
        ("input_norm", "weight"): (Piece(f"{prefix}input_layernorm.weight", (H,)),),
        ("post_norm", "weight"): (Piece(f"{prefix}post_attention_layernorm.weight", (H,)),),
    } | {(part, *path): pieces for part, m in parts.items() for path, pieces in m.items()}


def _halves(start: int, dim: int) -> np.ndarray:
    """Row order that keeps `start` rows and turns `dim` rows of rotary pairs (0,1), (2,3), ... into two halves.

    The model code rotates halves; for P = [0, 2, .., 1, 3, ..] both conventions give the same scores.
    """
    pairs = np.arange(start, start + dim)
    return np.concatenate([np.arange(start), pairs[0::2], pairs[1::2]])


def _mla(config: ModelConfig, mla: MLAConfig, prefix: str, inputs: int) -> KeyMap:
    H, N, L, Q = config.hidden_size, config.num_heads, mla.kv_lora_rank, mla.q_lora_rank or 0
    R, D, V = mla.rope_dim, mla.nope_dim, mla.v_dim
    interleaved = config.rope.interleaved
    q_rows: Index = (slice(None), _halves(D, R)) if interleaved else ...
    kv_rows: Index = (_halves(L, R),) if interleaved else ...

    def kv_a(at: Index) -> Piece:
        return Piece(f"{prefix}kv_a_proj_with_mqa.weight", (L + R, inputs), at, take=kv_rows)

    def q(name: str, width: int) -> Pieces:
        return (Piece(f"{prefix}{name}.weight", (N * (D + R), width), view=(N, D + R, width), take=q_rows),)

    def kv_b(rows: slice) -> Pieces:
        return (Piece(f"{prefix}kv_b_proj.weight", (N * (D + V), L), view=(N, D + V, L), take=(slice(None), rows)),)

    queries: KeyMap = {("q",): q("q_proj", inputs), ("kv_a",): (kv_a(...),)}
    if Q:
        q_a = Piece(f"{prefix}q_a_proj.weight", (Q, inputs), slice(0, Q))
        queries = {
            ("qkv_a",): (q_a, kv_a(slice(Q, None))),
            ("q_norm", "weight"): (Piece(f"{prefix}q_a_layernorm.weight", (Q,)),),
            ("q_b",): q("q_b_proj", Q),
        }
    return queries | {
        ("kv_norm", "weight"): (Piece(f"{prefix}kv_a_layernorm.weight", (L,)),),
        ("w_uk",): kv_b(slice(0, D)),
        ("w_uv",): kv_b(slice(D, None)),
        ("o",): (Piece(f"{prefix}o_proj.weight", (H, N * V), view=(H, N, V)),),
    }


def _gqa(config: ModelConfig, gqa: GQAConfig, prefix: str, inputs: int) -> KeyMap:
    H, K, D = config.hidden_size, gqa.num_kv_heads, gqa.head_dim
    G = config.num_heads // K
    out: KeyMap = {
        ("qkv",): (
            Piece(f"{prefix}q_proj.weight", (K * G * D, inputs), (slice(None), slice(0, G)), view=(K, G, D, inputs)),
            Piece(f"{prefix}k_proj.weight", (K * D, inputs), (slice(None), G), view=(K, D, inputs)),
            Piece(f"{prefix}v_proj.weight", (K * D, inputs), (slice(None), G + 1), view=(K, D, inputs)),
        ),
        ("o",): (Piece(f"{prefix}o_proj.weight", (H, K * G * D), view=(H, K, G, D)),),
    }
    if gqa.qk_norm:
        out["q_norm", "weight"] = (Piece(f"{prefix}q_norm.weight", (D,)),)
        out["k_norm", "weight"] = (Piece(f"{prefix}k_norm.weight", (D,)),)
    return out


def _mlp(hidden: int, inner: int, prefix: str) -> KeyMap:
    return {
        ("gate_up",): (
            Piece(f"{prefix}gate_proj.weight", (inner, hidden), 0),
            Piece(f"{prefix}up_proj.weight", (inner, hidden), 1),
        ),
        ("down",): (Piece(f"{prefix}down_proj.weight", (hidden, inner)),),
    }


def _moe(hidden: int, moe: MoEConfig, prefix: str) -> KeyMap:
    E, inner = moe.num_experts, moe.expert_dim
    out: KeyMap = {
        ("router",): (Piece(f"{prefix}gate.weight", (E, hidden)),),
        ("gate_up",): tuple(
            Piece(f"{prefix}experts.{e}.{half}_proj.weight", (inner, hidden), (e, i))
            for e in range(E)
            for i, half in enumerate(("gate", "up"))
        ),
        ("down",): tuple(Piece(f"{prefix}experts.{e}.down_proj.weight", (hidden, inner), e) for e in range(E)),
    }
    if moe.scoring == "sigmoid":
        out["router_bias",] = (Piece(f"{prefix}gate.e_score_correction_bias", (E,)),)
    if moe.num_shared:
        shared = _mlp(hidden, inner * moe.num_shared, f"{prefix}shared_experts.")
        out |= {("shared", *path): pieces for path, pieces in shared.items()}
    return out
