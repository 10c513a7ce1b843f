"""The executables that `bench cycle` times: whole steps of each draft, and steps that end after one of their stages.

Whole steps are the engine's own function. A step that ends early is put together from the same functions, in the same
order, and returns what its last stage made, so that nothing in it is dead code.
"""

import contextlib
import enum
import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxspec.config import Settings, np_dtype, pages_for
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.choose import advance, choose
from jaxspec.engine.drafting import propose
from jaxspec.engine.forward import forward
from jaxspec.engine.plan import NO_ID
from jaxspec.engine.runner import bind
from jaxspec.engine.state import GREEDY_DRAFTS, MAX_LEN, NUM_DRAFTS, TEMPERATURE, state_shapes, zero_state
from jaxspec.engine.step import make_step, pack_output
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import Eagle3, capture_layers, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import random_params

DRAFTS = ("mtp", "eagle3-llama", "eagle3-mla")
# Published Llama heads propose this many of the target's tokens, with heads of this size.
REDUCED_VOCAB, HEAD_DIM = 32000, 128


class Stage(enum.Enum):
    """Where a step ends."""

    TARGET = "target"  # the forward pass, hidden states of every token
    VERIFY = "verify"  # logits, rejection sampling, new lengths
    CATCH_UP = "catch-up"  # the draft over the window, its logits and first draft
    WHOLE = "whole"


def declare_draft(kind: str, hf: dict[str, Any], target: CausalLM, dtype: np.dtype) -> Draft:
    """A draft of the sizes that published ones have for a target: one decoder layer as wide as the target.

    The EAGLE3 heads have a dense MLP like the target's dense layers, heads of their own and the target's embedding; the
    MLA head has the target's attention, the Llama head as many query heads as fill the width, four for each key head.
    """
    if kind == "mtp":
        return NextN(target.config, dtype)
    hidden, vocab, layers = hf["hidden_size"], hf["vocab_size"], target.config.num_layers
    common = {key: hf[key] for key in ("hidden_size", "vocab_size", "intermediate_size", "rms_norm_eps", "rope_theta")}
    common |= {"num_hidden_layers": 1, "max_position_embeddings": hf["max_position_embeddings"]}
    if kind == "eagle3-llama":
        head_dim = min(HEAD_DIM, hidden // 4)
        heads = hidden // head_dim
        config = common | {
            "architectures": ["LlamaForCausalLMEagle3"], "head_dim": head_dim, "num_attention_heads": heads,
            "num_key_value_heads": heads // 4, "draft_vocab_size": min(REDUCED_VOCAB, vocab // 2),
        }  # fmt: skip
    else:
        mla = (
            "num_attention_heads",
            "kv_lora_rank",
            "q_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
        )
        config = common | {key: hf[key] for key in mla} | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    # The default layers of a very shallow model would be the same ones twice.
    capture = capture_layers(None if layers > 6 else (0, 1, 2), layers)
    return Eagle3(read_eagle3_config(config), dtype, capture=capture, own_embedding=False, own_head=True)


def draw_draft(draft: Draft, mesh: Mesh, seed: int) -> dict:
    """Random parameters; a reduced vocabulary is spread over the target's."""
    params = random_params(draft, mesh, seed)  # type: ignore[arg-type]  # drafts are nnx modules
    if "d2t" in params:
        size, vocab = params["d2t"].shape[0], draft.config.model.vocab_size  # type: ignore[attr-defined]
        ids = np.sort(np.random.default_rng(seed).choice(vocab, size, replace=False))
        params["d2t"] = jax.device_put((ids - np.arange(size)).astype(np.int32), params["d2t"].sharding)
    return params


@dataclass
class Lane:
    """A draft (or none) with the state that its executables take turns with.

    Attributes:
        carry: the donated argument: the step's state, and the drafts and log q [S, 1, ...] of steps that end after the
            catch-up, which draft only once (empty where no such step is measured).
    """

    name: str
    draft: Draft | None
    settings: Settings
    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None]
    params: tuple[Any, Any]
    shapes: Any
    carry: Any
    start: dict[str, np.ndarray] = field(repr=False)

    @property
    def window(self) -> int:
        return self.settings.window

    def rewind(self) -> None:
        """Lengths, tokens and drafts as in the beginning; what later positions hold in the caches is written again."""
        self._set(**self.start)

    @contextlib.contextmanager
    def sampling(self) -> Iterator[None]:
        """Steps inside sample at temperature 1 and draft greedily."""
        state = self.carry[0]
        greedy = {name: np.array(getattr(state, name)) for name in ("params_f", "params_i")}
        params_f, params_i = greedy["params_f"].copy(), greedy["params_i"].copy()
        params_f[:, TEMPERATURE], params_i[:, GREEDY_DRAFTS] = 1, 1
        self._set(params_f=params_f, params_i=params_i)
        yield
        self._set(**greedy)

    def _set(self, **fields: np.ndarray) -> None:
        state = self.carry[0]
        # A copy: the next step is given the array's buffer to write in.
        arrays = {name: jax.device_put(v.copy(), getattr(state, name).sharding) for name, v in fields.items()}
        self.carry = (state._replace(**arrays), self.carry[1])


