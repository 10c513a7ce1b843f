"""Reads a folder's weights under the names that key maps know, quantised ones too."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from jaxspec.loading.dequantise import dequantise
from jaxspec.loading.safetensors_reader import SafetensorsReader, TensorInfo
from jaxspec.loading.stored import StoredWeight, find_quantised


class WeightReader:
    """All tensors of a folder's shards; those that make up a quantised weight are one.

    Attributes:
        files: the shards, in name order.
        tensors: name -> where it is; a quantised weight has the shape that it stands for, and the bytes of all its parts.
        quantised: the quantised weights among them.

    Raises:
        ModelFormatError: for all that `SafetensorsReader` and `find_quantised` refuse.
    """

    def __init__(self, folder: Path):
        self._reader = SafetensorsReader(folder)
        self.files = self._reader.files
        stored = self._reader.tensors
        self.quantised: dict[str, StoredWeight] = find_quantised(stored)
        self.tensors: dict[str, TensorInfo] = dict(stored)
        for name, weight in self.quantised.items():
            parts = [self.tensors.pop(part) for part in (weight.codes, weight.scale, *weight.unread)]
            self.tensors[name] = replace(parts[0], shape=weight.shape, nbytes=sum(part.nbytes for part in parts))

    def read(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """One tensor, in its stored dtype; quantised ones in bfloat16. For any number of threads.

        Args:
            into: C-contiguous, of the tensor's size in any shape: it is filled and returned if it has the dtype.

        Raises:
            ModelFormatError: a dtype that is not supported, or a file that is not what it was.
        """
        if name not in self.quantised:
            return self._reader.read(name, into)
        return dequantise(self.read_codes(name), self.read_scale(name), self.quantised[name].scheme, into)

    def read_codes(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """The codes of a quantised weight, [out, in]. `into` as in `read`."""
        return self.quantised[name].read_codes(self._reader.read, into)

    def read_scale(self, name: str, _into: np.ndarray | None = None) -> np.ndarray:
        """The scale of each of its blocks, [blocks of out, blocks of in]."""
        return self.quantised[name].read_scale(self._reader.read)
