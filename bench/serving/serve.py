"""`bench serve`: load on an OpenAI-compatible server, measured at the client, where the users are.

The server is the one at --url, or a `jaxspec serve` of this checkout that runs as long as the benchmark and is given the
flags after `--`. Prompts are random token ids (texts with --tokenizer). Each length is a number or drawn evenly from
MIN:MAX; the same seed sends the same requests at the same times. Requests arrive at random with a mean rate
(--request-rate, Poisson arrivals, whether earlier ones have ended or not), or a number of them is kept running
(--concurrency). With --profile the load is that of a kind of use: see bench/serving/profiles.py.

Reported of complete answers, each with mean, median and 99th percentile:

- time to first token: from the sending of the request to its first chunk with tokens;
- inter-token latency: each token counts, a chunk of m tokens is m gaps (see bench/harness/latency.py);
- inter-chunk latency: the time between two chunks, however many tokens they hold, which is what a reader sees;
- time per output token: of each request, from first to last token over the tokens after the first;
- end-to-end latency: from the sending to the end of the stream.

Acceptance is read from the server's counters at /metrics before and after, so it covers all its clients. It does not
tell a draft's quality for random prompts or for text past an end-of-text token (--ignore-eos): to measure speed at a
given acceptance, use `-- --synthetic-acceptance-length L`.

The exit code is 1 if a request failed with anything but a 429, or if a stream was not complete: no [DONE], no
finish_reason, or not as many tokens as asked for with --ignore-eos.
"""

import argparse
import asyncio
import collections
import dataclasses
import math
import os
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from bench.harness import latency, record
from jaxspec.errors import ConfigError

if TYPE_CHECKING:
    from bench.serving.client import Outcome
    from bench.serving.endpoint import Endpoint

LATENCIES = {
    "time_to_first_token": "time to first token",
    "inter_token": "inter-token latency",
    "inter_chunk": "inter-chunk latency",
    "time_per_output_token": "time per output token",
    "end_to_end": "end-to-end latency",
}
DEFAULT_CONCURRENCY = 8
PROFILE_NAMES = ("reasoning", "agentic")
_PREFIX_COUNTERS = ("prefix_cache_queries_total", "prefix_cache_hits_total")
DEFAULT_VOCAB_SIZE = 1000
# What a server would take from the model's generation_config.json is not measured.
NO_DEFAULTS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
_KEY_VARIABLE = "JAXSPEC_API_KEY"
_EXAMPLES = 5
_LAG_MS = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "jaxspec bench serve [options] [-- flags of jaxspec serve]"
    parser.set_defaults(engine_flags=[])
    add = parser.add_argument
    add("--url", metavar="URL", help="a running server (default: start `jaxspec serve MODEL`, and stop it afterwards)")
    model = "with --url the name in requests (default: the server's first model), else what to serve (default: demo)"
    add("--model", metavar="NAME", help=model)
    key = f"environment variable with the server's key (default: none; ${_KEY_VARIABLE} for a server of its own)"
    add("--api-key-env", metavar="NAME", help=key)
    add("--device", metavar="TEXT", help="with --url: what the server runs on, for the record")
    add("--num-requests", type=_positive, default=64, metavar="N", help="default: 64")
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--request-rate", type=float, metavar="R", help="requests a second, Poisson arrivals")
    running = f"requests kept running (default: {DEFAULT_CONCURRENCY})"
    load.add_argument("--concurrency", type=_positive, metavar="N", help=running)
    add("--input-len", type=lengths, default=(128, 128), metavar="N|MIN:MAX", help="tokens of a prompt (default: 128)")
    output = "most tokens of an answer (default: 64)"
    add("--output-len", type=lengths, default=(64, 64), metavar="N|MIN:MAX", help=output)
    add("--ignore-eos", action="store_true", help="answers have their full length, end-of-text tokens or not")
    add("--temperature", type=float, default=0.0, metavar="X", help="default: 0, greedy")
    add("--top-p", type=float, default=1.0, metavar="X", help="default: 1")
    add("--seed", type=int, default=0, metavar="N", help="of prompts, lengths, arrivals and sampling (default: 0)")
    vocab = f"prompts hold ids below N, all of which the model must have (default: {DEFAULT_VOCAB_SIZE})"
    add("--vocab-size", type=_positive, default=DEFAULT_VOCAB_SIZE, metavar="N", help=vocab)
    text = "send texts: random tokens of this tokenizer, whose number the server may count differently (or demo)"
    add("--tokenizer", metavar="FOLDER", help=text)
    profiles = "a load that stands for a kind of use: " + ", ".join(PROFILE_NAMES)
    add("--profile", choices=PROFILE_NAMES, help=f"{profiles}; lengths and number of requests are its own")
    add("--scale", type=float, default=1.0, metavar="X", help="of a profile's lengths (default: 1)")
    add("--duration", type=float, metavar="SECONDS", help="in which a profile's sessions begin (default: its own)")
    add("--turns", type=_positive, metavar="N", help="of a profile's sessions (default: its own)")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="for a request (default: 600)")
    record.add_arguments(parser)


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def lengths(text: str) -> tuple[int, int]:
    """The two bounds of N or MIN:MAX."""
    low, colon, high = text.partition(":")
    try:
        bounds = int(low), int(high if colon else low)
    except ValueError:
        bounds = (0, 0)
    if not 1 <= bounds[0] <= bounds[1]:
        raise argparse.ArgumentTypeError(f"must be a number of tokens or MIN:MAX, got {text!r}")
    return bounds


