"""What the PyTorch references of drafts share."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import JaxspecError
from jaxspec.loading.safetensors_reader import SafetensorsReader


class TargetEnds:
    """A target's embedding and head, with the scalars that its class applies around them."""

    def __init__(self, target: Any):
        self._model = target

    def embed(self, ids: Any) -> Any:
        return self._model.get_input_embeddings()(ids)

    def logits(self, hidden: Any) -> Any:
        return self._model.get_output_embeddings()(hidden / getattr(self._model.config, "logits_scaling", 1.0))


def stored_tensors(folder: Path, prefix: str) -> dict[str, Any]:
    """The tensors of a Hugging Face folder under a prefix, without it; floating ones in float32."""
    import torch

    if not list(folder.glob("*.safetensors")):
        raise JaxspecError(
            f"{folder} has no *.safetensors: PyTorch reads a draft from its Hugging Face folder (--draft-reference)"
        )
    reader = SafetensorsReader(folder)
    out = {}
    for name in reader.tensors:
        inner = name.removeprefix("language_model.")  # of a multimodal model
        if inner.startswith(prefix):
            array = np.array(reader.read(name))
            array = array if array.dtype.kind in "iub" else array.astype(np.float32)
            out[inner.removeprefix(prefix)] = torch.from_numpy(array)
    return out
