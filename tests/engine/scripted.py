"""Tiny targets with drafts that a test decides, and single steps on states that a test has made.

Compiling dominates: runners are made once for a process, with one lean bucket that holds every plan unless
`every_bucket` asks for the whole table, and their parameters are exchanged instead of compiling again.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from jaxspec.compile_cache import open_store
from jaxspec.config import Lookup, Settings
from jaxspec.engine.buckets import Bucket, Variant, bucket_table, split_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.plan import StepPlan
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.engine.state import GREEDY_DRAFTS, TEMPERATURE, StepState
from jaxspec.engine.step_output import StepOutput
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import CausalLM
from jaxspec.models.draft import Draft
from jaxspec.models.eagle3 import Eagle3, read_eagle3_config
from jaxspec.models.mtp import NextN
from jaxspec.models.params import TENSOR_AXIS, declarations, nest, with_shardings
from jaxspec.models.registry import read_config
from jaxspec.sampling.params import SamplingParams
from tests.drafts import PatternDraft, pattern_params, recorded_params
from tests.engine.tiny import EOS, HF_CONFIG, SETTINGS, VOCAB, cached, fill_cache, run, warmed
from tests.tiny_models import CONFIGS

NUM_TEXTS = SETTINGS.max_num_seqs
# Prompts of one token and of several pages, in one chunk and in several.
LENGTHS = (3, 70, 64, 100, 10, 33, 129, 2)
NEW_TOKENS = 40


def one_device() -> Mesh:
    return Mesh(np.array(jax.devices()[:1]), (TENSOR_AXIS,))


def numpy_params(module: nnx.Module, seed: int, mesh: Mesh | None = None) -> dict:
    """Random parameters as `random_params(randomize_norms=True)` draws them, without a compilation for each shape.

    Their values are the same on any mesh; by default it is one of a single device.
    """
    rng = np.random.default_rng(seed)
    flat = {}
    for path, target in with_shardings(module, mesh or one_device()).items():
        init = declarations(module)[path].get_metadata()["init"]
        if init == "normal":
            value = rng.standard_normal(target.shape) * (1.0 if path[0] == "embed" else target.shape[-1] ** -0.5)
        else:
            value = rng.uniform(0.5, 1.5, target.shape) if init == "ones" else 0.1 * rng.standard_normal(target.shape)
        flat[path] = jax.device_put(np.asarray(value, target.dtype), target.sharding)
    return nest(flat)


def one_bucket(settings: Settings, variant: Variant = "lean") -> tuple[Bucket]:
    """The bucket that holds every plan, by default with the sampler that knows greedy requests and temperatures only.

    The sampler of all parameters, masks among them, is more than half of a tiny step's compilation.
    """
    return (dataclasses.replace(bucket_table(settings)[-1], variant=variant),)


def late_buckets(settings: Settings) -> tuple[Bucket, ...]:
    """Those whose step also exists in two parts in an engine that reads late."""
    return split_table(dataclasses.replace(settings, readout_depth=1))


@cached
def tiny_config(variant: str) -> ModelConfig:
    """The engine tests' own model, or a variant of tests/tiny_models.py with a layer less, of each kind one."""
    if variant == "tiny":
        return read_config(HF_CONFIG)
    hf = CONFIGS[variant] | {"num_hidden_layers": 2, "full_attention_interval": 2}
    if "linear_attn_config" in hf:
        hf["linear_attn_config"] = hf["linear_attn_config"] | {"kda_layers": [1], "full_attn_layers": [2]}
    return read_config(hf)


@cached
def target_params(variant: str) -> dict:
    return numpy_params(CausalLM(tiny_config(variant), jnp.float32), 3)


def with_caches_of(model: CausalLM, settings: Settings) -> Settings:
    """Settings of engines over a model. Where it has states there is room for some, and prefixes are shared on request."""
    paged = all(spec.paged for spec in model.cache_specs())
    return settings if paged else dataclasses.replace(settings, prefix_caching=False, state_snapshots=4)


def _runner(
    variant: str,
    k: int,
    draft: tuple[Draft, dict] | None,
    *,
    every_bucket: bool = False,
    sampler: Variant = "lean",
    split: bool = False,
    **options: Any,
) -> Runner:
    model = CausalLM(tiny_config(variant), jnp.float32)
    settings = with_caches_of(model, dataclasses.replace(SETTINGS, num_speculative_tokens=k))
    buckets = None if every_bucket else one_bucket(settings, sampler)
    return warmed(
        Runner(
            model,
            target_params(variant),
            settings,
            one_device(),
            draft=draft,
            buckets=buckets,
            split=late_buckets(settings) if split else (),
            files=open_store(None),
            **options,
        )
    )


