"""The choice of a draft for a target.

Everything that can be refused is refused by `plan_draft`, from configurations and headers, before big weights are read.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax.sharding import Mesh

from jaxspec.config import EngineConfig, flagged
from jaxspec.errors import ConfigError, plain
from jaxspec.loading.checkpoint import (
    Checkpoint,
    declare_eagle3,
    declare_nextn,
    load_eagle3,
    load_nextn,
    open_checkpoint,
)
from jaxspec.loading.draft_vocabulary import declare_reduced, read_frequent, reduce_loaded
from jaxspec.loading.hf_folder import naming, read_hf_config
from jaxspec.loading.parts import MTP
from jaxspec.loading.resolve import resolve_model
from jaxspec.loading.tokenizer_files import read_vocabulary
from jaxspec.models.config import ModelConfig
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import capture_layers, check_fit, is_eagle3, read_eagle3_config


@dataclass(frozen=True)
class DraftPlan:
    """A draft that fits its target.

    Attributes:
        name: for people.
        model: its declarations, for sizes.
        load: reads its weights onto a mesh.
    """

    name: str
    model: Draft
    load: Callable[[Mesh], tuple[Draft, dict[str | int, Any]]]


def plan_draft(
    config: EngineConfig, target: Checkpoint, target_config: ModelConfig, dtype: str, *, context: int | None = None
) -> DraftPlan | None:
    """The model that drafts, as the options ask for; None without one.

    Args:
        context: see `read_model_config`.

    Raises:
        ConfigError, ModelFormatError: there is no such draft, or it cannot draft for this target.
    """
    plan = _plan_whole(config, target, target_config, dtype, context)
    if config.speculative_token_map is None:
        return plan
    if plan is None:
        raise ConfigError(
            f"{flagged('speculative_token_map')} is for drafts of a model, and no model drafts: leave it out"
        )
    ids = read_frequent(config.speculative_token_map, config.speculative_vocab_size, target_config.vocab_size)

    def load(mesh: Mesh) -> tuple[Draft, dict[str | int, Any]]:
        draft, params = plan.load(mesh)
        return reduce_loaded(draft, params, ids, target, target_config, mesh, dtype)

    model = declare_reduced(plan.model, len(ids), target_config, dtype)
    return DraftPlan(f"{plan.name} limited to {len(ids)} frequent tokens", model, load)


def _plan_whole(
    config: EngineConfig, target: Checkpoint, target_config: ModelConfig, dtype: str, context: int | None
) -> DraftPlan | None:
    """`plan_draft` with all tokens that the draft can propose."""
    if not config.num_speculative_tokens or (config.lookup and not config.lookup.beside_model):
        return None
    if config.speculative_model is None:
        if config.speculative_capture_layers is not None:
            raise ConfigError(
                f"{flagged('speculative_capture_layers')} is for EAGLE3 drafts: name one with speculative_model"
            )
        if MTP not in target.parts or not target_config.nextn_layers:
            raise ConfigError(
                f"{flagged('num_speculative_tokens')} {config.num_speculative_tokens} needs a draft, and the model has no "
                f"NextN (MTP) layer; name an EAGLE3 draft with {flagged('speculative_model')}, draft without a model with "
                f"{flagged('speculative_method')} ngram, or use 0"
            )
        model = declare_nextn(target, dtype, context=context)
        return DraftPlan("MTP", model, lambda mesh: load_nextn(target, mesh, dtype, context=context))

    folder = resolve_model(config.speculative_model)
    hf = read_hf_config(folder)
    with naming(folder):
        if not is_eagle3(hf):
            named = ", ".join(map(plain, (hf.get("architectures") or ["of no named architecture"])[:4]))
            raise ConfigError(
                f"{flagged('speculative_model')} {config.speculative_model} is {named}, not an EAGLE3 draft"
            )
        draft = read_eagle3_config(hf)
    check_fit(draft, target_config)
    _check_tokenizers(folder, target.folder)
    layer_ids = config.speculative_capture_layers
    capture = capture_layers(draft.layer_ids if layer_ids is None else layer_ids, target_config.num_layers)
    if len(capture) != draft.num_captured:
        raise ConfigError(
            f"{flagged('speculative_capture_layers')} names {len(capture)} layers and the draft reads {draft.num_captured}"
        )
    checkpoint = open_checkpoint(folder)
    return DraftPlan(
        f"EAGLE3 ({config.speculative_model})",
        declare_eagle3(checkpoint, capture, dtype),
        lambda mesh: load_eagle3(checkpoint, mesh, dtype, capture),
    )


def is_draft(folder: Path) -> bool:
    """Whether a folder holds an EAGLE3 draft and not a model."""
    with naming(folder):
        return is_eagle3(read_hf_config(folder))


def _check_tokenizers(draft: Path, target: Path) -> None:
    """Drafts rarely bring a tokenizer; one that does must give the same ids to the same texts."""
    ours, theirs = read_vocabulary(draft), read_vocabulary(target)
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError("the draft does not fit the model: their tokenizers have different vocabularies")
