"""Cutting a draft's vocabulary to the tokens that are frequent in some text."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxspec.config import flagged, np_dtype
from jaxspec.engine.launcher import laid_out
from jaxspec.errors import ConfigError, shown
from jaxspec.loading.checkpoint import Checkpoint, Params
from jaxspec.loading.parts import EMBED, HEAD, parts_of
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import Eagle3
from jaxspec.models.params import quantised, schemes_of, with_shardings
from jaxspec.models.reduced import Reduced


def read_frequent(path: str, most: int | None, vocab_size: int) -> np.ndarray:
    """The ids int32 [X], ascending, of a file of JSON: a list of ids, the most frequent first, or counts by id.

    Args:
        most: how many of them (default: all in the file).

    Raises:
        ConfigError: it cannot be read, or is no such file.
    """
    named = f"{flagged('speculative_token_map')} {path}"
    try:
        content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {named}: {error}") from None
    if isinstance(content, dict):
        try:
            counts = sorted(((float(count), -int(token)) for token, count in content.items()), reverse=True)
        except (TypeError, ValueError):
            raise ConfigError(f"{named} must map token ids to counts") from None
        content = [-token for count, token in counts if count > 0]
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{named} must be JSON: a list of token ids, the most frequent first, or counts by token id")
    wrong = [token for token in content if type(token) is not int or not 0 <= token < vocab_size]
    if wrong:
        raise ConfigError(f"{named} names {shown(wrong[0])}, which is no id of a vocabulary of {vocab_size}")
    kept = list(dict.fromkeys(content))[:most]
    if most is not None and len(kept) < most:
        raise ConfigError(
            f"{flagged('speculative_vocab_size')} {most} is more than the {len(kept)} ids of {named}: lower it"
        )
    return np.sort(np.array(kept, np.int32))


def declare_reduced(draft: Draft, size: int, target: ModelConfig, dtype: str) -> Reduced:
    """`draft` with a head of `size` rows, without parameters."""
    inner = draft
    if isinstance(draft, Eagle3):
        whole = replace(draft.config, draft_vocab_size=target.vocab_size)
        without_head = Eagle3(
            whole, np_dtype(dtype), capture=draft.capture, own_embedding=draft.own_embedding, own_head=False
        )
        inner = quantised(without_head, schemes_of(draft))
    return Reduced(inner, size, target.vocab_size, target.hidden_size, np_dtype(dtype))


def reduce_loaded(
    draft: Draft, params: Params, ids: np.ndarray, target: Checkpoint, config: ModelConfig, mesh: Mesh, dtype: str
) -> tuple[Reduced, Params]:
    """A loaded draft and its parameters with a head that proposes `ids` only, of those that it could propose.

    Raises:
        ConfigError: it can propose none of them.
    """
    params = dict(params)
    rows, scale = ids, 1.0
    if isinstance(draft, Eagle3) and draft.own_head:
        head = params.pop("head")["weight"]
        if draft.config.reduced:
            own = np.arange(draft.config.draft_vocab_size) + np.asarray(params.pop("d2t"))
            order = np.argsort(own)
            ids = ids[np.isin(ids, own)]
            rows = order[np.searchsorted(own, ids, sorter=order)]
            if not len(ids):
                raise ConfigError(
                    f"{flagged('speculative_token_map')} names none of the tokens that the draft can propose"
                )
    else:
        # The target scales what its head reads; here the rows are scaled themselves.
        head, scale = _target_head(target, config, mesh, dtype), config.logit_scale
    model = declare_reduced(draft, len(ids), config, dtype)
    targets = with_shardings(model, mesh)
    weight, kept = targets["head", "weight"], targets["ids",]
    taken = jax.jit(
        lambda whole: (jnp.take(whole, rows, axis=0) * scale).astype(weight.dtype), out_shardings=weight.sharding
    )
    own_params: Params = {
        "inner": params,
        "head": {"weight": taken(head)},
        "ids": laid_out(ids.astype(np.int32), kept.sharding),
    }
    return model, own_params


def _target_head(target: Checkpoint, config: ModelConfig, mesh: Mesh, dtype: str) -> Any:
    """The target's head [V, H]; its embedding where the two are tied."""
    part = EMBED if config.tie_embeddings else HEAD
    shapes = parts_of(with_shardings(CausalLM(config, np_dtype(dtype)), mesh))
    ((_, values),) = target.read_parts({part: shapes[part]})
    return values[part, "weight"]
