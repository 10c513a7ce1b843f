"""EAGLE3 drafts (arXiv 2503.01840): one decoder layer over fused hidden states of the target.

Formulas and names are those of the published heads, `LlamaForCausalLMEagle3` and `Eagle3DeepseekV2ForCausalLM`:

    x      = fc(concat of the captured residual streams)      once; later draft steps read the draft's own y
    a      = concat(input_norm(embedding), hidden_norm(x))    twice the hidden size, embedding first
    z      = x + attention(a);  y = z + mlp(post_norm(z));  logits = head(norm(y))

Variants, each an option of its own: `norm_before_fc` norms what is captured as a whole, `fc_norm` each stream by itself
(EAGLE3.1); `norm_before_residual` adds attention to hidden_norm(x) instead of x (heads of the "speculators" library);
`norm_output` hands norm(y) to the next draft step instead of y (EAGLE3.1).
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.errors import ConfigError, ModelFormatError, shown
from jaxspec.models import deepseek, llama
from jaxspec.models.attention import Attention
from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.config import AttentionSpec, LayerSpec, ModelConfig
from jaxspec.models.decoder import CausalLM, Embedding, logits_at
from jaxspec.models.fields import flag, require, section, text_list, text_or, whole_list, whole_or
from jaxspec.models.hf_fields import MAX_LAYERS, MAX_SIZE, MAX_VOCAB, common_fields, norm_eps, size
from jaxspec.models.keymap import KeyMap, Piece, nested, norm_weight
from jaxspec.models.layers import Attended, DenseSpec, ResidualMLP, RMSNorm, RopeTables, rope_tables
from jaxspec.models.metadata import LiveRows, StepMetadata
from jaxspec.models.params import Declare
from pallas_kernels.norm_linear.reference import rms_norm
from pallas_kernels.quant.reference import linear


def _read_mla(hf: Mapping[str, Any]) -> AttentionSpec:
    # The heads' training code builds the latent norms with the model's eps, unlike the targets' model files.
    return replace(deepseek.read_attention(hf), latent_norm_eps=norm_eps(hf))


# How the attention of each kind of head is read.
READERS: dict[str, Callable[[Mapping[str, Any]], AttentionSpec]] = {
    "LlamaForCausalLMEagle3": llama.read_attention,
    "Eagle3LlamaForCausalLM": llama.read_attention,
    # Named after their targets, and Llama layers all the same.
    "Eagle3MiniMaxM2ForCausalLM": llama.read_attention,
    "Eagle3Qwen3ForCausalLM": llama.read_attention,
    "Eagle3DeepseekV2ForCausalLM": _read_mla,
    "Eagle3DeepseekV3ForCausalLM": _read_mla,
}
# The paper's own heads are named like a model; that they propose a part of the vocabulary tells them from one.
_UNNAMED, _OF_DRAFTS = llama.LLAMA, "draft_vocab_size"
# Options of other heads that would change the formulas above, with the values that do not.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "logit_scale": (1, 1.0), "use_aux_hidden_state": (True,), "num_aux_hidden_states": (3,),
}  # fmt: skip
# The layers of heads in the layout of the "speculators" library, by the type that its configuration nests.
_SPECULATORS_LAYERS = {"llama": "LlamaForCausalLMEagle3"}
_SPECULATORS = "speculators_model_type"
# Layers of the target that a head may read; published ones read 3.
_MAX_CAPTURED = 64


@dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE3 head.

    Attributes:
        model: sizes of its one layer; the vocabulary and the hidden size are the target's.
        draft_vocab_size: tokens that it can propose; d2t maps them to the target's where they are fewer.
        layer_ids: the target layers named by its configuration, in either convention; None where it names none.
        norm_before_fc, fc_norm, norm_before_residual, norm_output: see the module.
    """

    model: ModelConfig
    draft_vocab_size: int
    layer_ids: tuple[int, ...] | None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False

    @property
    def layer(self) -> LayerSpec:
        return self.model.layers[0]

    @property
    def num_captured(self) -> int:
        return 3 if self.layer_ids is None else len(self.layer_ids)

    @property
    def reduced(self) -> bool:
        return self.draft_vocab_size < self.model.vocab_size


