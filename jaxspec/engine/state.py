"""The state that stays on the device between steps. Donated to every step, never rebuilt on the host."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from jaxspec.config import Settings, np_dtype
from jaxspec.engine.expert_load import load_dims
from jaxspec.engine.lookup import HISTORY
from jaxspec.models.cache import CacheSpec, LayerCache
from jaxspec.models.decoder import Cache, CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.params import num_ranks, of_ranks, partition_spec
from jaxspec.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from pallas_kernels.logit_rules.reference import mask_words
from pallas_kernels.peer_sum import mailbox
from pallas_kernels.readback import api as readback

# The model's own end-of-text ids share the row with the request's.
STOP_IDS = MAX_STOP_TOKEN_IDS + 4

# Columns of params_f and params_i.
PARAMS_F, PARAMS_I = 7, 12
TEMPERATURE, TOP_P, MIN_P, REPETITION, FREQUENCY, PRESENCE, ACCEPT_PROBABILITY = range(PARAMS_F)
(
    SEED_LOW, SEED_HIGH, TOP_K, MAX_LEN, PROMPT_LEN, MIN_TOTAL, NUM_BIAS, NUM_DRAFTS, GREEDY_DRAFTS, CONSTRAINED, SEEDED,
    ALTERNATIVES,
) = range(PARAMS_I)  # fmt: skip


class StepState(NamedTuple):
    """S = max_num_seqs + 1 slots; slot 0 is the padding row and page 0 the padding page.

    Of several ranks each has such a state: their arrays lie one after the other along the first axis, each on its rank.

    Attributes:
        kv: each layer's cache, as its `CacheSpec` says.
        page_table: int32 [S, max_pages].
        seq_len: int32 [S] tokens of each slot whose KV is written.
        last_token: int32 [S] the newest token, whose KV is not written yet.
        done: bool [S] the slot's request has met a stop that the device knows; its row emits nothing.
        params_f: float32 [S, PARAMS_F] temperature, top_p, min_p, penalties, and how likely a draft is accepted
            where acceptance is synthetic (see `accept_one_by_one`).
        params_i: int32 [S, PARAMS_I] seed (two words), top_k, most tokens, prompt length, length before which no stop id
            may come, number of biases, drafts of a window that count, whether these are the draft's argmax, whether `masks`
            count, whether the request brought its seed, how many alternatives it asked for.
        stop_ids: int32 [S, STOP_IDS], -1 for none.
        counts: int32 [S, V] how often each id was output, and whether the prompt holds it (see `LogitRules`); right for
            requests that run in "full" buckets from their start. Like the next two, "lean" buckets leave it alone.
        bias_ids: int32 [S, MAX_LOGIT_BIAS], of which the first NUM_BIAS count; bias_values float32 likewise.
        masks: int32 [S, n, ceil(V / 32)] which ids a constrained slot may choose at each position of its next window, as
            bits (see `Constraint`). Written between steps.
        draft_kv: the draft's cache, under the same page ids. () where no model drafts.
        held: int32 [S] how many drafts each slot holds: as many as its latest step proposed. Like the next () without
            speculation.
        drafts: int32 [S, k] tokens proposed to follow `last_token`; those past `held` are stale but legal.
        draft_logits: [S, k, V], in the type of activations, the draft's logits that they were drawn from; left as it is for
            requests of temperature 0 and for seeded ones. () where no model drafts, like the next.
        draft_log_z: float32 [S, k] log-sum-exp of these over the request's temperature, which follows from the slot.
        history: the ids of all tokens, under the same page ids as their KV, where drafts are looked up; () otherwise.
        looked_up: bool [S] the drafts were looked up and not drawn: a point mass. () unless both kinds occur.
        expert_load: int32 [1, 2, L, E] how many tokens each mixture layer has sent to each expert (see `ExpertLoad`); () unless
            that is counted.
        written: int32 [1] what `pallas_kernels.readback.api.write` gave of the newest step; () where steps do not write into
            the host's memory.
        mailboxes: where the devices along an axis of the mesh write to each other, by axis (see
            `pallas_kernels.peer_sum.mailbox`); () where they do not. Every step passes it on.
    """

    kv: Cache
    page_table: jax.Array
    seq_len: jax.Array
    last_token: jax.Array
    done: jax.Array
    params_f: jax.Array
    params_i: jax.Array
    stop_ids: jax.Array
    counts: jax.Array
    bias_ids: jax.Array
    bias_values: jax.Array
    masks: jax.Array
    draft_kv: LayerCache = ()
    held: Any = ()
    drafts: Any = ()
    draft_logits: Any = ()
    draft_log_z: Any = ()
    history: LayerCache = ()
    looked_up: Any = ()
    expert_load: Any = ()
    written: Any = ()
    mailboxes: Any = ()


def drafts_that_count(state: StepState, slots_D: jax.Array, n: int) -> jax.Array:
    """How many drafts of each window may be accepted, int32 [D], 0 to n - 1; what lies past them is stale, but legal."""
    wanted_D = jnp.minimum(state.params_i[slots_D, NUM_DRAFTS], n - 1)
    return wanted_D if n == 1 else jnp.minimum(wanted_D, state.held[slots_D])


def state_shapes(model: CausalLM, settings: Settings, mesh: Mesh, *, draft: Draft | None = None) -> StepState:
    """Shapes, dtypes and shardings; all but the caches, and what has a number for each id, is on every device of its rank."""

    def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=of_ranks(mesh))

    def by_id(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        """[*dims, V], in the columns of the head."""
        spec = partition_spec(("ranks", *[None] * (len(dims) - 1), "vocab"), mesh)
        return jax.ShapeDtypeStruct((*dims, model.config.vocab_size), dtype, sharding=NamedSharding(mesh, spec))

    def cache(spec: CacheSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
        return spec.shapes(
            num_pages=settings.num_pages,
            page_size=settings.page_size,
            num_slots=settings.max_slots,
            window=settings.window,
            mesh=mesh,
            snapshots=settings.state_snapshots,
        )

    S = settings.max_slots * num_ranks(mesh)
    shapes: dict[str, Any] = {
        "kv": tuple(map(cache, model.cache_specs())),
        "page_table": shape((S, settings.max_pages), jnp.int32),
        "seq_len": shape((S,), jnp.int32),
        "last_token": shape((S,), jnp.int32),
        "done": shape((S,), jnp.bool_),
        "params_f": shape((S, PARAMS_F), jnp.float32),
        "params_i": shape((S, PARAMS_I), jnp.int32),
        "stop_ids": shape((S, STOP_IDS), jnp.int32),
        "counts": by_id((S,), jnp.int32),
        "bias_ids": shape((S, MAX_LOGIT_BIAS), jnp.int32),
        "bias_values": shape((S, MAX_LOGIT_BIAS), jnp.float32),
        "masks": shape((S, settings.window, mask_words(model.config.vocab_size)), jnp.int32),
    }
    k = settings.num_speculative_tokens
    if k:
        shapes["held"] = shape((S,), jnp.int32)
        shapes["drafts"] = shape((S, k), jnp.int32)
    if draft is not None:
        shapes["draft_kv"] = cache(draft.cache_spec)
        shapes["draft_logits"] = by_id((S, k), np_dtype(settings.dtype))
        shapes["draft_log_z"] = shape((S, k), jnp.float32)
    if settings.lookup is not None:
        shapes["history"] = cache(HISTORY)
        if draft is not None:
            shapes["looked_up"] = shape((S,), jnp.bool_)
    if settings.expert_load_metrics:
        shapes["expert_load"] = shape(load_dims(model, num_ranks(mesh)), jnp.int32)
    if readback.is_used():
        shapes["written"] = shape((num_ranks(mesh),), jnp.int32)
    if axes := mailbox.axes_reached(mesh):
        shapes["mailboxes"] = {axis: mailbox.addresses_shape(mesh, axis) for axis in axes}
    return StepState(**shapes)


def compile_zeros(shapes: StepState) -> jax.stages.Compiled:
    """Makes a state of zeros: a masked key still multiplies its value by 0, so fresh pages must be finite."""

    def zeros() -> StepState:
        return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    return jax.jit(zeros, out_shardings=jax.tree.map(lambda s: s.sharding, shapes)).lower().compile()