def make_requests(arguments: argparse.Namespace, model: str) -> list[dict[str, Any]]:
    """Bodies of /v1/completions; prompts and lengths depend only on the options and the seed."""
    count, seed = arguments.num_requests, arguments.seed
    inputs, outputs, ids = (np.random.default_rng([seed, stream]) for stream in range(3))
    (shortest, longest), (fewest, most) = arguments.input_len, arguments.output_len
    input_lens = inputs.integers(shortest, longest, count, endpoint=True)
    output_lens = outputs.integers(fewest, most, count, endpoint=True)
    tokenizer = _tokenizer(arguments.tokenizer) if arguments.tokenizer else None
    usable = (
        np.setdiff1d(np.arange(tokenizer.vocab_size), sorted(tokenizer.special_ids))
        if tokenizer
        else np.arange(arguments.vocab_size)
    )
    bodies = []
    for i in range(count):
        prompt = ids.choice(usable, input_lens[i]).tolist()
        text = tokenizer.decode(prompt) if tokenizer else prompt
        bodies.append(body_of(arguments, model, seed + i) | {"prompt": text, "max_tokens": int(output_lens[i])})
    return bodies


def body_of(arguments: argparse.Namespace, model: str, seed: int) -> dict[str, Any]:
    """What all requests have in common, and a request's seed."""
    body = {
        "model": model,
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        **NO_DEFAULTS,
        "seed": seed,
        "stream": True,
        # vLLM's names; the chunks then say how many tokens they hold.
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
    }
    return body | ({"ignore_eos": True} if arguments.ignore_eos else {})


def make_arrivals(count: int, rate: float, seed: int) -> list[float]:
    """Seconds of a Poisson process that begins with the first request."""
    gaps = np.random.default_rng([seed, 3]).exponential(1 / rate, count)
    return (np.cumsum(gaps) - gaps[0]).tolist()


def _tokenizer(name: str) -> Any:
    from jaxspec.loading.resolve import resolve_model
    from jaxspec.loading.tokenizer_files import load_tokenizer

    tokenizer = load_tokenizer(resolve_model(name))
    if tokenizer is None:
        raise ConfigError(f"--tokenizer {name} has no tokenizer")
    return tokenizer


def summarise(outcomes: "Sequence[Outcome]") -> dict[str, Any]:
    """Counts, throughput and latencies (ms) of a run. Throughput is that of complete answers, from the first sending to
    the end of the last answer."""
    from bench.serving.client import REFUSED

    done = [o for o in outcomes if o.failure is None]
    streams = [o.stream for o in done]
    failures = collections.Counter(o.failure for o in outcomes if o.failure not in (None, REFUSED))
    seconds = max(o.ended for o in outcomes) - min(o.sent for o in outcomes)
    tokens = sum(s.tokens for s in streams)
    per_token = [latency.time_per_output_token(s.times, s.counts) for s in streams]
    examples = dict.fromkeys(f"{o.failure}: {o.message}" for o in outcomes if o.failure is not None)
    return {
        "seconds": round(seconds, 3),
        "complete": len(done),
        "refused": sum(o.failure == REFUSED for o in outcomes),
        "failed": sum(failures.values()),
        "failures": dict(failures),
        "failure_examples": list(examples)[:_EXAMPLES],
        "prompt_tokens": sum(s.usage.get("prompt_tokens", 0) for s in streams),
        "output_tokens": tokens,
        "tokens_a_chunk": round(tokens / chunks, 3) if (chunks := sum(len(s.times) for s in streams)) else None,
        "token_counts_exact": all(s.exact for s in streams),
        "requests_per_s": round(len(done) / seconds, 3),
        "output_tokens_per_s": round(tokens / seconds, 2),
        "largest_send_lag_ms": round(1000 * max(o.lag for o in outcomes), 3),
        "latency_ms": {
            "time_to_first_token": latency.summary(o.stream.times[0] - o.sent for o in done if o.stream.times),
            "inter_token": latency.summary(gap for s in streams for gap in latency.token_gaps(s.times, s.counts)),
            "inter_chunk": latency.summary(gap for s in streams for gap in np.diff(s.times)),
            "time_per_output_token": latency.summary(t for t in per_token if t is not None),
            "end_to_end": latency.summary(o.ended - o.sent for o in done),
        },
    }