def is_eagle3(hf: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of an EAGLE3 head.

    Raises:
        ModelFormatError: its `architectures` are not a list of names.
    """
    return hf.get(_SPECULATORS) == "eagle3" or _architecture(hf) is not None


def _architecture(hf: Mapping[str, Any]) -> str | None:
    """Which of the READERS reads a config.json; None where none does."""
    names = text_list(hf, "architectures")
    if _UNNAMED in names and hf.get(_OF_DRAFTS) is not None:
        return "Eagle3LlamaForCausalLM"
    return next((name for name in names if name in READERS), None)


def _flattened(hf: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of a head in the layout of the "speculators" library as others have it."""
    if hf.get(_SPECULATORS) != "eagle3":
        return hf
    layer, where = section(hf, "transformer_layer_config"), "transformer_layer_config of config.json"
    require(layer, "hidden_size", "vocab_size", where=where)
    kind = text_or(layer, "model_type", "llama", where=where)
    if kind not in _SPECULATORS_LAYERS:
        raise ModelFormatError(
            f"config.json has transformer_layer_config.model_type={shown(kind)}; EAGLE3 drafts in this layout are supported "
            f"with {', '.join(_SPECULATORS_LAYERS)}"
        )
    said = {key: value for key, value in hf.items() if value is not None}
    # Its heads are trained so unless they say otherwise.
    return {**layer, "norm_before_residual": True, **said, "architectures": [_SPECULATORS_LAYERS[kind]]}


def read_eagle3_config(hf: Mapping[str, Any]) -> Eagle3Config:
    """The configuration of an EAGLE3 head's `config.json`.

    Raises:
        ModelFormatError: an option that is not supported, or a value that none of them can have.
    """
    hf = _flattened(hf)
    architecture = _architecture(hf)
    assert architecture is not None, "see `is_eagle3`"
    inner = section(hf, "eagle_config")
    for key, neutral in _NEUTRAL.items():
        value = inner.get(key, hf.get(key))
        if value is not None and value not in neutral:
            raise ModelFormatError(f"config.json has {key}={shown(value)}, which EAGLE3 drafts are not supported with")
    if whole_or(hf, "num_hidden_layers", 1, 1, MAX_LAYERS) != 1:
        raise ModelFormatError(f"config.json has num_hidden_layers={hf['num_hidden_layers']}; EAGLE3 drafts have 1")
    common = common_fields(hf, architecture)
    # Configurations derived from a mixture of experts may keep its keys; the layer is dense all the same.
    layer = LayerSpec(READERS[architecture](hf), DenseSpec(size(hf, "intermediate_size")))
    model = ModelConfig(**common, layers=(layer,))
    target_hidden = whole_or(hf, "target_hidden_size", model.hidden_size, 1, MAX_SIZE)
    if target_hidden != model.hidden_size:
        raise ModelFormatError(
            f"config.json has target_hidden_size={target_hidden} and hidden_size={model.hidden_size}; drafts "
            "of another width than their target's are not supported"
        )
    draft_vocab = whole_or(hf, "draft_vocab_size", model.vocab_size, 1, MAX_VOCAB)
    if draft_vocab > model.vocab_size:
        raise ModelFormatError(
            f"config.json has draft_vocab_size={draft_vocab}, more than its vocab_size {model.vocab_size}"
        )
    key = "eagle_aux_hidden_state_layer_ids"
    ids = inner.get(key, hf.get(key))
    # An empty list is how some heads ask for the default layers.
    layer_ids = None if ids is None else whole_list(ids, key, items=_MAX_CAPTURED, least=0, most=MAX_LAYERS) or None
    given = {**hf, **{key: value for key, value in inner.items() if value is not None}}
    return Eagle3Config(
        model,
        draft_vocab,
        layer_ids,
        norm_before_fc=flag(given, "norm_before_fc"),
        fc_norm=flag(given, "fc_norm") or flag(given, "use_aux_norm"),  # an older name
        norm_before_residual=flag(given, "norm_before_residual"),
        norm_output=flag(given, "norm_output"),
    )


def capture_layers(layer_ids: Sequence[int] | None, num_layers: int) -> tuple[int, ...]:
    """Which residual streams of the target an EAGLE3 draft reads, ascending: id i is the one entering layer i.

    Two conventions are published. Lists that begin with 1 name layers by their output (1 is the stream entering layer
    2), all others by their input. Without a list: 2, L // 2 and L - 3, the paper's choice.

    Raises:
        ConfigError: an id outside the target, or one that occurs twice.
    """
    ids = (2, num_layers // 2, num_layers - 3) if layer_ids is None else tuple(layer_ids)
    named = f"layers {list(ids)}" + (" (the default)" if layer_ids is None else "")
    if layer_ids is not None and ids and ids[0] == 1:
        ids = tuple(i + 1 for i in ids)
    if not ids or any(not 0 <= i <= num_layers for i in ids):
        raise ConfigError(f"an EAGLE3 draft cannot capture {named} of a target of {num_layers} layers")
    if len(set(ids)) < len(ids):
        raise ConfigError(
            f"an EAGLE3 draft cannot capture {named}: a layer occurs twice; name others with "
            "speculative_capture_layers (--speculative-capture-layers)"
        )
    return tuple(sorted(ids))


def check_fit(draft: Eagle3Config, target: ModelConfig) -> None:
    """Raises ConfigError where a draft cannot have been made for a target."""
    for what, ours, theirs in (
        ("hidden size", draft.model.hidden_size, target.hidden_size),
        ("vocabulary", draft.model.vocab_size, target.vocab_size),
    ):
        if ours != theirs:
            raise ConfigError(f"the draft does not fit the model: its {what} is {ours}, the model's is {theirs}")


def check_d2t(d2t: np.ndarray, vocab_size: int) -> None:
    """Checks the offsets [Vd] from draft ids to target ids.

    Raises:
        ModelFormatError: an id outside the target's vocabulary, or a target id that two draft ids stand for.
    """
    if d2t.dtype.kind != "i":
        raise ModelFormatError(f"tensor d2t must hold whole numbers, and is {d2t.dtype}")
    ids = np.arange(len(d2t)) + d2t.astype(np.int64)
    if outside := ids[(ids < 0) | (ids >= vocab_size)].tolist():
        raise ModelFormatError(f"d2t maps a draft token to id {outside[0]}, outside the vocabulary of {vocab_size} ids")
    if len(np.unique(ids)) < len(ids):
        raise ModelFormatError("d2t maps two draft tokens to the same id")


class Eagle3(nnx.Module):
    """One decoder layer whose attention reads twice the hidden size.

    Args:
        capture: the target's residual streams that `fc` fuses; see `capture_layers`.
        own_embedding, own_head: the checkpoint brings its own; otherwise the target's are used.
    """

    def __init__(
        self, config: Eagle3Config, dtype: Any, *, capture: tuple[int, ...], own_embedding: bool, own_head: bool
    ):
        declare = Declare(dtype)
        model = config.model
        H, eps = model.hidden_size, model.rms_norm_eps
        self.config = config
        self.capture = capture
        self.own_embedding, self.own_head = own_embedding, own_head
        assert len(capture) == config.num_captured
        if config.norm_before_fc:
            self.fc_input_norm = RMSNorm(len(capture) * H, eps, declare)
        if config.fc_norm:
            self.fc_norm = declare((len(capture), H), (None, None), "ones")
        self.fc = declare((H, len(capture) * H), (None, None))
        self.input_norm = RMSNorm(H, eps, declare)
        self.hidden_norm = RMSNorm(H, eps, declare)
        self.spec = config.layer
        self.attention: Attention = self.spec.attention.build(H, declare, input_dim=2 * H)
        self.post_norm = RMSNorm(H, eps, declare)
        self.mlp: ResidualMLP = self.spec.mlp.build(H, declare)
        self.norm = RMSNorm(H, eps, declare)
        if own_embedding:
            self.embed = Embedding(model.vocab_size, H, declare)
        if own_head:
            self.head = Embedding(config.draft_vocab_size, H, declare)
        if config.reduced:
            # Offsets: draft token j is the target's token j + d2t[j].
            self.d2t = declare((config.draft_vocab_size,), (None,), "zeros", jnp.int32)

    @property
    def cache_spec(self) -> CacheSpec:
        return self.attention.cache_spec

    def features(self, hidden_TH: jax.Array, captured: tuple[jax.Array, ...]) -> jax.Array:  # noqa: ARG002
        streams_TW = jnp.concatenate(captured, axis=-1)
        if self.config.norm_before_fc:
            streams_TW = self.fc_input_norm(streams_TW)
        if self.config.fc_norm:
            streams_TAH = streams_TW.reshape(*streams_TW.shape[:-1], len(captured), -1)
            normed_TAH = rms_norm(streams_TAH, self.fc_norm[...], self.config.model.rms_norm_eps)
            streams_TW = normed_TAH.reshape(streams_TW.shape)
        return linear(streams_TW, self.fc[...])

    def embed_ids(self, target: CausalLM, ids_T: jax.Array) -> jax.Array:
        return self.embed.rows(ids_T) if self.own_embedding else target.embed_ids(ids_T)

    def __call__(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        """Hidden states that `logits` and the next draft step read, before or after the final norm as the head says."""
        pair_T2H, residual_TH, rope = self._join(embedded_TH, hidden_TH, meta)
        out_TH, cache = self.attention(pair_T2H, cache, meta, rope)
        return self._finish(residual_TH, out_TH, meta.live), cache

    def catch_up(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, live: LiveRows, cache: LayerCache, meta: StepMetadata
    ) -> tuple[jax.Array, LayerCache]:
        pair_T2H, residual_TH, rope = self._join(embedded_TH, hidden_TH, meta)
        out_RH, cache = self.attention.catch_up(pair_T2H, live, cache, meta, rope)
        return self._finish(residual_TH[live.tokens], out_RH, meta.live[live.tokens]), cache

    def write_keys(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, cache: LayerCache, meta: StepMetadata
    ) -> LayerCache:
        pair_T2H, _, rope = self._join(embedded_TH, hidden_TH, meta)
        return self.attention.write_keys(pair_T2H, cache, meta, rope)

    def logits(self, target: CausalLM, hidden_RH: jax.Array) -> jax.Array:
        normed_RH = hidden_RH if self.config.norm_output else self.norm(hidden_RH)
        if not self.own_head:
            return target.logits(normed_RH)
        logits = self.head.logits(normed_RH)
        if not self.config.reduced:
            return logits
        ids = jnp.arange(self.config.draft_vocab_size) + self.d2t[...]
        return logits_at(ids, logits, self.config.model.vocab_size)

    def _join(
        self, embedded_TH: jax.Array, hidden_TH: jax.Array, meta: StepMetadata
    ) -> tuple[jax.Array, jax.Array, RopeTables | None]:
        """What attention reads, [T, 2H], what its output is added to, [T, H], and its tables."""
        normed_TH = self.hidden_norm(hidden_TH)
        pair_T2H = jnp.concatenate([self.input_norm(embedded_TH), normed_TH], axis=-1)
        residual_TH = normed_TH if self.config.norm_before_residual else hidden_TH
        rope = self.spec.attention.rope
        return pair_T2H, residual_TH, rope_tables(rope, meta.positions) if rope else None

    def _finish(self, residual_TH: jax.Array, out_TH: Attended, live_T: jax.Array) -> jax.Array:
        following = self.norm if self.config.norm_output else None
        stream = self.mlp.add_to(residual_TH, out_TH, self.post_norm, live_T, following)
        return stream.norm(following) if following else stream.x


def eagle3_key_map(config: Eagle3Config, *, names: Iterable[str], own_embedding: bool, own_head: bool) -> KeyMap:
    """Paths of `Eagle3` -> pieces.

    Args:
        names: of the checkpoint's tensors, which tell where it stores the layer and the norms of EAGLE3.1.
    """
    names = set(names)
    H, Vd = config.model.hidden_size, config.draft_vocab_size
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in names) else "layers.0."
    out: KeyMap = {("fc",): (Piece("fc.weight", (H, config.num_captured * H)),)} | nested(
        {
            "input_norm": norm_weight(f"{prefix}input_layernorm", H),
            "hidden_norm": norm_weight(f"{prefix}hidden_norm", H),
            "attention": config.layer.attention.key_map(f"{prefix}self_attn.", H, input_dim=2 * H),
            "post_norm": norm_weight(f"{prefix}post_attention_layernorm", H),
            "mlp": config.layer.mlp.key_map(f"{prefix}mlp.", H),
            "norm": norm_weight("norm", H),
        }
    )
    if config.norm_before_fc:
        out |= nested({"fc_input_norm": norm_weight("input_norm", config.num_captured * H)})
    if config.fc_norm:
        older = [f"aux_norm_{which}.weight" for which in ("low", "mid", "high")]
        newer = [f"fc_norm.{i}.weight" for i in range(config.num_captured)]
        stored = older if older[0] in names and config.num_captured == len(older) else newer
        out["fc_norm",] = tuple(Piece(name, (H,), at=i) for i, name in enumerate(stored))
    if own_embedding:
        out["embed", "weight"] = (Piece("embed_tokens.weight", (config.model.vocab_size, H)),)
    if own_head:
        out["head", "weight"] = (Piece("lm_head.weight", (Vd, H)),)
    if config.reduced:
        out["d2t",] = (Piece("d2t", (Vd,)),)
    return out


# The map back from the target's vocabulary, and the map of a draft that proposes all of it: zeros.
EAGLE3_HARMLESS = re.compile(r"t2d|d2t|(midlayer|layers\.0)\.self_attn\.rotary_emb\.inv_freq")