@cached
def plain_runner(variant: str = "tiny") -> Runner:
    return _runner(variant, 0, None)


@cached
def pattern_runner(k: int, variant: str = "tiny", *, every_bucket: bool = False) -> Runner:
    draft = PatternDraft(tiny_config(variant).vocab_size, NUM_TEXTS, SETTINGS.max_model_len)
    params = {name: jnp.asarray(value) for name, value in pattern_params(draft, []).items()}
    return _runner(variant, k, (draft, params), every_bucket=every_bucket)


_HEAD = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 48,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 512, "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}  # fmt: skip
HEADS = {
    "llama": _HEAD
    | {"architectures": ["LlamaForCausalLMEagle3"], "num_key_value_heads": 1, "head_dim": 32, "rope_theta": 100.0},
    "mla": _HEAD
    | {"architectures": ["Eagle3DeepseekV2ForCausalLM"]}
    | {k: HF_CONFIG[k] for k in ("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
}


@cached
def eagle3_runner(
    head: str, k: int, *, skip_dead: bool = True, sampler: Variant = "lean", split: bool = False
) -> Runner:
    """A random EAGLE3 head with the target's embedding and head, reading all residual streams of the tiny target.

    split: the largest decode step also exists in two parts.
    """
    return _runner("tiny", k, tiny_draft(head), skip_dead=skip_dead, sampler=sampler, split=split)


def tiny_draft(name: str, variant: str = "tiny") -> tuple[Draft, dict]:
    """A random draft for a tiny target: "nextn", "llama", "mla"; or "pattern", which knows no text yet."""
    if name == "pattern":
        pattern = PatternDraft(tiny_config(variant).vocab_size, NUM_TEXTS, SETTINGS.max_model_len)
        return pattern, {key: jnp.asarray(value) for key, value in pattern_params(pattern, []).items()}
    if name == "nextn":
        draft: Draft = NextN(tiny_config(variant), jnp.float32)
    else:
        draft = Eagle3(
            read_eagle3_config(HEADS[name]), jnp.float32, capture=(0, 1, 2), own_embedding=False, own_head=False
        )
    return draft, numpy_params(draft, 4)


# Two equal tokens are rare in a random text of 160 ids, one is not.
LOOKUP = Lookup(1, 4)
LOOKUP_BESIDE_MODEL = Lookup(1, 4, beside_model=True)


@cached
def lookup_runner(k: int, *, model: bool = False, full: bool = False) -> Runner:
    """Drafts are looked up, and where nothing is found a random NextN layer drafts if `model` says so.

    full: with the sampler of all parameters.
    """
    lookup = LOOKUP_BESIDE_MODEL if model else LOOKUP
    settings = dataclasses.replace(SETTINGS, num_speculative_tokens=k, lookup=lookup)
    target = CausalLM(tiny_config("tiny"), jnp.float32)
    draft = tiny_draft("nextn") if model else None
    buckets = bucket_table(settings)[-1:] if full else one_bucket(settings)
    files = open_store(None)
    return warmed(
        Runner(target, target_params("tiny"), settings, one_device(), draft=draft, buckets=buckets, files=files)
    )


@cached
def changing_runner(
    k: int, draft: str = "pattern", variant: str = "tiny", *, sampler: Variant = "lean", split: bool = False
) -> Runner:
    """A bucket that holds every plan for each number of drafts that an adaptive engine knows: none, one and k.

    split: decode steps with none and with k also exist in two parts, as those of an engine do.
    """
    model = CausalLM(tiny_config(variant), jnp.float32)
    settings = with_caches_of(model, dataclasses.replace(SETTINGS, num_speculative_tokens=k, adaptive_drafts=True))
    buckets = tuple(dataclasses.replace(b, variant=sampler) for b in bucket_table(settings) if b.prefill_tokens)
    drafts = tiny_draft(draft, variant)
    late = late_buckets(settings) if split else ()
    return warmed(
        Runner(model, target_params(variant), settings, one_device(), draft=drafts, buckets=buckets, split=late)
    )


@contextlib.contextmanager
def exchanged(runner: Runner, *, target: dict | None = None, draft: dict | None = None) -> Iterator[None]:
    """Other parameter values of the same shapes for a while: nested dicts, of which any part may be missing."""
    before: list[tuple[Any, jax.Array]] = []

    def put(variables: Any, values: dict) -> None:
        for key, value in values.items():
            if isinstance(value, dict):
                put(variables[key], value)
            else:
                old = variables[key].get_value()
                before.append((variables[key], old))
                variables[key].set_value(jax.device_put(np.asarray(value, old.dtype), old.sharding))

    try:
        for variables, values in zip(runner.params, (target, draft), strict=True):
            put(variables, values or {})
        runner.use_params(runner.params)
        yield
    finally:
        for variable, old in reversed(before):
            variable.set_value(old)
        runner.use_params(runner.params)


def engine_over(runner: Runner, *, poison: float = 0.0, eos: Sequence[int] = (EOS,), **options: Any) -> Engine:
    """An engine over a pool full of `poison`, the padding page included."""
    fill_cache(runner, poison)
    return Engine(runner, vocab_size=tiny_vocab(runner), eos_token_ids=eos, **options)


def tiny_vocab(runner: Runner) -> int:
    return runner.params[0]["embed"]["weight"].get_value().shape[0]


def sampling(state):
    """The state with requests that sample at temperature 1 and draft greedily, so that drafts stay those they were."""
    params_f, params_i = state.params_f.copy(), state.params_i.copy()
    params_f[:, TEMPERATURE], params_i[:, GREEDY_DRAFTS] = 1, 1
    return state._replace(params_f=params_f, params_i=params_i)


def greedy_requests(
    vocab_size: int, *, max_tokens: int = NEW_TOKENS, lengths: Sequence[int] = LENGTHS
) -> list[Request]:
    rng = np.random.default_rng(0)
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    return [Request(f"g{i}", rng.integers(6, vocab_size, n).tolist(), params) for i, n in enumerate(lengths)]


@cached
def plain_run(variant: str = "tiny") -> tuple[dict, dict, list[list[int]]]:
    """Greedy ids and log-probabilities by request id, and whole texts that go on a few windows longer."""
    runner = plain_runner(variant)
    requests = greedy_requests(tiny_config(variant).vocab_size, max_tokens=NEW_TOKENS + 16)
    ids, logprobs, _ = run(engine_over(runner), requests)
    texts = [[*r.prompt_ids, *ids[r.id]] for r in requests]
    cut = [{key: values[:NEW_TOKENS] for key, values in found.items()} for found in (ids, logprobs)]
    return cut[0], cut[1], texts


def with_pattern(runner: Runner, texts: Sequence[Sequence[int]], seed: int | None = None) -> Any:
    """`exchanged` for a runner of `pattern_runner`; without a seed its draft is always right."""
    draft = PatternDraft(tiny_vocab(runner), NUM_TEXTS, SETTINGS.max_model_len)
    params = recorded_params(draft, texts) if seed is None else pattern_params(draft, texts, seed=seed)
    return exchanged(runner, draft=params)


class Windows:
    """An engine's observer that keeps, of every verified window, how many drafts were accepted."""

    def __init__(self) -> None:
        self.accepted: list[int] = []
        self.mixed = 0  # steps with prompt chunks beside windows

    def __call__(self, step: StepOutput) -> None:
        first = len(step.plan.prefill)
        live = step.emitted[first:] > 0
        self.accepted += step.accepted[first:][live].tolist()
        self.mixed += bool(first and live.any())


# --- single steps ---


def plan_where(engine: Engine, wanted: Callable[[StepPlan], bool]) -> StepPlan:
    """Runs an engine until its next plan is as wanted; that plan has not been dispatched."""
    while True:
        plan = engine.scheduler.plan()
        assert plan is not None, "the requests ended before there was such a plan"
        if wanted(plan):
            return plan
        engine.dispatch(plan, 0.0)
        engine.read()


MODES: dict[str, Callable[[StepPlan], bool]] = {
    "extend": lambda plan: bool(plan.prefill) and not plan.decode,
    "mixed": lambda plan: bool(plan.prefill) and len(plan.decode) > 1,
    "decode": lambda plan: not plan.prefill and len(plan.decode) == SETTINGS.max_num_seqs,
}


def snapshot(runner: Runner) -> StepState:
    return jax.tree.map(np.array, runner.state)


def restore(runner: Runner, state: StepState) -> None:
    runner.state = jax.tree.map(lambda a, now: jax.device_put(a, now.sharding), state, runner.state)


def one_step(runner: Runner, state: StepState, plan: StepPlan) -> tuple[StepOutput, StepState]:
    """What a plan does to a state."""
    restore(runner, state)
    runner.dispatch(plan)
    return runner.read(), snapshot(runner)
