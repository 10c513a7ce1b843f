"""What somebody writes to add a family, a kind of cache and a draft: all of it is here, and nothing in the product."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxspec.models.cache import CacheArray, CacheSpec
from jaxspec.models.config import LayerSpec, ModelConfig, Published
from jaxspec.models.hf_fields import common_fields
from jaxspec.models.keymap import Piece, any_of
from jaxspec.models.layers import DenseSpec
from jaxspec.models.registry import Family
from pallas_kernels.quant.reference import linear

DECAY = 0.9


# --- a kind of attention: a gated sum of values that fades, one state a slot ---


@dataclass(frozen=True)
class FadingSpec:
    rope = None

    def build(self, hidden, declare, *, input_dim=None):
        return Fading(hidden, input_dim or hidden, declare)

    def key_map(self, prefix, hidden, *, input_dim=None):
        return {(n,): (Piece(f"{prefix}{n}_proj.weight", (hidden, input_dim or hidden)),) for n in ("gate", "value")}


class Fading(nnx.Module):
    def __init__(self, hidden, inputs, declare):
        self.gate = declare((hidden, inputs), (None, None))
        self.value = declare((hidden, inputs), (None, None))
        self.cache_spec = CacheSpec((CacheArray("sum", "slot", (hidden,), np.dtype(np.float32), (None,)),))

    def __call__(self, x_TH, cache, meta, rope, norm=None):  # noqa: ARG002
        (states,) = cache  # [slots, 1, H]
        x_TH = norm(x_TH) if norm else x_TH
        value_TH, P = linear(x_TH, self.value[...]), meta.num_prefill_tokens

        def token(states, inputs):
            slot, position, value = inputs
            state = jnp.where(position == 0, 0.0, states[slot, 0]) * DECAY + value
            return states.at[slot, 0].set(state), state

        sums = []
        if P:  # padding tokens have a row past the last one: slot 0
            slots_P = jnp.pad(meta.prefill_slots, (0, 1))[meta.prefill_rows]
            states, sums_PH = lax.scan(token, states, (slots_P, meta.positions[:P], value_TH[:P]))
            sums.append(sums_PH)
        sums.append(states[meta.decode_slots, 0] * DECAY + value_TH[P:])
        states = states.at[meta.decode_slots, 0].set(sums[-1])
        return jnp.concatenate(sums) * linear(x_TH, self.gate[...]), (states,)


# --- a family: its config reader and its key map ---


def read_config(hf, architecture):
    layer = LayerSpec(FadingSpec(), DenseSpec(hf["intermediate_size"]))
    return ModelConfig(**common_fields(hf, architecture), layers=(layer,) * hf["num_hidden_layers"])


FAMILY = Family(read_config, harmless=lambda _config: any_of(["unused"]), published=Published("toys"))


# --- a draft without weights or cache: the newest token once more ---


class Echo(nnx.Module):
    capture, cache_spec = (), CacheSpec(())

    def features(self, hidden_TH, captured):  # noqa: ARG002
        return hidden_TH

    def embed_ids(self, target, ids_T):  # noqa: ARG002
        return ids_T[:, None]

    def __call__(self, embedded_TH, hidden_TH, cache, meta):  # noqa: ARG002
        return embedded_TH, cache

    def catch_up(self, embedded_TH, hidden_TH, live, cache, meta):  # noqa: ARG002
        return embedded_TH[live.tokens], cache

    def write_keys(self, embedded_TH, hidden_TH, cache, meta):  # noqa: ARG002
        return cache

    def logits(self, target, hidden_RH):
        return jnp.where(jnp.arange(target.config.vocab_size) == hidden_RH, 8.0, 0.0)
