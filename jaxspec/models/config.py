"""The configuration of a model: its sizes and one spec per layer. Each family reads it from `config.json`.

A layer is an attention spec and an MLP spec. A spec builds its module and maps its parameters to checkpoint tensors, so
no other code depends on the kinds that exist.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from jaxspec.models.keymap import KeyMap

if TYPE_CHECKING:
    from jaxspec.models.attention import Attention
    from jaxspec.models.layers import ResidualMLP
    from jaxspec.models.params import Declare


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding over `dim` dimensions. `kind` other than "default" rescales the frequencies.

    "none" turns nothing, whatever the position (NoPE): columns that other models rotate are there all the same.

    Attributes:
        interleaved: the checkpoint pairs dimensions (0,1), (2,3), ... (GPT-J style). Key maps permute such rows once, so
            that all model code rotates halves.
        factor, original_max_position, beta_fast, beta_slow, mscale, mscale_all_dim: YaRN (arXiv 2309.00071), with
            DeepSeek's two temperature factors. `factor` also serves kinds "linear" and "llama3".
        truncate: YaRN's band of interpolated dimensions ends at whole numbers (false in gpt-oss).
        low_freq_factor, high_freq_factor: kind "llama3".
        factors: kind "longrope" (arXiv 2402.13753), a divisor of each frequency.
    """

    dim: int
    theta: float
    kind: Literal["default", "linear", "yarn", "llama3", "longrope", "none"] = "default"
    interleaved: bool = False
    factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    factors: tuple[float, ...] = ()
    truncate: bool = True


class AttentionSpec(Protocol):
    """One kind of attention with its sizes: `MLASpec`, `GQASpec`."""

    @property
    def rope(self) -> RopeConfig | None:
        """The rotary embedding of queries and keys, or None. Layers with equal ones share its tables."""
        ...

    def build(self, hidden: int, declare: "Declare", *, input_dim: int | None = None) -> "Attention":
        """The module. `input_dim` where its input is not `hidden` wide (EAGLE3 drafts read two hidden states)."""
        ...

    def key_map(self, prefix: str, hidden: int, *, input_dim: int | None = None) -> KeyMap:
        """The module's parameters in checkpoints that store it under `prefix`."""
        ...


class MLPSpec(Protocol):
    """One kind of MLP with its sizes: `DenseSpec`, `MoESpec`."""

    def build(self, hidden: int, declare: "Declare") -> "ResidualMLP": ...

    def key_map(self, prefix: str, hidden: int) -> KeyMap: ...


@dataclass(frozen=True)
class LayerSpec:
    """x + attention(norm x), then x + mlp(norm x)."""

    attention: AttentionSpec
    mlp: MLPSpec


class Published(NamedTuple):
    """What people know an architecture by.

    Attributes:
        models: published models of it.
        mtp: whether its checkpoints may bring a NextN (MTP) layer, which drafts for them.
        note: a limit of what is supported.
    """

    models: str
    mtp: bool = False
    note: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """A decoder-only language model.

    Attributes:
        architecture: from `architectures` in config.json; it selects the family (see `registry`).
        layers, nextn_layers: specs of the decoder's layers, and of the NextN (MTP) layers in its checkpoints.
        index_topk: keys that sparse attention chooses for a query. With at most so many cached tokens it chooses all of
            them, and its layers may be dense (see `sparse_mla.for_contexts`).
        centred_norms: norms multiply by 1 + weight, in float32, and round once; others round, then multiply by the weight.
        embed_scale, logit_scale: factors of the embeddings, and of the hidden states that the head reads.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    rms_norm_eps: float
    max_position: int
    layers: tuple[LayerSpec, ...]
    nextn_layers: tuple[LayerSpec, ...] = ()
    tie_embeddings: bool = False
    dtype: str = "bfloat16"
    eos_token_ids: tuple[int, ...] = ()
    index_topk: int | None = None
    centred_norms: bool = False
    embed_scale: float = 1.0
    logit_scale: float = 1.0

    @property
    def num_layers(self) -> int:
        return len(self.layers)