Send = Callable[["Endpoint"], Coroutine[Any, Any, "list[Outcome]"]]


def _random_load(arguments: argparse.Namespace, model: str) -> tuple[Send, dict[str, Any]]:
    """Sends independent requests; what a record says of them."""
    from bench.serving.client import run_load

    rate = arguments.request_rate
    concurrency = None if rate else arguments.concurrency or DEFAULT_CONCURRENCY
    bodies = make_requests(arguments, model)
    arrivals = make_arrivals(arguments.num_requests, rate, arguments.seed) if rate else None

    def send(endpoint: "Endpoint") -> Coroutine[Any, Any, "list[Outcome]"]:
        return run_load(
            endpoint.url, endpoint.headers, bodies, arrivals=arrivals, concurrency=concurrency,
            timeout=arguments.timeout, trust_env=endpoint.trust_env,
        )  # fmt: skip

    lengths = {"input_len": arguments.input_len, "output_len": arguments.output_len}
    return send, {"request_rate": rate, "concurrency": concurrency, **lengths}


def _profile_load(arguments: argparse.Namespace, model: str, context: int | None) -> tuple[Send, dict[str, Any]]:
    """The same of a profile.

    Raises:
        ConfigError: its conversations may be longer than the server's context.
    """
    from bench.serving.client import run_sessions
    from bench.serving.profiles import make_profile, make_sessions

    profile = make_profile(arguments)
    if context is not None and profile.longest > context:
        raise ConfigError(
            f"--profile {arguments.profile} has conversations of up to {profile.longest} tokens, and the server's context ends "
            f"at {context}: --scale {math.floor(98 * arguments.scale * context / profile.longest) / 100:g}, or fewer --turns"
        )
    sessions = make_sessions(profile, arguments, model)

    def send(endpoint: "Endpoint") -> Coroutine[Any, Any, "list[Outcome]"]:
        return run_sessions(
            endpoint.url, endpoint.headers, sessions, timeout=arguments.timeout, trust_env=endpoint.trust_env
        )

    shape = {"profile": arguments.profile, "scale": arguments.scale, "sessions": len(sessions)}
    return send, {"request_rate": profile.rate, "concurrency": None, **shape, **dataclasses.asdict(profile)}


def measure(endpoint: "Endpoint", arguments: argparse.Namespace, model: str) -> dict[str, Any]:
    """One run against a server that is ready."""
    from bench.serving.endpoint import acceptance

    send, load = (
        _profile_load(arguments, model, endpoint.context()) if arguments.profile else _random_load(arguments, model)
    )
    before, hits_before = endpoint.counters(), [endpoint.value(name) for name in _PREFIX_COUNTERS]
    outcomes = asyncio.run(send(endpoint))
    accepted = acceptance(before, endpoint.counters())
    hits = [endpoint.value(name) for name in _PREFIX_COUNTERS]
    looked_up, found = (None if now is None else now - (then or 0) for then, now in zip(hits_before, hits, strict=True))
    return {
        "benchmark": "serve",
        "model": model,
        "server": endpoint.version(),
        "device_of_server": arguments.device,
        "requests": len(outcomes),
        **load,
        "drafting": accepted is not None,
        "prefix_cache": {"looked_up": looked_up, "found": found},
        "temperature": arguments.temperature,
        "top_p": arguments.top_p,
        "ignore_eos": arguments.ignore_eos,
        "seed": arguments.seed,
        **summarise(outcomes),
        **({} if accepted is None else {"acceptance": accepted}),
    }


