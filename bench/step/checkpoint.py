"""The random checkpoints of `bench step_vllm make`: Hugging Face layout, unquantised or as quantised models are published."""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bench.harness.models import random_config
from bench.harness.published import Published
from bench.harness.shards import Tensor, Weight, write_checkpoint
from bench.harness.vocabulary import write_tokenizer
from jaxspec.models.mtp import nextn_prefix
from jaxspec.models.registry import family_of, read_config

# Shards are written by a thread each, so there should be about as many as threads.
SHARD_BYTES, THREADS = 2**30, 16
STD = 0.02

# What vLLM and transformers need in a config.json besides the sizes.
HF_CONFIG: dict[str, Any] = {
    "torch_dtype": "bfloat16", "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


def checkpoint_config(model: str, layers: int | None = None, *, mtp: bool = True) -> dict[str, Any]:
    """The config.json of one of `bench.harness.shapes.SHAPES`, unquantised.

    Args:
        mtp: with the MTP layer that the shape has.
    """
    hf = HF_CONFIG | random_config(model, layers)
    without = {} if mtp or "num_nextn_predict_layers" not in hf else {"num_nextn_predict_layers": 0}
    return {"num_key_value_heads": hf["num_attention_heads"]} | hf | without


def stored_weights(hf: dict[str, Any], published: Published | None = None) -> dict[str, Weight]:
    """All weights of a model, by the names under which an unquantised checkpoint has them, and what they are stored as."""
    out: dict[str, Weight] = {}
    for name, shape in _shapes(hf).items():
        if published and published.names.fullmatch(name):
            rows, columns = shape
            out[name] = published.tensors(name, (rows, columns))
        else:
            out[name] = {name: Tensor("F32" if _in_float32(name) else "BF16", shape)}
    return out


def make(folder: Path, hf: dict[str, Any], published: Published | None = None, *, seed: int = 0) -> int:
    """Writes the checkpoint and returns its bytes.

    Weights are drawn in bfloat16 on jax's default device, one after the other in each thread, with the same bits for one
    seed and device; those that `published` names are quantised at once. Neither the disk nor the host holds an unquantised
    copy of more than the weights that are being written.
    """
    shapes, copies, key = _shapes(hf), _copies(hf), jax.random.key(seed, impl="rbg")
    number = {name: i for i, name in enumerate(shapes)}
    centred = read_config(hf).centred_norms

    def draw(name: str) -> dict[str, np.ndarray]:
        if "norm" in name:
            # Centred ones add 1; that of what linear attention reads is never centred.
            weight = 0 if centred and ".linear_attn." not in name else 1
            return {name: np.full(shapes[name], weight, jnp.bfloat16)}
        if "bias" in name:
            return {name: np.zeros(shapes[name], np.float32 if _in_float32(name) else jnp.bfloat16)}
        source, std = copies.get(name, name), 1.0 if "embed" in name else STD
        if published and published.names.fullmatch(name):
            return published.quantise(name, np.asarray(_normal(shapes[name], std, jnp.float32)(key, number[source])))
        return {name: np.asarray(_normal(shapes[name], std, jnp.bfloat16)(key, number[source]))}

    folder.mkdir(parents=True, exist_ok=True)
    of_weights = {"quantization_config": published.config} if published else {}
    (folder / "config.json").write_text(json.dumps(hf | of_weights, indent=1))
    write_tokenizer(folder, hf["vocab_size"])
    threads = min(THREADS, os.cpu_count() or 1)
    return write_checkpoint(folder, stored_weights(hf, published), draw, shard_bytes=SHARD_BYTES, threads=threads)


def _copies(hf: dict[str, Any]) -> dict[str, str]:
    """What the MTP layer has of the model's own weights, and which."""
    nextn = nextn_prefix(read_config(hf))
    if not any(name.startswith(nextn) for name in _own_shapes(hf)):
        return {}  # none, or layers under other names, which share the model's own
    return {
        f"{nextn}embed_tokens.weight": "model.embed_tokens.weight",
        f"{nextn}shared_head.head.weight": "lm_head.weight",
    }


def _shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    shapes = _own_shapes(hf)
    return shapes | {name: shapes[source] for name, source in _copies(hf).items()}


def _own_shapes(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    config = read_config(hf)
    family = family_of(config)
    maps = [family.key_map(config), *([family.nextn_key_map(config)] if config.nextn_layers else [])]
    return {piece.name: piece.shape for m in maps for group in m.values() for piece in group}


def _in_float32(name: str) -> bool:
    return "e_score_correction_bias" in name


@functools.lru_cache
def _normal(shape: tuple[int, ...], std: float, dtype: Any) -> Callable[[Any, int], jax.Array]:
    """(key, number of the tensor) -> N(0, std) in bfloat16, held in `dtype`; compiled once for all tensors of a shape."""

    def draw(key: Any, number: int) -> jax.Array:
        value = std * jax.random.normal(jax.random.fold_in(key, number), shape, jnp.float32)
        # Not a cast to bfloat16 and back, which XLA may leave out.
        return jax.lax.reduce_precision(value, exponent_bits=8, mantissa_bits=7).astype(dtype)

    return jax.jit(draw)
