"""A tiny random DeepSeek-V3 behind the real runner, shared by the engine tests: compiling dominates their time."""

import dataclasses
import fcntl
import functools
import hashlib
import inspect
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from bench.harness.models import declare
from jaxspec.compile_cache import open_store
from jaxspec.config import Settings
from jaxspec.engine.buckets import bucket_table
from jaxspec.engine.engine import Engine
from jaxspec.engine.request import Request
from jaxspec.engine.runner import Runner
from jaxspec.loading.quantise import Quantization
from jaxspec.models.cache import KVCacheDtype
from jaxspec.models.params import random_params

VOCAB, EOS = 160, 5
HF_CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "intermediate_size": 48, "rms_norm_eps": 1e-6, "max_position_embeddings": 512,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_shared_experts": 1,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "n_group": 2, "topk_group": 1, "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}  # fmt: skip
SETTINGS = Settings(
    max_model_len=512, max_num_seqs=8, max_num_batched_tokens=64, num_pages=40, dtype="float32", on_gpu=False
)


_made: list[dict] = []


def forget_all() -> None:
    """Drops what the `cached` functions have made."""
    for made in _made:
        made.clear()


def cached(function):
    """As functools.cache, but one call is one call, however its arguments are spelled: a second one would compile.

    `forget` takes the same arguments and drops what they made.
    """
    signature, made = inspect.signature(function), {}
    _made.append(made)

    def key_of(*args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments.items())

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        key = key_of(*args, **kwargs)
        if key not in made:
            made[key] = function(*args, **kwargs)
        return made[key]

    wrapper.forget = lambda *args, **kwargs: made.pop(key_of(*args, **kwargs), None)
    return wrapper


def warmed(runner: Runner) -> Runner:
    """The runner, compiled. Workers that want the same one wait for the first: loading takes a part of what compiling takes."""
    store = open_store(None)
    assert store is not None
    shapes = [(array.shape, str(array.dtype)) for array in jax.tree.leaves(runner.params)]
    asked = repr((runner.settings, runner.executables, shapes)).encode()
    with Path(store.folder, f".{hashlib.sha256(asked).hexdigest()[:16]}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        runner.warm_up()
    return runner


@cached
def tiny_runner(
    k: int = 0,
    *,
    skip_dead: bool = True,
    synthetic: float | None = None,
    mixed: bool = True,
    split: bool = False,
    kv: KVCacheDtype = "auto",
    weights: Quantization = "bf16",
) -> Runner:
    """With k > 0 a random NextN layer drafts: it is almost never right, which is the harder case for correctness.

    `synthetic`: the option synthetic_acceptance_length, with which windows of every length occur. `split`: the largest
    decode step also exists in two parts. `kv`: the option kv_cache_dtype; unless auto, for requests
    that need one lean bucket only. `weights`: what the MLPs of target and draft are quantised as. What is compiled is kept
    for the other workers and for the time after `forget_all`.
    """
    model, draft = declare(HF_CONFIG, np.dtype(np.float32), quantization=weights, kv_cache_dtype=kv)
    assert draft is not None
    mesh = Mesh(np.array(jax.devices()[:1]), ("tensor",))
    settings = dataclasses.replace(
        SETTINGS, num_speculative_tokens=k, synthetic_acceptance_length=synthetic, mixed=mixed
    )
    # As on a GPU, requests that need no more may run in a lean bucket; it also takes a third of the time to compile.
    smallest, *larger = bucket_table(settings)
    buckets = (dataclasses.replace(smallest, variant="lean"), *larger)
    if not mixed:  # for requests that need no more: one bucket for prompts and one for decoding
        buckets = tuple(dataclasses.replace(bucket, variant="lean") for bucket in larger)
    if kv != "auto":
        buckets = (dataclasses.replace(buckets[-1], variant="lean"),)
    runner = Runner(
        model,
        random_params(model, mesh, seed=3, randomize_norms=True),
        settings,
        mesh,
        draft=(draft, random_params(draft, mesh, seed=4, randomize_norms=True)) if k else None,
        skip_dead=skip_dead,
        # The largest holds every plan.
        buckets=buckets[-1:] if synthetic is not None or not skip_dead else buckets,
        split=tuple(b for b in larger if not b.prefill_tokens) if split else (),
        files=open_store(None),
    )
    return warmed(runner)


def fill_cache(runner: Runner, value: float) -> None:
    """Overwrites every page of target and draft, the padding page included."""
    state = runner.state
    kv, draft_kv = jax.tree.map(lambda a: jnp.full_like(a, value), (state.kv, state.draft_kv))
    runner.state = state._replace(kv=kv, draft_kv=draft_kv)


def make_engine(
    usable_pages: int | None = None,
    *,
    k: int = 0,
    skip_dead: bool = True,
    synthetic: float | None = None,
    split: bool = False,
    kv: KVCacheDtype = "auto",
    weights: Quantization = "bf16",
    **options,
) -> Engine:
    """An engine over the shared runner. Fewer usable pages force preemption without another compilation."""
    runner = tiny_runner(k, skip_dead=skip_dead, synthetic=synthetic, split=split, kv=kv, weights=weights)
    fill_cache(runner, 0.0)
    engine = Engine(runner, vocab_size=VOCAB, eos_token_ids=(EOS,), **options)
    if usable_pages is not None:
        engine.scheduler.pages.allocate(engine.scheduler.pages.num_free - usable_pages)
    return engine


def run(engine: Engine, requests: list[Request]):
    """All requests to their ends: ids, log-probabilities, finish reasons by request id."""
    ids, logprobs, ends = {r.id: [] for r in requests}, {r.id: [] for r in requests}, {}
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for out in engine.step():
            ids[out.request_id] += out.new_ids
            logprobs[out.request_id] += out.new_logprobs
            if out.finish_reason:
                ends[out.request_id] = (out.finish_reason.value, out.error)
    return ids, logprobs, ends
