"""The usual flags of `vllm serve` and of SGLang's server, and what each of them is here: one table.

`serve/peers.py` puts it into the parser, docs/flags.md prints it, and a test runs every row.
"""

from dataclasses import dataclass
from typing import Any, Literal

VLLM, SGLANG, BOTH = "vLLM", "SGLang", "both"


@dataclass(frozen=True)
class Same:
    """Our own flag has this name and this meaning."""

    note: str = ""


@dataclass(frozen=True)
class Alias:
    """Another name of our flag `to`, with the same values."""

    to: str
    note: str = ""


@dataclass(frozen=True)
class Switch:
    """A switch that stands for a value of our flag. `shown` is how our flag is written for it."""

    option: str
    value: Any
    shown: str


@dataclass(frozen=True)
class Collected:
    """Translated together with other flags, in `serve/peers.py`. `shown` says into what."""

    option: str
    shown: str


@dataclass(frozen=True)
class Variable:
    """A variable of the environment that a library reads; `values` are those that may be given (default: any)."""

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ignored:
    """Accepted without effect, with one warning line that gives the reason."""

    reason: str


@dataclass(frozen=True)
class Refused:
    """An error that says what to use instead. Values in `passes` ask for nothing that is not so here."""

    instead: str
    passes: tuple[str, ...] = ()


Here = Same | Alias | Switch | Collected | Variable | Ignored | Refused


@dataclass(frozen=True)
class PeerFlag:
    """
    Attributes:
        names: its spellings. Those with one dash are translated into the first with two.
        values: how many values it takes, as argparse's `nargs` has it.
        example: values as a user would give them.
    """

    names: tuple[str, ...]
    peers: Literal["vLLM", "SGLang", "both"]
    here: Here
    values: Literal[0, 1, "?", "+"]
    example: tuple[str, ...]

    @property
    def long_names(self) -> tuple[str, ...]:
        return tuple(name for name in self.names if name.startswith("--"))


def _flag(names: str, peers: Any, here: Here, example: str = "", values: Any = None) -> PeerFlag:
    """`example` without a value makes a switch; one that takes many is given `values`."""
    words = tuple(example.split())
    return PeerFlag(tuple(names.split()), peers, here, values or (1 if words else 0), words)


_ONE_HOST = "one process serves one host; run several servers and balance over them"
_NO_GRAMMARS = "grammars are compiled by llguidance"
_OWN_KERNELS = "the kernels are jaxspec's own; see --attention-backend and --moe-backend"
_GRAPHS = "a step is one executable, compiled before the server is ready; on a GPU it runs as one CUDA graph"
_NO_MEDIA = "images, audio and video are not accepted"

MODEL = "MODEL"  # stands for the argument of `jaxspec serve`, which has no dashes

