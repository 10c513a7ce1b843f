"""What the PyTorch references of drafts share."""

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.loading.hf_checkpoint import HFCheckpoint
from jaxspec.loading.weight_reader import WeightReader


class TargetEnds:
    """A target's embedding and head, with the scalars that its class applies around them."""

    def __init__(self, target: Any):
        self._model = target

    def embed(self, ids: Any) -> Any:
        return self._model.get_input_embeddings()(ids)

    def logits(self, hidden: Any) -> Any:
        return self._model.get_output_embeddings()(hidden / getattr(self._model.config, "logits_scaling", 1.0))


def stored_tensors(folder: Path, prefix: str = "") -> dict[str, Any]:
    """The tensors of a Hugging Face folder under a prefix, without it; floating ones in float32.

    A quantised weight is what jaxspec takes it for: the float32 products of its codes and scales where a model keeps them,
    and these in bfloat16 where it is dequantised on the way (`HFCheckpoint`).
    """
    import torch

    if not list(folder.glob("*.safetensors")):
        raise JaxspecError(
            f"{folder} has no *.safetensors: PyTorch reads a draft from its Hugging Face folder (--draft-reference)"
        )
    reader = WeightReader(folder)
    kept = _kept(folder) if reader.quantised else frozenset()
    out = {}
    for name in reader.tensors:
        inner = re.sub(r"^(model\.)?language_model\.", r"\1", name)  # of a multimodal model
        if inner.startswith(prefix):
            array = np.array(reader.read(name, dtype=np.float32 if name in kept else ml_dtypes.bfloat16), order="C")
            array = array if array.dtype.kind in "iub" else array.astype(np.float32)
            out[inner.removeprefix(prefix)] = torch.from_numpy(array)
    return out


def is_quantised(folder: Path) -> bool:
    """Whether any weight of a Hugging Face folder is stored quantised, in a format that jaxspec reads."""
    return bool(list(folder.glob("*.safetensors")) and WeightReader(folder).quantised)


def _kept(folder: Path) -> frozenset[str]:
    """The weights whose codes and scales a model keeps."""
    parts = HFCheckpoint(folder).sources.values()
    return frozenset(p.name for part in parts for source in part.values() if source.scheme for p in source.pieces)