def run(arguments: argparse.Namespace) -> int:
    try:
        import httpx  # noqa: F401
    except ImportError as e:
        raise ConfigError('bench serve needs httpx: pip install httpx, or pip install -e ".[test]"') from e
    from bench.serving import endpoint as server

    _check_profile(arguments)
    rate = arguments.request_rate
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--request-rate must be a positive number of requests a second, got {rate:g}")
    if any(
        flag.partition("=")[0].replace("_", "-") in ("--api-key", "--api-key-file") for flag in arguments.engine_flags
    ):
        # The record shows the command, and the client could not choose a key from a file with several.
        raise ConfigError(f"give the key of a server that the benchmark starts in ${_KEY_VARIABLE}, not as a flag")
    key = _key(arguments)
    if arguments.url:
        if arguments.engine_flags:
            raise ConfigError("flags after -- are for a server that the benchmark starts: leave them or --url out")
        endpoint = server.Endpoint(arguments.url, key)
        result = measure(endpoint, arguments, arguments.model or endpoint.first_model())
    else:
        model = arguments.model or "demo"
        with server.local_server(server.server_command(model, arguments.engine_flags)) as local:
            endpoint = server.Endpoint(local.url, key, trust_env=False)
            result = measure(endpoint, arguments, endpoint.first_model())
        # Only to name the device in the record: this process needs hardly any of its memory.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    print_table(result)
    # The device of a server elsewhere is unknown to this process.
    name = "_".join(filter(None, ("serve", Path(result["model"]).name, arguments.profile)))
    record.write(name, result, arguments, with_device=not arguments.url)
    return 1 if result["failed"] else 0


def _check_profile(arguments: argparse.Namespace) -> None:
    """A profile has lengths and times of its own, and prompts of ids."""
    given = [f"--{name}" for name in ("duration", "turns") if getattr(arguments, name) is not None]
    given += ["--scale"] * (arguments.scale != 1)
    if not arguments.profile and given:
        raise ConfigError(f"{given[0]} is for a --profile")
    if arguments.profile and (arguments.concurrency or arguments.tokenizer):
        raise ConfigError(f"--profile {arguments.profile} has no use for --concurrency or --tokenizer")
    positive = (arguments.scale, 1 if arguments.duration is None else arguments.duration)
    if not all(0 < number < float("inf") for number in positive):
        raise ConfigError("--scale and --duration must be positive numbers")


def _key(arguments: argparse.Namespace) -> str | None:
    name = arguments.api_key_env
    if name and not os.environ.get(name):
        raise ConfigError(f"--api-key-env: the variable {name} is not set")
    return os.environ.get(name or ("" if arguments.url else _KEY_VARIABLE))


def print_table(result: dict[str, Any]) -> None:
    r = result
    load = f"{r['request_rate']:g} requests/s" if r["request_rate"] else f"concurrency {r['concurrency']}"
    if "profile" in r:
        load = f"profile {r['profile']}, {r['sessions']} sessions"
    failures = ", ".join(f"{what}: {count}" for what, count in r["failures"].items())
    print(
        f"{r['model']}, {r['requests']} requests, {load}: {r['complete']} complete, {r['refused']} refused (429), "
        f"{r['failed']} failed{f' ({failures})' if failures else ''}"
    )
    for example in r["failure_examples"]:
        print(f"  {example}")
    print(
        f"{r['seconds']:.2f} s, {r['requests_per_s']:.2f} requests/s, {r['output_tokens_per_s']:.1f} output tokens/s "
        f"({r['prompt_tokens']} prompt and {r['output_tokens']} output tokens)"
    )
    if r["largest_send_lag_ms"] > _LAG_MS:
        print(f"requests were sent up to {r['largest_send_lag_ms']:.0f} ms late: this client is too slow for the load")
    if not r["token_counts_exact"]:
        print("the server does not report the tokens of a chunk: each chunk counts as one in latencies")
    rows = [
        [name, *(f"{figures[column]:.2f}" for column in ("mean", "p50", "p99"))]
        for key, name in LATENCIES.items()
        if (figures := r["latency_ms"][key])
    ]
    if rows:
        print(record.table(["ms", "mean", "p50", "p99"], rows))
    if looked_up := r["prefix_cache"]["looked_up"]:
        print(f"prefix cache: {r['prefix_cache']['found'] / looked_up:.1%} of {looked_up:.0f} tokens found")
    if accepted := r.get("acceptance"):
        synthetic = " (synthetic: the text is worthless)" if "synthetic_length" in accepted else ""
        if accepted["windows"]:
            rate = f"{accepted['rate']:.1%} of the drafts" if accepted["drafted"] else "nothing drafted"
            print(f"acceptance length {accepted['mean_length']:.2f}, {rate}{synthetic}")
        else:
            print("acceptance: no window was verified")
