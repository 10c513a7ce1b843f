"""Reads a folder's weights under the names that key maps know, quantised ones too."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import ModelFormatError
from jaxspec.loading.dequantise import dequantise
from jaxspec.loading.quantise import Rounding, Unquantised
from jaxspec.loading.safetensors_reader import SafetensorsReader, TensorInfo
from jaxspec.loading.stored import StoredWeight, find_quantised, of_cache
from pallas_kernels.quant.schemes import Scheme


class WeightReader:
    """All tensors of a folder's shards but scales of KV caches; those that make up a quantised weight are one.

    Attributes:
        files: the shards, in name order.
        tensors: name -> where it is; a quantised weight has the shape that it stands for, and the bytes of all its parts.
        quantised: the quantised weights among them.
        rounding: of those that were quantised while they were read, by name.

    Raises:
        ModelFormatError: for all that `SafetensorsReader` and `find_quantised` refuse.
    """

    def __init__(self, folder: Path):
        self._reader = SafetensorsReader(folder)
        self.files = self._reader.files
        stored = {name: info for name, info in self._reader.tensors.items() if not of_cache(name)}
        self.quantised: dict[str, StoredWeight] = find_quantised(stored)
        self.rounding: dict[str, Rounding] = {}
        self._scales: dict[str, np.ndarray] = {}
        self.tensors: dict[str, TensorInfo] = dict(stored)
        for name, weight in self.quantised.items():
            parts = [self.tensors.pop(part) for part in weight.tensors]
            self.tensors[name] = replace(parts[0], shape=weight.shape, nbytes=sum(part.nbytes for part in parts))

    def quantise(self, names: Iterable[str], scheme: Scheme) -> None:
        """From now on these weights, stored unquantised as [out, in], are read in a scheme.

        Raises:
            ModelFormatError: one has another number of axes, or its inputs are no whole blocks of a scheme that needs that.
        """
        for name in names:
            if name not in self.tensors:  # the check of names says so
                continue
            shape = self.tensors[name].shape
            if len(shape) != 2 or (scheme.rows == 1 and shape[1] % (scheme.columns or 1)):
                raise ModelFormatError(
                    f"tensor {name} of shape {list(shape)} cannot be quantised as {scheme}: it needs outputs and inputs, in "
                    f"groups of {scheme.columns}"
                )
            self.quantised[name] = Unquantised(scheme, name, name, shape, scales=self._scales, rounding=self.rounding)

    def read(self, name: str, into: np.ndarray | None = None, *, dtype: Any = ml_dtypes.bfloat16) -> np.ndarray:
        """One tensor, in its stored dtype; quantised ones in `dtype`. For any number of threads.

        Args:
            into: C-contiguous, of the tensor's size in any shape: it is filled and returned if it has the dtype.

        Raises:
            ModelFormatError: a dtype that is not supported, or a file that is not what it was.
        """
        if name not in self.quantised:
            return self._reader.read(name, into)
        weight = self.quantised[name]
        factor = self.read_factor(name) if weight.factor else None
        codes, scale = weight.read_codes(self._reader.read), weight.read_scale(self._reader.read)
        if not weight.turned:
            return dequantise(codes, scale, weight.scheme, into, factor=factor, dtype=dtype)
        return dequantise(codes, scale, weight.scheme, factor=factor, dtype=dtype).swapaxes(-1, -2)

    def read_codes(self, name: str, into: np.ndarray | None = None) -> np.ndarray:
        """The codes of a quantised weight, with its axes. `into` as in `read`."""
        weight = self.quantised[name]
        codes = weight.read_codes(self._reader.read, into)
        return codes.swapaxes(-1, -2) if weight.turned else codes

    def read_scale(self, name: str, _into: np.ndarray | None = None) -> np.ndarray:
        """The scale of each of its blocks, in the order of the weight's axes."""
        weight = self.quantised[name]
        scale = weight.read_scale(self._reader.read)
        return scale.swapaxes(-1, -2) if weight.turned else scale

    def read_factor(self, name: str, _into: np.ndarray | None = None) -> np.ndarray:
        """The factor of one that has it, a number."""
        return self.quantised[name].read_factor(self._reader.read)