def make_lane(
    name: str,
    draft: tuple[Draft, dict] | None,
    target: tuple[CausalLM, nnx.GraphDef, nnx.State],
    settings: Settings,
    mesh: Mesh,
    *,
    context: int,
    split: bool,
    seed: int = 0,
) -> Lane:
    """A state in which every slot but 0 has `context` tokens of random KV, a newest token and random drafts."""
    model, graphdef, params = target
    draft_def, draft_params = bind(*draft) if draft else (None, None)
    module = draft[0] if draft else None
    k, S, V = settings.num_speculative_tokens, settings.max_slots, model.config.vocab_size
    shapes = state_shapes(model, settings, mesh, draft=module, num_speculative_tokens=k)
    one: Any = ()
    if split and draft:
        sharding = shapes.seq_len.sharding
        one = (
            jax.ShapeDtypeStruct((S, 1), jnp.int32, sharding=sharding),
            jax.ShapeDtypeStruct((S, 1, V), jnp.float32, sharding=sharding),
        )
    rng = np.random.default_rng(seed)
    pages = pages_for(settings.max_model_len, settings.page_size)
    tables = np.zeros((S, settings.max_pages), np.int32)
    # Every row its own pages, in an order as random as a server's.
    tables[1:, :pages] = 1 + rng.permutation((S - 1) * pages).reshape(S - 1, pages)
    live = np.arange(S) > 0
    start = {
        "seq_len": np.where(live, context, 0).astype(np.int32),
        "last_token": rng.integers(0, V, S, np.int32) * live,
        "done": np.zeros(S, bool),
    }
    if draft:
        start["drafts"] = rng.integers(0, V, (S, k), np.int32)
    params_i = np.zeros(shapes.params_i.shape, np.int32)
    params_i[:, MAX_LEN] = settings.max_model_len
    params_i[:, NUM_DRAFTS] = k
    state = zero_state(shapes)
    key = jax.random.key(seed, impl="rbg")
    state = state._replace(
        page_table=jax.device_put(tables, shapes.page_table.sharding),
        params_i=jax.device_put(params_i, shapes.params_i.sharding),
        stop_ids=jax.device_put(np.full(shapes.stop_ids.shape, NO_ID, np.int32), shapes.stop_ids.sharding),
        kv=_random_like(state.kv, key),
        draft_kv=_random_like(state.draft_kv, jax.random.fold_in(key, 1)),
    )
    lane = Lane(
        name,
        module,
        settings,
        (graphdef, draft_def),
        (params, draft_params),
        (shapes, one),
        (state, zero_state(one)),
        start,
    )
    lane.rewind()
    return lane


def _random_like(tree: Any, key: jax.Array) -> Any:
    """N(0, 1), which is about what normed latents are, in the place of the tree's arrays."""
    arrays, structure = jax.tree.flatten(tree)
    drawn = [
        _filler(array.shape, array.dtype, array.sharding)(jax.random.fold_in(key, i), array)
        for i, array in enumerate(arrays)
    ]
    return jax.tree.unflatten(structure, drawn)


