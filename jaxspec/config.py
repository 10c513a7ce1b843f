"""Engine options as users give them (`EngineConfig`), and resolved for a model and a device (`Settings`)."""

import difflib
import numbers
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

import numpy as np

from jaxspec.defaults import drafts_by_load, token_budget
from jaxspec.errors import ConfigError, flagged, shown
from jaxspec.lookup import LOOKUPS, MAX_LOOKUP, Lookup, lookup_of
from jaxspec.pool import PAGE_SIZE, pages_for, pool_pages

DEFAULT_STATE_INTERVAL = 1024
# Kernels support query windows of at most 8 tokens: the newest one and its drafts.
MAX_SPECULATIVE_TOKENS = 7
# More never helps: one step ahead already hides the host.
MAX_READOUT_DEPTH = 3
# Drafts a step where the user does not say: the published heads are trained for about three steps.
DEFAULT_SPECULATIVE_TOKENS = 3


def _option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class EngineConfig:
    """Options of an engine. None leaves the choice to the engine, which knows the model and the device."""

    max_model_len: int | None = _option(
        None,
        "longest prompt plus output, in tokens (default: the model's limit; at most 4096 on a CPU, and on a GPU the index_topk "
        "of models that choose their keys)",
    )
    max_num_seqs: int | None = _option(None, "most requests running at once (default: 128 on a GPU, 8 on a CPU)")
    max_num_batched_tokens: int | None = _option(
        None, "tokens of one step; longer prompts come in chunks (default: 4096, 2048 with drafts by load; CPU: 256)"
    )
    enable_mixed_batch: bool = _option(
        True, "let a step prefill and decode; without it a step does one or the other, prompts first"
    )
    max_prefill_delay_steps: int = _option(
        0,
        "with data_parallel_size: most steps for which new prompts wait, while others decode, until every rank has one",
    )
    readout_depth: int | None = _option(
        None, "steps queued on the device before the output of an earlier one is read, 0 to 3 (default: 1; CPU: 0)"
    )
    enable_prefix_caching: bool | None = _option(
        None,
        "share the KV pages of prompts that begin alike, and of recurrent layers the states after them (default: on)",
    )
    state_snapshots: int | None = _option(
        None, "recurrent layers: most states that are kept for requests that begin alike (default: max_num_seqs)"
    )
    state_interval: int | None = _option(
        None,
        "recurrent layers: states of a prompt are kept after so many tokens, a multiple of the 64 of a page, after twice as "
        f"many, four times and so on, besides those before its end (default: {DEFAULT_STATE_INTERVAL})",
    )
    log_steps: str | None = _option(None, "file to which every step is written as a line of JSON, for `bench timeline`")
    num_gpu_blocks_override: int | None = _option(
        None, f"number of KV pages of {PAGE_SIZE} tokens, including the padding page (default: as many as fit)"
    )
    gpu_memory_utilization: float = _option(0.9, "fraction of the GPU's memory for weights and KV pages together")
    dtype: Literal["auto", "bfloat16", "float32"] = _option(
        "auto", "type of weights, activations and KV pages (auto: bfloat16 on a GPU, float32 on a CPU)"
    )
    kv_cache_dtype: Literal["auto", "bf16", "fp8"] = _option(
        "auto",
        "type of KV pages: bf16, fp8 (latents of multi-head latent attention in e4m3 with a scale for each 128 columns, 656 "
        "bytes a token and layer instead of 1152), or auto, that of --dtype",
    )
    num_speculative_tokens: int | None = _option(
        None,
        "tokens drafted per step, 0 to 7; 0 turns speculation off (default: 3 with a draft, a method or demo, else 0)",
    )
    speculative_method: (
        Literal["mtp", "eagle3", "ngram", "suffix", "ngram+mtp", "ngram+eagle3", "suffix+mtp", "suffix+eagle3"] | None
    ) = _option(
        None,
        "what proposes tokens: mtp (the model's NextN layer), eagle3 (speculative_model), ngram or suffix (the request's own "
        "text, without a model), or two of them (default: eagle3 with a speculative_model, else mtp)",
    )
    speculative_token_map: str | None = _option(
        None,
        "a file of JSON with token ids, the most frequent first, or counts by token id: the draft model proposes these only "
        "(default: all that it can)",
    )
    speculative_vocab_size: int | None = _option(
        None, "how many tokens of the speculative_token_map the draft model proposes (default: all of the file)"
    )
    prompt_lookup_max: int | None = _option(
        None, "ngram and suffix: how many of the last tokens are compared with earlier text (default: 4 and 24)"
    )
    prompt_lookup_min: int | None = _option(
        None, "ngram and suffix: how many of them must be equal there (default: 2 and 1; beside a draft model 3)"
    )
    adaptive_speculation: bool | None = _option(
        None,
        "choose the drafts of a step, none to num_speculative_tokens, by load and acceptance (default: on one GPU)",
    )
    speculative_model: str | None = _option(
        None,
        "an EAGLE3 draft: a folder, a hub id, demo/eagle3-llama or demo/eagle3-mla (default: the model's NextN layer)",
    )
    speculative_capture_layers: tuple[int, ...] | None = _option(
        None, "target layers that the EAGLE3 draft reads, numbered as in its config.json (default: those named there)"
    )
    synthetic_acceptance_length: float | None = _option(
        None,
        "for benchmarks only, the text is worthless: accept drafts at random, so that a step yields this many tokens on "
        "average (1 to 1 + num_speculative_tokens)",
    )
    synthetic_acceptance_pattern: Literal["first", "each"] = _option(
        "first",
        "how drafts are accepted at random: the first ones in every step (first), or one by one with one probability, as by "
        "a draft that is equally good at each (each)",
    )
    attention_backend: Literal["auto", "mosaic", "triton", "reference"] = _option(
        "auto",
        "attention kernels: mosaic (Hopper, bfloat16), triton (Ampere or newer; for decoding, the rest runs as with auto), "
        "reference (plain XLA), or auto, the fastest that the device and the model support",
    )
    moe_backend: Literal["auto", "mosaic", "reference", "reference_w8a8"] = _option(
        "auto",
        "kernels of routed experts and quantised MLPs: mosaic (Hopper, bfloat16), reference (plain XLA), reference_w8a8 "
        "(plain XLA that rounds what FP8 weights multiply to FP8, as Hopper's kernels do), or auto",
    )
    tensor_parallel_size: int = _option(1, "devices over which attention heads and experts are split")
    data_parallel_size: int = _option(
        1, "ranks of tensor_parallel_size devices over which requests are split, with enable_expert_parallel"
    )
    enable_expert_parallel: bool = _option(False, "split routed experts over all ranks (within one they always are)")
    expert_load_metrics: bool = _option(
        False,
        "count in every step how many tokens each mixture layer sends to each expert, for /metrics (costs a second routing)",
    )
    compilation_cache_dir: str | None = _option(
        None,
        "folder for compiled steps (default: executables in $JAXSPEC_CACHE or ~/.cache/jaxspec; off: keep none)",
    )
    seed: int = _option(0, "seed that requests without one draw theirs from")

    def __post_init__(self):
        for option, (least, most) in _WHOLE_NUMBERS.items():
            self._check_whole(option, least, most)
        for option in _SWITCHES:
            if (value := getattr(self, option)) is not None and not isinstance(value, bool):
                raise ConfigError(f"{flagged(option)} must be True or False, got {shown(value)}")
        for option in ("log_steps", "speculative_model", "speculative_token_map", "compilation_cache_dir"):
            if (value := getattr(self, option)) is not None and not (
                isinstance(value, (str, os.PathLike)) and str(value)
            ):
                raise ConfigError(f"{flagged(option)} must be a text, got {shown(value)}")
        for option in ("gpu_memory_utilization", "synthetic_acceptance_length"):
            if (value := getattr(self, option)) is not None and not _is_number(value):
                raise ConfigError(f"{flagged(option)} must be a number, got {shown(value)}")
        for option, choices in _CHOICES.items():
            if getattr(self, option) not in choices:
                *others, last = choices
                given = shown(getattr(self, option))
                raise ConfigError(f"{flagged(option)} must be {', '.join(others)} or {last}, got {given}")
        if self.state_interval is not None and self.state_interval % PAGE_SIZE:
            raise ConfigError(
                f"{flagged('state_interval')} must be a multiple of the {PAGE_SIZE} tokens of a page, got {self.state_interval}"
            )
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigError(
                f"{flagged('gpu_memory_utilization')} must be in (0, 1], got {self.gpu_memory_utilization}"
            )
        if self.num_speculative_tokens == 0 and self.speculative_model is not None:
            raise ConfigError(
                f"{flagged('num_speculative_tokens')} is 0, but {flagged('speculative_model')} names a draft: "
                "leave one of them out"
            )
        self._check_capture_layers()
        self._check_method()

    def _check_whole(self, option: str, least: int, most: int) -> None:
        value = getattr(self, option)
        if value is None and _DEFAULTS[option] is None:
            return
        if not isinstance(value, numbers.Integral) or isinstance(value, bool):
            raise ConfigError(f"{flagged(option)} must be a whole number, got {shown(value)}")
        number = int(value)
        if not least <= number <= most:
            # Most limits above are far from what anybody means.
            wanted = f"between {least} and {most}" if most < _FAR or number > most else f"at least {least}"
            note = " (one page is for padding)" if option == "num_gpu_blocks_override" and number < least else ""
            raise ConfigError(f"{flagged(option)} must be {wanted}{note}, got {shown(value)}")

    def _check_capture_layers(self) -> None:
        layers = self.speculative_capture_layers
        if layers is not None and not (
            isinstance(layers, (tuple, list)) and all(type(i) is int and abs(i) < _FAR for i in layers)
        ):
            raise ConfigError(f"{flagged('speculative_capture_layers')} must be layer numbers, got {shown(layers)}")

    @property
    def lookup(self) -> Lookup | None:
        """How drafts are looked up, where the method says so."""
        if not self.num_speculative_tokens or self.speculative_method is None:
            return None
        return lookup_of(self.speculative_method, self.prompt_lookup_min, self.prompt_lookup_max)

    def _check_method(self) -> None:
        method = self.speculative_method
        if method is not None and method not in SPECULATIVE_METHODS:
            *others, last = SPECULATIVE_METHODS
            raise ConfigError(
                f"{flagged('speculative_method')} must be {', '.join(others)} or {last}, got {shown(method)}"
            )
        kinds = (method or "").split("+")
        if "eagle3" in kinds and self.speculative_model is None:
            raise ConfigError(
                f"{flagged('speculative_method')} {method} needs a draft: name one with {flagged('speculative_model')}"
            )
        if method and "eagle3" not in kinds and self.speculative_model is not None:
            raise ConfigError(
                f"{flagged('speculative_method')} {method} uses no draft model, but {flagged('speculative_model')} names one: "
                f"leave it out, or use {'eagle3' if method == 'mtp' else kinds[0] + '+eagle3'}"
            )
        if self.speculative_vocab_size is not None and self.speculative_token_map is None:
            raise ConfigError(
                f"{flagged('speculative_vocab_size')} needs the tokens to choose from: give {flagged('speculative_token_map')}"
            )
        least, most = self.prompt_lookup_min, self.prompt_lookup_max
        if kinds[0] not in LOOKUPS and (least, most) != (None, None):
            given = "prompt_lookup_max" if least is None else "prompt_lookup_min"
            raise ConfigError(
                f"{flagged(given)} is for {flagged('speculative_method')} ngram or suffix: choose one of them"
            )
        if least is not None and most is not None and least > most:
            raise ConfigError(
                f"{flagged('prompt_lookup_min')} {least} is over {flagged('prompt_lookup_max')} {most}: lower the first or "
                "raise the second"
            )


