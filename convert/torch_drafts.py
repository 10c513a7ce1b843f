"""PyTorch references of drafts: what a draft reads and says after each new token of a text.

Nothing is cached. All drafts of a text are rows of one sequence, and a mask says which rows each of them sees; every draft
step runs over all rows anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from convert.torch_eagle3 import TorchEagle3
from convert.torch_parts import TargetEnds, stored_tensors
from jaxspec.errors import JaxspecError


@dataclass(frozen=True)
class DraftChoice:
    """Which draft PyTorch runs: that of an EAGLE3 folder, or with None the MTP layer of the target; and how many steps."""

    folder: Path | None
    steps: int


@dataclass(frozen=True)
class DraftRun:
    """What a draft says in k steps after each of a text's N new tokens.

    Attributes:
        ids: int32 [N, k], the likeliest at each step.
        inputs: float32 [T, H], what it reads of the target at each token that was fed.
        hidden: float32 [N, k, H]: what its head and its next step read.
        logits: float32 [N, k, V]; -inf for tokens that it cannot propose. None in a record of tokens only, as the other two.
    """

    ids: np.ndarray
    inputs: np.ndarray | None = None
    hidden: np.ndarray | None = None
    logits: np.ndarray | None = None


class TorchDraft(Protocol):
    """A draft in PyTorch. Tensors have no batch axis: X rows, which are tokens of one text or drafts after them."""

    def inputs(self, hidden: Any, streams: Any) -> Any:
        """[T, H] of the target's final-normed hidden states [T, H] and its residual streams [layers + 1, T, H]."""
        ...

    def embed(self, ids: Any) -> Any:
        """[X, H] of ids [X]."""
        ...

    def layer(self, embedded: Any, x: Any, positions: Any, visible: Any) -> Any:
        """Hidden states [X, H], of embeddings and inputs [X, H], positions [X] and a mask [X, X] of what each row sees."""
        ...

    def logits(self, hidden: Any) -> Any:
        """[X, V] over the target's vocabulary."""
        ...


def torch_draft(target: Any, target_folder: Path, draft: Path | None) -> TorchDraft:
    """The reference of a draft.

    Args:
        target: the Hugging Face module of the text model.
        draft: the Hugging Face folder of an EAGLE3 head; None for the target's MTP layer.

    Raises:
        JaxspecError: there is no such draft, or no reference for its kind.
    """
    return TorchNextN(target, target_folder) if draft is None else TorchEagle3(target, draft)


def run_draft(draft: TorchDraft, ids: Sequence[int], hidden: Any, streams: Any, *, first: int, steps: int) -> DraftRun:
    """What a draft says after each token of ids [T + 1] from `first` + 1 on.

    Row i of the draft is the pair of token i + 1 and the target's hidden state i, at position i.

    Args:
        hidden: the target's final-normed hidden states [T, H] of all ids but the last.
        streams: its residual streams [layers + 1, T, H].
    """
    import torch

    with torch.no_grad():
        x = read = draft.inputs(hidden, streams)
        embedded = draft.embed(torch.tensor(ids[1:]))
        positions, visible = torch.arange(len(x)), torch.ones(len(x), len(x), dtype=torch.bool).tril()
        N = len(x) - first
        said: list[Any] = []
        logits: list[Any] = []
        for i in range(steps):
            said.append(draft.layer(embedded, x, positions, visible)[-N:])
            logits.append(draft.logits(said[-1]))
            if i + 1 < steps:  # each of the newest rows goes on: its next row sees what it saw, and itself
                x = torch.cat([x, said[-1]])
                embedded = torch.cat([embedded, draft.embed(logits[-1].argmax(dim=-1))])
                positions = torch.cat([positions, positions[-N:] + 1])
                above = torch.cat([visible, torch.zeros(len(visible), N, dtype=torch.bool)], dim=1)
                below = torch.cat([visible[-N:], torch.eye(N, dtype=torch.bool)], dim=1)
                visible = torch.cat([above, below])
        each = torch.stack(logits, dim=1).float().numpy()
        hidden_NkH = torch.stack(said, dim=1).float().numpy()
        return DraftRun(each.argmax(axis=-1).astype(np.int32), read.float().numpy(), hidden_NkH, each)


# Modules of transformers' MTP layer in checkpoints of Qwen3.5 and Qwen3-Next.
_QWEN3_5_NAMES = {
    "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc", "mtp_block": "layers.0",
    "post_norm": "norm",
}  # fmt: skip


class TorchNextN:
    """The first NextN (MTP) layer of a checkpoint in transformers' class."""

    def __init__(self, target: Any, folder: Path):
        try:
            from transformers.modeling_layers import MtpModel
        except ImportError as e:
            raise JaxspecError("the reference of MTP layers needs transformers 5.23 or newer") from e
        config = target.config
        own_names = config.model_type.startswith(("qwen3_5", "qwen3_next"))
        prefix = "mtp." if own_names else f"model.layers.{config.num_hidden_layers}."
        source = stored_tensors(folder, prefix)
        if not source:
            raise JaxspecError(
                f"{folder} has no NextN (MTP) layer to compare with; name an EAGLE3 draft with --speculative-model"
            )
        # Where configurations list the kind of each layer, the class wants to know that of this one.
        config.mtp_layer_types = ["full_attention" if own_names else "indexed_attention"]
        config.mtp_mlp_layer_types = ["sparse"]
        config.num_mtp_layers = 1
        self._model, self._target = target, TargetEnds(target)
        self._layer = MtpModel(target, 1).eval().layers[0]
        state = self._layer.state_dict()
        try:
            self._layer.load_state_dict({name: _nextn_tensor(name, source, value) for name, value in state.items()})
        except KeyError as e:
            raise JaxspecError(f"{folder}: PyTorch's MTP layer needs the tensor {prefix}{e.args[0]}") from e
        self.embed, self.logits = self._target.embed, self._target.logits

    def inputs(self, hidden: Any, streams: Any) -> Any:  # noqa: ARG002
        return hidden

    def layer(self, embedded: Any, x: Any, positions: Any, visible: Any) -> Any:
        import torch

        layer, positions = self._layer, positions[None]
        x = layer.eh_proj(torch.cat([layer.enorm(embedded), layer.hnorm(x)], dim=-1))[None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(x.dtype).min)[None, None]
        rope = self._model.model.rotary_emb(x, positions)
        out = layer.mtp_block(x, attention_mask=mask, position_ids=positions, position_embeddings=rope)
        return layer.post_norm(out[0] if isinstance(out, tuple) else out)[0]


def _nextn_tensor(name: str, source: Mapping[str, Any], like: Any) -> Any:
    """One tensor of transformers' MTP layer, from those of a checkpoint, where experts are not stacked."""
    import torch

    hub = name.removeprefix("mtp_block.")
    if "fc.weight" in source:  # Qwen3.5
        module, _, inner = name.partition(".")
        hub = f"{_QWEN3_5_NAMES[module]}.{inner}"
    if hub in source:
        return source[hub]
    if hub == "post_norm.weight":
        return source["shared_head.norm.weight"]
    part, _, kind = hub.rpartition("experts.")
    if kind == "gate_up_proj":
        each = [[source[f"{part}experts.{e}.{k}_proj.weight"] for k in ("gate", "up")] for e in range(len(like))]
        return torch.stack([torch.cat(pair) for pair in each])
    if kind == "down_proj":
        return torch.stack([source[f"{part}experts.{e}.down_proj.weight"] for e in range(len(like))])
    return source[hub]
