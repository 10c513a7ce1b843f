"""Reads the tensors of a Hugging Face folder one at a time.

The format (https://huggingface.co/docs/safetensors, "Format"): eight bytes with the header's length, a JSON header of
name -> dtype, shape, byte range, then the bytes. The safetensors library maps whole shards into memory; here every
tensor is read with plain reads into its own buffer, so that only the tensors in use are in memory.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import ModelFormatError, plain, shown
from jaxspec.loading.hf_folder import INDEX, weight_files

# The limit of the safetensors library itself.
MAX_HEADER_BYTES = 100_000_000
FP8 = "F8_E4M3"
# Of one tensor: its name, its dtype's name, its axes, and each number of its entry. None of them is near these.
_MAX_NAME, _MAX_DTYPE, _MAX_AXES, _MAX_BYTES = 512, 16, 16, 2**63

DTYPES: dict[str, Any] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    FP8: np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I32": np.dtype(np.int32),  # eight codes of four bits
    "U8": np.dtype(np.uint8),  # two codes, or an exponent
    "I64": np.dtype(np.int64),  # d2t of EAGLE3 drafts
    "BOOL": np.dtype(np.bool_),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor is: `nbytes` bytes from offset `start` of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    nbytes: int


class SafetensorsReader:
    """All tensors of a folder's shards, as they are stored.

    Attributes:
        files: the shards, in name order.
        tensors: name -> where it is.

    Raises:
        ModelFormatError: for all that `weight_files` refuses; a damaged or truncated shard; a tensor that two shards
            hold; an index that does not agree with the shards.
    """

    def __init__(self, folder: Path):
        self.files, weight_map = weight_files(folder)
        self.tensors: dict[str, TensorInfo] = {}
        for file in self.files:
            for name, info in read_header(file).items():
                if name in self.tensors:
                    raise ModelFormatError(f"tensor {name} is in both {self.tensors[name].file.name} and {file.name}")
                self.tensors[name] = info
        for name, file_name in weight_map.items():
            if name not in self.tensors or self.tensors[name].file.name != file_name:
                raise ModelFormatError(
                    f"{folder / INDEX} places tensor {plain(name)} in {file_name}, which does not hold it"
                )

    def read(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """One tensor, in its stored dtype. For any number of threads.

        Args:
            into: C-contiguous, of the tensor's size in any shape: it is filled and returned if it has the dtype.

        Raises:
            ModelFormatError: a dtype that is not supported, or a file that is not what it was.
        """
        return _read(name, self.tensors[name], into)


def check_dtype(name: str, info: TensorInfo) -> None:
    if info.dtype not in DTYPES:
        raise ModelFormatError(f"tensor {name} has dtype {info.dtype} (supported: {', '.join(DTYPES)})")


def _read(name: str, info: TensorInfo, into: np.ndarray | None = None) -> np.ndarray:
    check_dtype(name, info)
    dtype = DTYPES[info.dtype]
    out = np.empty(info.shape, dtype) if into is None or into.dtype != dtype else into
    buffer = out.reshape(-1).view(np.uint8)
    try:
        with info.file.open("rb", buffering=0) as f:
            f.seek(info.start)
            done = 0
            while done < info.nbytes:  # one read returns at most 2 GiB
                count = f.readinto(buffer[done:].data)
                if not count:
                    raise ModelFormatError(f"{info.file} ended inside tensor {name}")
                done += count
    except OSError as e:
        raise ModelFormatError(f"{info.file} cannot be read at tensor {name}: {e.strerror or e}") from e
    return out


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors of one shard, checked against the format and the file's size."""
    try:
        return _read_header(file)
    except OSError as e:
        raise ModelFormatError(f"{file} cannot be read: {e.strerror or e}") from e


def _read_header(file: Path) -> dict[str, TensorInfo]:
    size = file.stat().st_size
    with file.open("rb") as f:
        prefix = f.read(8)
        if len(prefix) < 8:
            raise _damaged(file, "it is shorter than a header")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER_BYTES:
            raise _damaged(file, f"its header claims {length} bytes (limit {MAX_HEADER_BYTES})")
        if 8 + length > size:
            raise _damaged(file, f"its header claims {length} bytes and the file has {size}")
        try:
            header = json.loads(f.read(length), object_pairs_hook=_unique)
        except (ValueError, RecursionError) as e:
            raise _damaged(file, f"its header is not valid JSON: {str(e)[:200]}") from e
    if not isinstance(header, dict):
        raise _damaged(file, "its header is not a JSON object")
    header.pop("__metadata__", None)
    tensors = {name: _tensor(file, name, entry, 8 + length) for name, entry in header.items()}
    _check_layout(file, tensors, 8 + length, size)
    return tensors


def _unique(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in pairs:
        if key in out:
            raise ValueError(f"{shown(key)} occurs twice")
        out[key] = value
    return out


def _tensor(file: Path, name: str, entry: Any, base: int) -> TensorInfo:
    if len(name) > _MAX_NAME or not name.isprintable():  # errors repeat names
        raise _damaged(file, f"{shown(name)} is not the name of a tensor")
    try:
        dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        sizes = (*shape[: _MAX_AXES + 1], begin, end)
        sound = (
            isinstance(dtype, str)
            and len(dtype) <= _MAX_DTYPE
            and dtype.isprintable()
            and len(shape) <= _MAX_AXES
            and all(type(n) is int and 0 <= n < _MAX_BYTES for n in sizes)
            and begin <= end
        )
    except (TypeError, KeyError, ValueError):
        sound = False
    if not sound:
        raise _damaged(file, f"its entry for tensor {name} is malformed")
    if dtype in DTYPES and math.prod(shape) * DTYPES[dtype].itemsize != end - begin:
        raise _damaged(file, f"tensor {name} is {dtype} {list(shape)} and has {end - begin} bytes")
    return TensorInfo(dtype, shape, file, base + begin, end - begin)


def _check_layout(file: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """The byte ranges must tile the rest of the file, as the format demands: no overlaps, no holes, no bytes left over."""
    end = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            raise _damaged(file, f"tensor {name} does not start where the one before it ends")
        end += info.nbytes
    if end > size:
        raise _damaged(file, f"it is truncated: {size} bytes of {end}")
    if end < size:
        raise _damaged(file, f"it has {size - end} bytes after its last tensor")


def _damaged(file: Path, what: str) -> ModelFormatError:
    return ModelFormatError(f"{file} is not a sound safetensors file: {what}")