def with_options(config: EngineConfig, options: Mapping[str, Any]) -> EngineConfig:
    """The configuration with single options changed.

    Raises:
        ConfigError: there is no such option, or its value cannot work.
    """
    for option in options:
        if option not in _DEFAULTS:
            close = difflib.get_close_matches(option, _DEFAULTS, n=1)
            hint = f"did you mean {close[0]}?" if close else "EngineConfig lists all"
            raise ConfigError(f"unknown option {shown(option)} ({hint})")
    return replace(config, **options)


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


SPECULATIVE_METHODS = (
    "mtp",
    "eagle3",
    *LOOKUPS,
    *(f"{kind}+{model}" for kind in LOOKUPS for model in ("mtp", "eagle3")),
)
_DEFAULTS = {option.name: option.default for option in fields(EngineConfig)}
_FAR = 2**16
_SWITCHES = (
    "enable_mixed_batch", "enable_prefix_caching", "adaptive_speculation", "enable_expert_parallel", "expert_load_metrics",
)  # fmt: skip
_WHOLE_NUMBERS = {
    "max_model_len": (1, 2**30),
    "max_num_seqs": (1, 2**16),
    "max_num_batched_tokens": (1, 2**24),
    "num_gpu_blocks_override": (2, 2**31 - 1),
    "max_prefill_delay_steps": (0, 2**16),
    "readout_depth": (0, MAX_READOUT_DEPTH),
    "state_snapshots": (1, 2**16),
    "state_interval": (PAGE_SIZE, 2**24),
    "num_speculative_tokens": (0, MAX_SPECULATIVE_TOKENS),
    "speculative_vocab_size": (1, 2**24),
    "prompt_lookup_max": (1, MAX_LOOKUP),
    "prompt_lookup_min": (1, MAX_LOOKUP),
    "tensor_parallel_size": (1, 2**16),
    "data_parallel_size": (1, 2**16),
    "seed": (-(2**63), 2**64 - 1),
}
_CHOICES = {
    "dtype": ("auto", "bfloat16", "float32"),
    "kv_cache_dtype": ("auto", "bf16", "fp8"),
    "synthetic_acceptance_pattern": ("first", "each"),
    "attention_backend": ("auto", "mosaic", "triton", "reference"),
    "moe_backend": ("auto", "mosaic", "reference", "reference_w8a8"),
}