PEER_FLAGS: tuple[PeerFlag, ...] = (
    # --- the model ---
    _flag("--model --model-path", BOTH, Collected("model_flag", MODEL), "demo"),
    _flag("--served-model-name", BOTH, Same(), "name"),
    _flag("--revision", BOTH, Same(), "main"),
    _flag("--tokenizer --tokenizer-path", BOTH, Collected("tokenizer_flag", "an error unless it is MODEL"), "demo"),
    _flag(
        "--tokenizer-revision --code-revision",
        VLLM,
        Refused("--revision is for weights, configuration and tokenizer alike"),
        "main",
    ),
    _flag("--tokenizer-mode", BOTH, Refused("leave it out: tokenizers are fast ones", ("auto",)), "slow"),
    _flag("--trust-remote-code", BOTH, Ignored("code of a checkpoint is never run, and no supported model needs any")),
    _flag("--dtype", BOTH, Same("half and float16 are an error: use bfloat16; float is float32"), "bfloat16"),
    _flag(
        "--quantization -q",
        BOTH,
        Refused("leave it out: weights are served as the checkpoint or `jaxspec convert --quantization` stores them"),
        "fp8",
    ),
    _flag(
        "--kv-cache-dtype",
        BOTH,
        Same("bfloat16 is bf16, fp8_e4m3 is fp8; other types of theirs are an error"),
        "fp8_e4m3",
    ),
    _flag("--load-format", BOTH, Refused("only safetensors are read", ("auto", "safetensors")), "dummy"),
    _flag(
        "--hf-overrides --json-model-override-args",
        BOTH,
        Refused("change config.json in a copy of the model's folder"),
        "{}",
    ),
    _flag("--hf-token", VLLM, Variable("HF_TOKEN"), "hf_abc"),
    _flag("--download-dir", BOTH, Variable("HF_HUB_CACHE"), "/models"),
    _flag("--chat-template", BOTH, Same("a file or the Jinja text"), "template.jinja"),
    _flag(
        "--chat-template-content-format",
        VLLM,
        Refused("text parts are joined into one text", ("auto", "string")),
        "openai",
    ),
    _flag("--generation-config", VLLM, Same("none is vllm"), "vllm"),
    _flag(
        "--override-generation-config",
        VLLM,
        Same("temperature, top_p, top_k, min_p and repetition_penalty"),
        '{"top_k":5}',
    ),
    _flag("--preferred-sampling-params", SGLANG, Alias("--override-generation-config"), '{"top_p":0.9}'),
    _flag(
        "--sampling-defaults",
        SGLANG,
        Collected("sampling_defaults", "`--generation-config`: auto for model, none for openai"),
        "openai",
    ),
    _flag(
        "--rope-scaling --rope-theta --hf-config-path",
        VLLM,
        Refused("change config.json in a copy of the model's folder"),
        "{}",
    ),
    _flag("--model-impl", BOTH, Refused("the models are jaxspec's own", ("auto",)), "transformers"),
    _flag("--model-loader-extra-config", BOTH, Ignored("safetensors are read in one way"), "{}"),
    _flag("--skip-tokenizer-init", BOTH, Refused("leave the tokenizer out of the model's folder: then ids are served")),
    _flag(
        "--logits-processors --enable-custom-logit-processor",
        BOTH,
        Refused("no code of users runs in the server"),
        "module.Class",
        "?",
    ),
    _flag("--task", VLLM, Refused("only text is generated", ("auto", "generate")), "embed"),
    _flag("--runner", VLLM, Refused("only text is generated", ("auto", "generate")), "pooling"),
    _flag("--is-embedding", SGLANG, Refused("only text is generated")),
    _flag("--enable-lora", BOTH, Refused("merge the adapter into the weights first")),
    _flag("--lora-modules --lora-paths", BOTH, Refused("merge the adapters into the weights first"), "a=b", "+"),
    _flag("--limit-mm-per-prompt --mm-processor-kwargs", VLLM, Ignored(_NO_MEDIA), '{"image":1}'),
    # --- lengths, memory, scheduling ---
    _flag("--max-model-len", VLLM, Same("sizes may be written 4k (4000) or 4K (4096)"), "4k"),
    _flag("--context-length", SGLANG, Alias("--max-model-len"), "4096"),
    _flag("--gpu-memory-utilization", VLLM, Same(), "0.9"),
    _flag("--mem-fraction-static", SGLANG, Alias("--gpu-memory-utilization"), "0.85"),
    _flag(
        "--kv-cache-memory-bytes",
        VLLM,
        Refused("use --gpu-memory-utilization, or --num-gpu-blocks-override for a number of pages"),
        "10G",
    ),
    _flag("--num-gpu-blocks-override", VLLM, Same("pages of 64 tokens"), "100"),
    _flag("--max-total-tokens", SGLANG, Collected("max_total_tokens", "--num-gpu-blocks-override, in pages"), "100000"),
    _flag("--max-num-seqs", VLLM, Same(), "64"),
    _flag("--max-running-requests", SGLANG, Alias("--max-num-seqs"), "64"),
    _flag("--max-queued-requests", SGLANG, Alias("--max-num-queued-requests"), "256"),
    _flag("--watchdog-timeout", SGLANG, Alias("--engine-timeout"), "300"),
    _flag("--max-num-batched-tokens", VLLM, Same(), "8192"),
    _flag("--chunked-prefill-size", SGLANG, Alias("--max-num-batched-tokens", "-1 is an error"), "8192"),
    _flag("--max-prefill-tokens", SGLANG, Ignored("the budget of a step is --max-num-batched-tokens"), "16384"),
    _flag("--enable-chunked-prefill", VLLM, Ignored("long prompts are always prefilled in chunks")),
    _flag(
        "--no-enable-chunked-prefill",
        VLLM,
        Refused("a prompt is one chunk where --max-num-batched-tokens is at least --max-model-len"),
    ),
    _flag("--prefill-delayer-max-delay-passes", SGLANG, Alias("--max-prefill-delay-steps"), "30"),
    _flag(
        "--enable-prefill-delayer",
        SGLANG,
        Ignored("prompts wait where --max-prefill-delay-steps says for how long"),
    ),
    _flag("--enable-mixed-chunk", SGLANG, Switch("enable_mixed_batch", True, "--enable-mixed-batch")),
    _flag("--enable-prefix-caching --no-enable-prefix-caching", VLLM, Same()),
    _flag("--disable-radix-cache", SGLANG, Switch("enable_prefix_caching", False, "--no-enable-prefix-caching")),
    _flag(
        "--prefix-caching-hash-algo", VLLM, Ignored("prefixes are compared by their tokens, not by a hash"), "sha256"
    ),
    _flag("--mamba-block-size", VLLM, Alias("--state-interval"), "1024"),
    _flag("--mamba-cache-mode", VLLM, Ignored("see --enable-prefix-caching and --state-interval"), "align"),
    _flag(
        "--mamba-cache-dtype",
        VLLM,
        Refused("leave it out: convolutions keep what they read in the type of activations", ("auto",)),
        "float32",
    ),
    _flag("--mamba-ssm-cache-dtype --mamba-ssm-dtype", BOTH, Refused("states are float32", ("float32",)), "bfloat16"),
    _flag(
        "--max-mamba-cache-size --mamba-full-memory-ratio",
        SGLANG,
        Ignored("there is a state for each of --max-num-seqs requests, and --state-snapshots are kept"),
        "100",
    ),
    _flag("--mamba-scheduler-strategy", SGLANG, Ignored("states are kept in one way"), "extra_buffer"),
    _flag("--enable-hierarchical-cache", SGLANG, Refused("KV pages stay on the device")),
    _flag("--disable-chunked-prefix-cache", SGLANG, Ignored("it names a kernel of SGLang")),
    _flag("--enable-priority-scheduling", SGLANG, Ignored("requests run by their priority, lower values first")),
    _flag("--num-scheduler-steps --num-continuous-decode-steps", BOTH, Ignored("see --readout-depth"), "8"),
    _flag(
        "--enable-deterministic-inference",
        SGLANG,
        Ignored("with a seed the text does not depend on the batch: exactly in float32, up to near-ties in bfloat16"),
    ),
    _flag("--enable-sleep-mode", VLLM, Refused("stop the server to free the device")),
    _flag("--swap-space", VLLM, Ignored("nothing is swapped: a preempted request is prefilled again"), "4"),
    _flag("--cpu-offload-gb", BOTH, Refused("weights stay on the device: use more devices", ("0",)), "10"),
    _flag("--block-size --page-size", BOTH, Ignored("a page always holds 64 tokens"), "16"),
    _flag(
        "--scheduling-policy --schedule-policy",
        BOTH,
        Ignored("requests run by their priority, equal ones as they arrive"),
        "priority",
    ),
    _flag(
        "--schedule-conservativeness",
        SGLANG,
        Ignored("a request that finds no page is preempted and goes on later"),
        "1.0",
    ),
    _flag("--async-scheduling", VLLM, Ignored("steps are planned ahead as --readout-depth says, by default on a GPU")),
    _flag("--no-async-scheduling --disable-overlap-schedule", BOTH, Switch("readout_depth", 0, "--readout-depth 0")),
    _flag("--stream-interval", BOTH, Ignored("an event carries all tokens that have arrived"), "1"),
    _flag("--seed", VLLM, Same(), "1"),
    _flag("--random-seed", SGLANG, Alias("--seed"), "1"),
    _flag("--max-logprobs", VLLM, Ignored("a request may ask for at most 20"), "20"),
    _flag("--allow-auto-truncate", SGLANG, Refused("a prompt over the context is answered 400: cut it in the client")),
    # --- devices ---
    _flag("--tensor-parallel-size -tp", BOTH, Same(), "1"),
    _flag("--tp --tp-size", SGLANG, Alias("--tensor-parallel-size"), "1"),
    _flag("--pipeline-parallel-size -pp --pp-size --pp", BOTH, Refused("use --tensor-parallel-size", ("1",)), "2"),
    _flag("--data-parallel-size -dp", BOTH, Same("of mixtures of experts, with --enable-expert-parallel"), "2"),
    _flag("--dp --dp-size", SGLANG, Alias("--data-parallel-size"), "2"),
    _flag("--enable-expert-parallel -ep", VLLM, Same("without --data-parallel-size experts are split in any case")),
    _flag(
        "--expert-parallel-size --ep-size --ep",
        SGLANG,
        Ignored("experts are split over all devices"),
        "8",
    ),
    _flag(
        "--decode-context-parallel-size -dcp --dcp-size", BOTH, Refused("every device keeps all KV pages", ("1",)), "2"
    ),
    _flag("--enable-eplb", BOTH, Ignored("experts are split evenly and stay where they are")),
    _flag("--enable-expert-distribution-metrics", SGLANG, Switch("expert_load_metrics", True, "--expert-load-metrics")),
    _flag(
        "--enable-dp-attention",
        SGLANG,
        Refused(
            "use --enable-expert-parallel with --data-parallel-size, the devices of a rank being --tensor-parallel-size"
        ),
    ),
    _flag("--nnodes --node-rank", BOTH, Same(), "1"),
    _flag("--dist-init-addr", SGLANG, Alias("--coordinator"), "10.0.0.1:5000"),
    _flag("--master-addr", VLLM, Collected("master_addr", "`--coordinator`, with `--master-port`"), "10.0.0.1"),
    _flag("--master-port", VLLM, Collected("master_port", "the port of `--coordinator`, by default 29501"), "29501"),
    _flag("--headless", VLLM, Ignored("processes with a --node-rank above 0 have no HTTP server")),
    _flag(
        "--distributed-executor-backend",
        VLLM,
        Refused("one process drives all devices: leave it out", ("mp", "uni")),
        "ray",
    ),
    _flag("--disable-custom-all-reduce", BOTH, Ignored("XLA chooses how devices exchange data")),
    _flag("--device", BOTH, Variable("JAX_PLATFORMS", ("cpu", "cuda")), "cpu"),
    _flag("--kv-transfer-config", VLLM, Refused("one process prefills and decodes"), "{}"),
    _flag("--disaggregation-mode", SGLANG, Refused("one process prefills and decodes", ("null",)), "prefill"),
    # --- compilation and kernels ---
    _flag("--enforce-eager --disable-cuda-graph", BOTH, Ignored(_GRAPHS)),
    _flag("--compilation-config -cc", VLLM, Ignored(_GRAPHS), "3"),
    _flag("--optimization-level -O", VLLM, Ignored(_GRAPHS), "3"),
    _flag("--max-seq-len-to-capture --max-cudagraph-capture-size", VLLM, Ignored(_GRAPHS), "8192"),
    _flag("--cuda-graph-max-bs --cuda-graph-bs --cudagraph-capture-sizes", BOTH, Ignored(_GRAPHS), "64", "+"),
    _flag("--enable-torch-compile --skip-server-warmup", SGLANG, Ignored(_GRAPHS)),
    _flag("--attention-backend", BOTH, Same("a backend of vLLM or SGLang is a warning, and auto"), "flashinfer"),
    _flag(
        "--prefill-attention-backend --decode-attention-backend --mm-attention-backend --sampling-backend",
        SGLANG,
        Ignored(_OWN_KERNELS),
        "fa3",
    ),
    _flag("--enable-flashinfer-mla --enable-flashmla --disable-shared-experts-fusion", SGLANG, Ignored(_OWN_KERNELS)),
    _flag("--moe-backend", VLLM, Same("auto, mosaic, reference or reference_w8a8"), "auto"),
    _flag("--moe-runner-backend --moe-a2a-backend", SGLANG, Ignored(_OWN_KERNELS), "triton"),
    # --- speculation ---
    _flag(
        "--speculative-config -sc",
        VLLM,
        Same("also --speculative-config.method and its other keys"),
        '{"method":"mtp"}',
    ),
    _flag("--speculative-model", VLLM, Same(), "demo/eagle3-mla"),
    _flag("--num-speculative-tokens", VLLM, Same(), "3"),
    _flag(
        "--speculative-algorithm",
        SGLANG,
        Collected("speculative_algorithm", "NEXTN, EAGLE, EAGLE3, NGRAM; others are an error"),
        "NEXTN",
    ),
    _flag(
        "--speculative-draft-model-path --speculative-draft-model",
        SGLANG,
        Alias("--speculative-model"),
        "demo/eagle3-mla",
    ),
    _flag("--ngram-prompt-lookup-max", VLLM, Alias("--prompt-lookup-max"), "4"),
    _flag("--ngram-prompt-lookup-min", VLLM, Alias("--prompt-lookup-min"), "2"),
    _flag("--speculative-ngram-max-match-window-size", SGLANG, Alias("--prompt-lookup-max"), "12"),
    _flag("--speculative-ngram-min-match-window-size", SGLANG, Alias("--prompt-lookup-min"), "1"),
    _flag("--speculative-num-steps", SGLANG, Collected("speculative_num_steps", "--num-speculative-tokens"), "3"),
    _flag(
        "--speculative-num-draft-tokens",
        SGLANG,
        Collected("speculative_num_draft_tokens", "--num-speculative-tokens and one"),
        "4",
    ),
    _flag("--speculative-eagle-topk", SGLANG, Refused("drafts are chains, not trees: use 1", ("1",)), "4"),
    _flag(
        "--speculative-accept-threshold-single --speculative-accept-threshold-acc",
        SGLANG,
        Refused("drafts are accepted without changing the distribution: use 1", ("1", "1.0")),
        "0.9",
    ),
    _flag("--speculative-draft-model-revision", SGLANG, Refused("download the draft and give its folder"), "main"),
    _flag("--speculative-token-map", SGLANG, Same("a file of JSON: a list of ids, or counts by id"), "map.json"),
    _flag("--speculative-attention-mode", SGLANG, Ignored(_OWN_KERNELS), "decode"),
    # --- what clients see ---
    _flag(
        "--enable-auto-tool-choice", VLLM, Ignored("tools work with every model whose template has a place for them")
    ),
    _flag("--tool-call-parser", BOTH, Same("by default the model's; names of both peers"), "deepseek_v3"),
    _flag("--reasoning-parser", BOTH, Same("by default the model's; names of both peers"), "deepseek_r1"),
    _flag("--guided-decoding-backend --grammar-backend", BOTH, Ignored(_NO_GRAMMARS), "xgrammar"),
    _flag("--structured-outputs-config", VLLM, Ignored(_NO_GRAMMARS), "{}"),
    _flag("--enable-prompt-tokens-details --enable-cache-report", BOTH, Ignored("usage always has the cached tokens")),
    _flag(
        "--enable-force-include-usage",
        VLLM,
        Refused("clients ask for usage with stream_options.include_usage"),
    ),
    _flag("--response-role", VLLM, Refused("the role is assistant", ("assistant",)), "bot"),
    # --- the server ---
    _flag("--host", BOTH, Same(), "127.0.0.1"),
    _flag("--port", BOTH, Same(), "8000"),
    _flag("--config", BOTH, Same("the same YAML: names of flags and their values")),
    _flag("--api-key", BOTH, Same(), "key"),
    _flag("--admin-api-key", SGLANG, Ignored("no path is for administrators only"), "key"),
    _flag("--h11-max-incomplete-event-size", VLLM, Ignored("the head of a request may have 16 KiB"), "65536"),
    _flag("--h11-max-header-count", VLLM, Ignored("the head of a request may have 16 KiB"), "256"),
    _flag("--root-path", VLLM, Same(), "/api"),
    _flag("--fastapi-root-path", SGLANG, Alias("--root-path"), "/api"),
    _flag("--ssl-certfile --ssl-keyfile --ssl-ca-certs --ssl-keyfile-password", BOTH, Same(), "file"),
    _flag("--ssl-cert-reqs", VLLM, Same(), "0"),
    _flag("--enable-ssl-refresh", BOTH, Refused("restart the server when the certificate changes")),
    _flag("--allowed-origins --allowed-methods --allowed-headers", VLLM, Same("off by default"), '["*"]'),
    _flag("--allow-credentials", VLLM, Same()),
    _flag("--middleware", VLLM, Refused("put a proxy in front of the server"), "module.Class"),
    _flag("--api-server-count --tokenizer-worker-num", BOTH, Refused(_ONE_HOST, ("1",)), "2"),
    _flag("--disable-fastapi-docs", VLLM, Ignored("there is no /docs page")),
    _flag("--enable-request-id-headers", VLLM, Ignored("every answer has x-request-id")),
    _flag("--log-level", SGLANG, Same(), "warning"),
    _flag("--uvicorn-log-level", VLLM, Same(), "warning"),
    _flag("--log-level-http", SGLANG, Alias("--uvicorn-log-level"), "warning"),
    _flag("--disable-uvicorn-access-log", VLLM, Switch("uvicorn_log_level", "warning", "--uvicorn-log-level warning")),
    _flag(
        "--disable-log-requests --no-enable-log-requests",
        VLLM,
        Ignored("prompts are never logged; --uvicorn-log-level warning leaves out the line of each request"),
    ),
    _flag(
        "--enable-log-requests --log-requests",
        BOTH,
        Ignored("each request is a line in the log, and prompts are never in it"),
    ),
    _flag("--log-requests-level --max-log-len", BOTH, Ignored("prompts are never logged"), "1"),
    _flag("--disable-log-stats", VLLM, Same()),
    _flag("--crash-dump-folder", SGLANG, Ignored("prompts are never written to a file"), "/tmp"),
    _flag("--decode-log-interval", SGLANG, Ignored("the line of throughput comes every 10 s"), "40"),
    _flag("--enable-metrics", SGLANG, Ignored("/metrics is always there; --metrics-prefix chooses the names")),
    _flag("--show-hidden-metrics-for-version", VLLM, Ignored("no metric is hidden"), "0.9"),
    _flag(
        "--otlp-traces-endpoint", BOTH, Refused("no traces are sent: use /metrics and x-request-id"), "http://host:4317"
    ),
)

