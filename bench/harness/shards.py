"""Writes a sharded safetensors checkpoint that need not fit in memory: weights are made while their shard is written.

The format (https://huggingface.co/docs/safetensors, "Format") is in `jaxspec.loading.safetensors_reader`.
"""

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import RawIOBase
from pathlib import Path

import numpy as np

from jaxspec.loading.hf_folder import INDEX
from jaxspec.loading.safetensors_reader import DTYPES


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in a shard's header; `dtype` is a key of `DTYPES`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


# The tensors that a weight is stored as, by their names: one, or codes and scales.
Weight = Mapping[str, Tensor]


def write_checkpoint(
    folder: Path,
    weights: Mapping[str, Weight],
    make: Callable[[str], Mapping[str, np.ndarray]],
    *,
    shard_bytes: int,
    threads: int = 1,
) -> int:
    """Writes shards of about `shard_bytes` and their index, and returns the bytes of all tensors.

    Args:
        make: gives the tensors of a weight, with the bytes of their dtypes; called once for each weight, from any thread.
        threads: shards written at once.
    """
    shards = split_shards(weights, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda file, shard: _write_shard(folder / file, shard, make), files, shards))
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in _tensors(shard)}
    size = sum(map(_nbytes, weights.values()))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return size


def split_shards(weights: Mapping[str, Weight], shard_bytes: int) -> list[dict[str, Weight]]:
    """In order; a shard has at most `shard_bytes`, or one weight."""
    shards: list[dict[str, Weight]] = [{}]
    filled = 0
    for name, weight in weights.items():
        if shards[-1] and filled + _nbytes(weight) > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = weight
        filled += _nbytes(weight)
    return shards


def _nbytes(weight: Weight) -> int:
    return sum(tensor.nbytes for tensor in weight.values())


def _tensors(shard: Mapping[str, Weight]) -> dict[str, Tensor]:
    return {name: tensor for weight in shard.values() for name, tensor in weight.items()}


def _write_shard(path: Path, shard: Mapping[str, Weight], make: Callable[[str], Mapping[str, np.ndarray]]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in _tensors(shard).items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, weight in shard.items():
            _write_weight(f, weight, make(name))


def _write_weight(f: RawIOBase, weight: Weight, made: Mapping[str, np.ndarray]) -> None:
    for name, tensor in weight.items():
        data = np.ascontiguousarray(made[name]).reshape(-1).view(np.uint8).data
        assert len(data) == tensor.nbytes, name
        while data:  # one write is at most 2 GiB
            data = data[f.write(data) :]