@dataclass(frozen=True)
class Settings:
    """Options resolved for one model on one device.

    Attributes:
        max_slots: rows of the device state: max_num_seqs and the padding slot 0.
        num_pages: pages of the pool, the padding page 0 included.
        adaptive_drafts: steps may have fewer drafts than num_speculative_tokens: one, or none.
        lookup: where drafts are looked up, how.
        window: most tokens of a decode row: the newest one and its drafts.
        max_pages: pages that the longest request can hold: columns of the page table.
        mixed: prompt chunks and decode rows may share a step.
        max_prefill_delay_steps: see `PrefillDelay`.
        readout_depth: most steps that may be unread when the next one is dispatched.
        state_snapshots: states that are kept for later requests, of a model whose layers do not keep all in pages.
        state_interval: the first number of tokens after which a prompt is cut to keep its state: see `snapshots.next_cut`.
        data_parallel_size: ranks, each with requests, slots, pages and a token budget: all numbers here are a rank's.
        expert_load_metrics: steps count how many tokens each expert gets (see `ExpertLoad`).
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_pages: int
    dtype: str
    on_gpu: bool
    num_speculative_tokens: int = 0
    adaptive_drafts: bool = False
    lookup: Lookup | None = None
    synthetic_acceptance_length: float | None = None
    synthetic_acceptance_pattern: Literal["first", "each"] = "first"
    mixed: bool = True
    max_prefill_delay_steps: int = 0
    readout_depth: int = 0
    prefix_caching: bool = True
    state_snapshots: int = 0
    state_interval: int = DEFAULT_STATE_INTERVAL
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    expert_load_metrics: bool = False
    page_size: int = PAGE_SIZE
    attention_backend: str = "auto"
    moe_backend: str = "auto"

    @property
    def max_slots(self) -> int:
        return self.max_num_seqs + 1

    @property
    def window(self) -> int:
        return self.num_speculative_tokens + 1

    @property
    def model_drafts(self) -> bool:
        """A model proposes tokens, and keeps KV of its own for that."""
        return self.num_speculative_tokens > 0 and (self.lookup is None or self.lookup.beside_model)

    @property
    def max_pages(self) -> int:
        return pages_for(self.max_model_len, self.page_size)


def resolve_dtype(config: EngineConfig, *, on_gpu: bool) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if on_gpu else "float32"


def context_length(config: EngineConfig, *, model_max_position: int, index_topk: int | None, on_gpu: bool) -> int:
    """Tokens at which contexts end.

    Args:
        index_topk: see `ModelConfig`. By default a GPU's kernels get no more: longer contexts have to be asked for.

    Raises:
        ConfigError: the model does not take as many as were asked for.
    """
    default = model_max_position if on_gpu else min(model_max_position, 4096)
    if index_topk and on_gpu and config.attention_backend != "reference":
        default = min(default, index_topk)
    length = config.max_model_len or default
    if length > model_max_position:
        raise ConfigError(
            f"{flagged('max_model_len')} {length} is over the model's own limit of {model_max_position} tokens"
        )
    return length


def resolve(
    config: EngineConfig,
    *,
    model_max_position: int,
    index_topk: int | None = None,
    page_bytes: int,
    free_bytes: int,
    on_gpu: bool,
    paged: bool = True,
    rejects: bool = True,
) -> Settings:
    """Turns options into settings.

    Args:
        index_topk: see `context_length`.
        page_bytes: bytes of one KV page over all layers, on one device.
        free_bytes: bytes that KV pages may take on one device.
        paged: pages hold all that the model's layers keep between steps (see `CacheSpec`).
        rejects: what they keep allows for rejected drafts (see `CacheSpec`).

    Raises:
        ConfigError: options that contradict the model or each other; the text names the option to change.
    """
    max_model_len = context_length(config, model_max_position=model_max_position, index_topk=index_topk, on_gpu=on_gpu)
    max_num_seqs = config.max_num_seqs or (128 if on_gpu else 8)
    k, devices = config.num_speculative_tokens or 0, config.tensor_parallel_size * config.data_parallel_size
    by_load = config.adaptive_speculation
    adaptive = k > 0 and (drafts_by_load(devices, on_gpu=on_gpu) if by_load is None else by_load)
    budget = config.max_num_batched_tokens or token_budget(adaptive, max_num_seqs * (k + 1), on_gpu=on_gpu)
    _check_speculation(config, max_num_seqs, budget, rejects=rejects)
    prefix_caching = config.enable_prefix_caching is not False
    _check_states(config, prefix_caching, paged)
    if config.max_prefill_delay_steps and config.data_parallel_size == 1:
        raise ConfigError(
            f"{flagged('max_prefill_delay_steps')} is for prompts of several ranks: leave it out, or raise "
            f"{flagged('data_parallel_size')} above 1"
        )
    num_pages = pool_pages(
        config.num_gpu_blocks_override, max_num_seqs=max_num_seqs, max_model_len=max_model_len, page_bytes=page_bytes,
        free_bytes=free_bytes,
    )  # fmt: skip
    return Settings(
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        num_pages=num_pages,
        dtype=resolve_dtype(config, on_gpu=on_gpu),
        num_speculative_tokens=k,
        lookup=config.lookup,
        adaptive_drafts=adaptive,
        synthetic_acceptance_length=config.synthetic_acceptance_length,
        synthetic_acceptance_pattern=config.synthetic_acceptance_pattern,
        mixed=config.enable_mixed_batch,
        max_prefill_delay_steps=config.max_prefill_delay_steps,
        readout_depth=int(on_gpu) if config.readout_depth is None else config.readout_depth,
        prefix_caching=prefix_caching,
        state_snapshots=(config.state_snapshots or max_num_seqs) if prefix_caching and not paged else 0,
        state_interval=config.state_interval or DEFAULT_STATE_INTERVAL,
        tensor_parallel_size=config.tensor_parallel_size,
        data_parallel_size=config.data_parallel_size,
        expert_load_metrics=config.expert_load_metrics,
        on_gpu=on_gpu,
        attention_backend=config.attention_backend,
        moe_backend=config.moe_backend,
    )


def _check_speculation(config: EngineConfig, max_num_seqs: int, max_num_batched_tokens: int, *, rejects: bool) -> None:
    if config.num_speculative_tokens and not rejects:
        raise ConfigError(
            f"{flagged('num_speculative_tokens')} {config.num_speculative_tokens}: this model keeps a state for each "
            "request that cannot go back after a rejected draft; use 0"
        )
    window = (config.num_speculative_tokens or 0) + 1
    if max_num_batched_tokens < max_num_seqs * window:
        raise ConfigError(
            f"{flagged('max_num_batched_tokens')} {max_num_batched_tokens} is under {flagged('max_num_seqs')} "
            f"{max_num_seqs} times {window}: a step could not hold {window} token{'s' if window > 1 else ''} of every "
            "running request; raise the first or lower the second"
        )
    synthetic = config.synthetic_acceptance_length
    if synthetic is not None and config.lookup is not None:
        raise ConfigError(
            f"{flagged('synthetic_acceptance_length')} needs a model that always drafts, and {flagged('speculative_method')} "
            f"{config.speculative_method} drafts where it finds something: leave one of them out"
        )
    if synthetic is None and config.synthetic_acceptance_pattern != "first":
        raise ConfigError(f"{flagged('synthetic_acceptance_pattern')} needs {flagged('synthetic_acceptance_length')}")
    if synthetic is not None and not (window > 1 and 1 <= synthetic <= window):
        raise ConfigError(
            f"{flagged('synthetic_acceptance_length')} must be between 1 and {window} (num_speculative_tokens and the "
            f"target's own token), got {synthetic:g}"
            if window > 1
            else f"{flagged('synthetic_acceptance_length')} needs speculation: num_speculative_tokens of at least 1"
        )


def _check_states(config: EngineConfig, prefix_caching: bool, paged: bool) -> None:
    for option in ("state_snapshots", "state_interval"):
        if getattr(config, option) is not None and (paged or not prefix_caching):
            why = (
                "this model keeps no states: pages hold all of it" if paged else "no prefix is shared, so none are kept"
            )
            raise ConfigError(
                f"{flagged(option)} is for states that later requests go on from, and {why}; leave it out"
            )


def np_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a Settings dtype; bfloat16 comes from ml_dtypes, which jax registers."""
    import jax.numpy as jnp

    return np.dtype(jnp.dtype(name))