# Values of --attention-backend of the peers that are not ours too, in lower case.
PEER_ATTENTION_BACKENDS = frozenset(
    (
        "aiter", "cutlass_mla", "fa3", "fa4", "flash_attn", "flash_attn_mla", "flashinfer", "flashinfer_mla", "flashmla",
        "flex_attention", "nsa", "torch_native", "torch_sdpa", "tree_attn", "triton_attn", "triton_mla", "trtllm_mha",
        "trtllm_mla", "wave", "xformers",
    )
)  # fmt: skip

# Flags with one dash, which argparse would take apart.
SHORT_NAMES = {
    name: flag.long_names[0] for flag in PEER_FLAGS for name in flag.names if name not in flag.long_names
}  # fmt: skip


def describe(here: Here) -> str:
    """What a flag is here, in the words of the docs."""
    match here:
        case Same(note):
            return "the same" + (f"; {note}" if note else "")
        case Alias(to, note):
            return f"`{to}`" + (f"; {note}" if note else "")
        case Switch(_, _, shown):
            return f"`{shown}`"
        case Collected(_, shown):
            return shown
        case Variable(name, values):
            return f"sets `${name}`" + (f"; {' or '.join(values)}" if values else "")
        case Ignored(reason):
            return f"no effect, with a warning: {reason}"
        case Refused(instead, passes):
            unless = f" unless {' or '.join(passes)}" if passes else ""
            return f"an error{unless}: {instead}"


def markdown() -> str:
    """The table of docs/flags.md."""
    lines = ["| flag | of | here |", "|---|---|---|"]
    for flag in PEER_FLAGS:
        lines.append(f"| {', '.join(f'`{name}`' for name in flag.names)} | {flag.peers} | {describe(flag.here)} |")
    return "\n".join(lines)