@functools.lru_cache
def _filler(shape: tuple[int, ...], dtype: np.dtype, sharding: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    def draw(key: jax.Array, _old: jax.Array) -> jax.Array:
        return jax.random.normal(key, shape, dtype)

    # Donated although it is not read: the new array takes its place.
    return jax.jit(draw, donate_argnums=1, keep_unused=True, out_shardings=sharding)


@dataclass
class Variant:
    """One executable: (params, carry, inputs) -> (carry, out), the carry donated."""

    lane: Lane
    rows: int
    skip_dead: bool = True
    stage: Stage = Stage.WHOLE
    compiled: Any = None
    inputs: Any = None
    compile_seconds: float = 0.0

    @property
    def name(self) -> str:
        if self.stage is not Stage.WHOLE:
            return f"{self.lane.name} up to {self.stage.value}, {self.rows} rows"
        how = "" if self.lane.draft is None else ", skip on" if self.skip_dead else ", skip off"
        return f"{self.lane.name}{how}, {self.rows} rows"

    def compile(self) -> None:
        started = time.perf_counter()
        lane = self.lane
        layout = InputLayout(Bucket(0, 0, self.rows, "lean"), lane.settings.page_size, lane.settings.max_pages)
        function = staged_step(lane.graphdefs, layout, lane.settings, self.stage, skip_dead=self.skip_dead)
        replicated: Any = NamedSharding(lane.shapes[0].seq_len.sharding.mesh, PartitionSpec())
        shardings = jax.tree.map(lambda s: s.sharding, lane.shapes)
        jitted = jax.jit(function, donate_argnums=1, out_shardings=(shardings, replicated))
        inputs = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=replicated)
        self.compiled = jitted.lower(lane.params, lane.shapes, inputs).compile()
        flat = np.zeros(layout.size, np.int32)
        layout.split(flat).decode_slots[:] = np.arange(1, self.rows + 1)
        self.inputs = (flat, replicated)
        self.compile_seconds = time.perf_counter() - started

    def dispatch(self) -> jax.Array:
        """Starts a step as the runner does: with one copy to the device in front and one back behind it."""
        flat, sharding = self.inputs
        self.lane.carry, out = self.compiled(self.lane.params, self.lane.carry, jax.device_put(flat, sharding))
        if self.stage is not Stage.TARGET:  # hidden states stay on the device
            out.copy_to_host_async()
        return out


def compile_all(variants: Sequence[Variant], threads: int) -> float:
    """Compiles in threads: tracing holds Python's lock, XLA does not. Returns the seconds that it took."""
    started = time.perf_counter()

    def compile_one(variant: Variant) -> Variant:
        variant.compile()
        return variant

    with ThreadPoolExecutor(threads) as pool:
        for done, variant in enumerate(pool.map(compile_one, variants)):
            print(f"compiled {done + 1}/{len(variants)} {variant.name}: {variant.compile_seconds:.1f} s", flush=True)
    return time.perf_counter() - started


def staged_step(
    graphdefs: tuple[nnx.GraphDef, nnx.GraphDef | None],
    layout: InputLayout,
    settings: Settings,
    stage: Stage,
    *,
    skip_dead: bool,
) -> Callable[[tuple, tuple, jax.Array], tuple[tuple, jax.Array]]:
    """The step of a decode bucket, up to the end of a stage; `Lane.carry` says what it carries."""
    n = settings.window
    whole = make_step(graphdefs, layout, settings, window=n, skip_dead=skip_dead)

    def whole_step(params: tuple, carry: tuple, flat_inputs: jax.Array):
        state, arrays = whole(params, carry[0], flat_inputs)
        return (state, carry[1]), arrays.packed

    def early_step(params: tuple, carry: tuple, flat_inputs: jax.Array):
        state, one = carry
        target = nnx.merge(graphdefs[0], params[0])
        inputs = layout.split(flat_inputs)
        draft = nnx.merge(graphdefs[1], params[1]) if stage is Stage.CATCH_UP else None
        capture = draft.capture if draft else ()
        state, forwarded = forward(target, state, inputs, settings, n=n, full=False, capture=capture)
        if stage is Stage.TARGET:
            return (state, one), forwarded.hidden
        result = choose(forwarded.logits, state, inputs, n=n, full=False)
        was_done = state.done
        state = advance(state, inputs, result, full=False)
        if draft is not None:
            # With room for one draft it drafts once. The window's own drafts stay those of the start.
            proposed = propose(
                state._replace(drafts=one[0], draft_log_q=one[1]), draft, target,
                forwarded, inputs, result,
                was_done=was_done, settings=settings, skip_dead=skip_dead,
            )  # fmt: skip
            state = state._replace(draft_kv=proposed.draft_kv)
            one = (proposed.drafts, proposed.draft_log_q)
        return (state, one), pack_output(result)

    return whole_step if stage is Stage.WHOLE else early_step


def make_settings(*, rows: int, k: int, context: int, longest: int, dtype: str, on_gpu: bool) -> Settings:
    """Settings with a pool for exactly `rows` rows of `longest` tokens."""
    assert context < longest
    return Settings(
        max_model_len=longest,
        max_num_seqs=rows,
        max_num_batched_tokens=rows * (k + 1),
        num_pages=rows * pages_for(longest) + 1,
        dtype=np_dtype(dtype).name,
        on_gpu=on_gpu,
        num_speculative_tokens=k,
    )
