"""Writes a sharded safetensors checkpoint that need not fit in memory: tensors are made while their shard is written.

The format (https://huggingface.co/docs/safetensors, "Format") is in `jaxspec.loading.safetensors_reader`.
"""

import json
import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jaxspec.loading.hf_folder import INDEX

_ITEM_BYTES = {"BF16": 2, "F32": 4}


@dataclass(frozen=True)
class Tensor:
    """A tensor's entry in a shard's header; `dtype` "BF16" or "F32"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


def write_checkpoint(
    folder: Path,
    tensors: Mapping[str, Tensor],
    make: Callable[[str], np.ndarray],
    *,
    shard_bytes: int,
    threads: int = 1,
) -> int:
    """Writes shards of about `shard_bytes` and their index, and returns the bytes of all tensors.

    Args:
        make: gives the tensor of a name, with the bytes of its dtype; called once for each name, from any thread.
        threads: shards written at once.
    """
    shards = split_shards(tensors, shard_bytes)
    files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda file, shard: _write_shard(folder / file, shard, make), files, shards))
    size = sum(tensor.nbytes for tensor in tensors.values())
    weight_map = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}))
    return size


def split_shards(tensors: Mapping[str, Tensor], shard_bytes: int) -> list[dict[str, Tensor]]:
    """In order; a shard has at most `shard_bytes`, or one tensor."""
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in tensors.items():
        if shards[-1] and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    return shards


def _write_shard(path: Path, tensors: Mapping[str, Tensor], make: Callable[[str], np.ndarray]) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            data = np.ascontiguousarray(make(name)).reshape(-1).view(np.uint8).data
            assert len(data) == tensor.nbytes, name
            while data:  # one write is at most 2 GiB
                data = data[f.write(data) :]
