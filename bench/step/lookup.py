"""`bench lookup`: tokens/s of drafts that are looked up, beside an MTP layer's and none, on traces of agents.

The engines' rows write given answers (bench/harness/given_text.py): the target, the draft and the look-up do their whole
work, each step in one launch, and the text is that of the traces (bench/harness/agent_traces.py). A looked-up draft is
accepted where the answer says the same. So are the drafts of a model's own MTP layer; those of random weights, which know
nothing, are right at each position with the probability of --mtp-acceptance.

All rows have prompts of one length, and a number of steps of the engine's loop is timed, each step read while later ones
run; tokens/s are the rows' tokens over that time. Engines take turns, medians of the repeats count, and every turn's text is
compared with its trace. With --adaptive the engines choose the drafts of each step.

Exit code 1: a draft that is looked up, alone or beside a model, yields less than 0.97 of plain decoding's tokens/s on some
traces at some row count.
"""

import argparse
import dataclasses
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from bench.harness import models, record
from bench.harness.agent_traces import KINDS, Encode, Trace, traces_of_size
from bench.harness.arguments import names_among, numbers
from bench.harness.given_text import GivenDrafts, GivenText
from bench.harness.models import SHAPES, Weights, mesh_of_one
from bench.harness.vocabulary import made_up_tokenizer
from bench.step.engines import build_engine, warm_up
from bench.step.load import Load
from bench.step.sizes import WARMUP_STEPS, Sizes, default_budget
from jaxspec.compat import compiles
from jaxspec.config import EngineConfig, np_dtype, resolve_dtype
from jaxspec.engine.engine import Engine
from jaxspec.engine.runner import bind
from jaxspec.errors import ConfigError
from jaxspec.loading.resolve import resolve_model
from jaxspec.text import Tokenizer

LEAST_RATIO = 0.97
PLAIN = "none"
METHODS = ("mtp", "ngram", "suffix", "ngram+mtp", "suffix+mtp")
DEFAULT_METHODS = METHODS[:4]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = f"random weights of a shape ({', '.join(SHAPES)}), or a folder or hub id"
    parser.add_argument("--model", default="moonlight", metavar="NAME", help=f"{model} (default: moonlight)")
    parser.add_argument("--layers", type=int, metavar="N", help="shrink a shape to N layers")
    parser.add_argument(
        "--drafts",
        type=names_among(METHODS, "draft"),
        default=list(DEFAULT_METHODS),
        metavar="NAME,...",
        help=f"of {', '.join(METHODS)} (default: {','.join(DEFAULT_METHODS)})",
    )
    parser.add_argument(
        "--kinds", type=names_among(KINDS, "kind"), default=list(KINDS), metavar="NAME,...", help=", ".join(KINDS)
    )
    parser.add_argument("--rows", type=numbers, metavar="N,N,...", help="decode rows (default: 1,32,128; CPU: 1,4)")
    parser.add_argument("--context", type=int, default=1024, metavar="TOKENS", help="of every prompt (default: 1024)")
    parser.add_argument("--tokens", type=int, default=3, metavar="K", help="drafted a step (default: 3)")
    parser.add_argument("--steps", type=int, metavar="N", help="steps of each measurement (default: 48; CPU: 8)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each measurement (default: 3)")
    parser.add_argument("--adaptive", action="store_true", help="the number of drafts follows the load")
    parser.add_argument(
        "--mtp-acceptance",
        type=float,
        default=0.7,
        metavar="P",
        help="how often each draft of random weights is right (default: 0.7)",
    )
    record.add_arguments(parser)


@dataclass(frozen=True)
class Written:
    """An engine whose rows write given texts.

    Attributes:
        weights: that the engine computes with.
        shape: of its texts, [slots, length].
        acceptance: of given drafts; None where the model's own count.
    """

    engine: Engine
    weights: Weights
    shape: tuple[int, int]
    acceptance: float | None

    def begin(self, traces: Sequence[Trace]) -> Load:
        """Prefills the traces' prompts; from then on the rows write the answers."""
        firsts = [trace.answer[0] for trace in traces]
        load = Load(self.engine, len(traces), len(traces[0].prompt), prompts=[t.prompt for t in traces], firsts=firsts)
        texts = np.zeros(self.shape, np.int32)
        for slot, trace in zip(load.slots, traces, strict=True):
            text = (*trace.prompt, *trace.answer)
            texts[slot, : len(text)] = text
        runner, sharding = load.runner, load.runner.state.seq_len.sharding
        params = {"inner": self.weights.params, "texts": jax.device_put(texts, sharding)}
        _, target = bind(_target(self.weights, self.shape), params)
        drafter = None
        if runner.settings.model_drafts:
            assert self.weights.draft is not None
            params = {"inner": self.weights.draft[1]}
            if self.acceptance is not None:
                proposals = proposed(texts, self.acceptance, self.engine.vocab_size)
                params["proposals"] = jax.device_put(proposals, sharding)
            _, drafter = bind(_drafts(self.weights, self.shape, self.acceptance), params)
        runner.use_params((target, drafter))
        return load


def proposed(texts: np.ndarray, acceptance: float, vocab_size: int) -> np.ndarray:
    """The texts with another token where a draft is wrong, at each position with the same probability."""
    wrong = np.random.default_rng(0).random(texts.shape) >= acceptance
    return np.where(wrong, (texts + 1) % vocab_size, texts).astype(np.int32)


def _target(weights: Weights, shape: tuple[int, int]) -> Any:
    return GivenText(weights.model, *shape)


def _drafts(weights: Weights, shape: tuple[int, int], acceptance: float | None) -> Any:
    assert weights.draft is not None
    given = None if acceptance is None else shape
    return GivenDrafts(weights.draft[0], weights.model.config.hidden_size, given)


def build(
    weights: Weights, sizes: Sizes, method: str, length: int, dtype: str, *, adaptive: bool, acceptance: float | None
) -> Written:
    """An engine of a method (or `PLAIN`) for texts of `length` tokens; nothing is compiled yet."""
    k = 0 if method == PLAIN else sizes.tokens
    shape, mesh = (sizes.rows[-1] + 1, length), mesh_of_one()
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    texts = jax.device_put(np.zeros(shape, np.int32), sharding)
    draft = None
    if "mtp" in method:
        assert weights.draft is not None
        proposals = {} if acceptance is None else {"proposals": texts}
        draft = (_drafts(weights, shape, acceptance), {"inner": weights.draft[1], **proposals})
    given = Weights(_target(weights, shape), {"inner": weights.params, "texts": texts}, draft)
    engine = build_engine(
        given, sizes, k, mesh, dtype=dtype, lean=True, method=method if k else None, adaptive=adaptive and k > 0
    )
    return Written(engine, weights, shape, acceptance)


def run_once(load: Load, rows: int, steps: int, traces: Sequence[Trace]) -> dict[str, float]:
    """Tokens a second, and tokens and drafts of a row's step, of some steps from the start.

    Raises:
        RuntimeError: a row did not write its answer.
    """
    with load.running_late(rows):
        before, started = load.engine.stats(), time.perf_counter()
        for _ in range(steps):
            load.step()
        after, seconds = load.engine.stats(), time.perf_counter() - started
    for request, trace in zip(load.requests[:rows], traces, strict=False):
        written = request.tokens[request.prompt_len :]
        if tuple(written) != trace.answer[: len(written)]:
            raise RuntimeError(f"request {request.id} wrote another text than its trace of kind {trace.kind}")
    tokens = after.generation_tokens - before.generation_tokens
    drafts = sum(k * (n - before.steps_by_drafts[k]) for k, n in after.steps_by_drafts.items())
    return {
        "tokens_per_s": tokens / seconds,
        "tokens_per_step": tokens / steps / rows,
        "drafts_per_step": drafts / steps,
    }


def measure(
    engines: Mapping[str, Written], traces: Sequence[Trace], rows: Iterable[int], steps: int, repeats: int
) -> dict[int, dict[str, dict[str, Any]]]:
    """Figures by row count and draft on traces of one kind: the repeat of median speed, and all speeds."""
    loads = {name: written.begin(traces) for name, written in engines.items()}
    out: dict[int, dict[str, dict[str, Any]]] = {}
    for n in rows:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in loads}
        for _ in range(repeats):
            for name, load in loads.items():
                runs[name].append(run_once(load, n, steps, traces))
        out[n] = {name: summary(each) for name, each in runs.items()}
        plain = out[n][PLAIN]["tokens_per_s"]
        for figures in out[n].values():
            figures["over_none"] = round(figures["tokens_per_s"] / plain, 4)
    for load in loads.values():
        load.close()
    return out


def summary(runs: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    speeds = [run["tokens_per_s"] for run in runs]
    median = runs[speeds.index(statistics.median_low(speeds))]
    return {name: round(value, 4) for name, value in median.items()} | {
        "tokens_per_s_of_runs": [round(speed, 1) for speed in speeds]
    }


def gate(results: Iterable[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The lowest ratio to plain decoding of a draft that is looked up, where it is, and whether the bound is met.

    None where nothing is looked up.
    """
    figures = [
        (each["over_none"], name, result["kind"], result["rows"])
        for result in results
        for name, each in result["drafts"].items()
        if name not in (PLAIN, "mtp")
    ]
    if not figures:
        return None
    worst, draft, kind, rows = min(figures)
    return {"worst": worst, "draft": draft, "kind": kind, "at_rows": rows, "bound": LEAST_RATIO,
            "met": worst >= LEAST_RATIO}  # fmt: skip


def tokenizer_for(model: str, vocab_size: int) -> Encode:
    """A model's own; for random weights the demo model's, or bytes where the vocabulary has too few ids for it."""
    own = Tokenizer.from_folder(resolve_model("demo" if model in SHAPES else model))
    fits = model not in SHAPES or own.vocab_size <= vocab_size
    return own.encode if fits else made_up_tokenizer(256).encode


def run(arguments: argparse.Namespace) -> int:
    on_gpu = jax.devices()[0].platform == "gpu"
    dtype = resolve_dtype(EngineConfig(), on_gpu=on_gpu)
    mesh = mesh_of_one()
    is_random = arguments.model in SHAPES
    if is_random:
        weights = models.draw(models.random_config(arguments.model, arguments.layers), mesh, np_dtype(dtype))
    else:
        weights = models.load(arguments.model, mesh, np_dtype(dtype))
    if weights.draft is None and (lacking := [name for name in arguments.drafts if "mtp" in name]):
        raise ConfigError(f"--drafts {lacking[0]}: {arguments.model} has no MTP layer; name others")
    steps = arguments.steps or (48 if on_gpu else 8)
    sizes = Sizes(
        rows=tuple(arguments.rows or ((1, 32, 128) if on_gpu else (1, 4))),
        context=arguments.context,
        steps=steps,
        loops=(steps, steps),
        budget=default_budget(on_gpu),
        tokens=arguments.tokens,
    )
    # Steps in flight when the timed ones end are read too.
    answer = (arguments.tokens + 1) * (steps + WARMUP_STEPS + 4)
    acceptance = arguments.mtp_acceptance if is_random else None
    engines = {
        name: build(
            weights, sizes, name, sizes.context + answer, dtype, adaptive=arguments.adaptive, acceptance=acceptance
        )
        for name in (PLAIN, *arguments.drafts)
    }
    warm_up({name: written.engine for name, written in engines.items()})
    encode = tokenizer_for(arguments.model, weights.model.config.vocab_size)
    results = []
    for kind in arguments.kinds:
        traces = traces_of_size(encode, kind, sizes.rows[-1], prompt=sizes.context, answer=answer)
        measured = measure(engines, traces, sizes.rows, steps, arguments.repeats)
        results += [{"kind": kind, "rows": n, "drafts": figures} for n, figures in measured.items()]
        print(f"{kind}: measured", flush=True)
    result = {
        "benchmark": "lookup",
        "model": models.as_recorded(arguments.model),
        "layers": weights.model.config.num_layers,
        "dtype": dtype,
        "sizes": dataclasses.asdict(sizes),
        "adaptive": arguments.adaptive,
        "mtp_acceptance": acceptance,
        "compiles_after_warm_up": compiles.after_warmup,
        "gate": gate(results),
        "results": results,
    }
    print_table(result)
    record.write(f"lookup_{models.as_recorded(arguments.model)}", result, arguments)
    return 0 if result["gate"] is None or result["gate"]["met"] else 1


def print_table(result: Mapping[str, Any]) -> None:
    names = list(result["results"][0]["drafts"])
    header = ["traces", "rows"]
    for name in names:
        header += [name, "a step"] if name == PLAIN else [name, "a step", "of none"]
    lines = []
    for each in result["results"]:
        line = [each["kind"], str(each["rows"])]
        for name, figures in each["drafts"].items():
            line += [f"{figures['tokens_per_s']:.0f}", f"{figures['tokens_per_step']:.2f}"]
            line += [] if name == PLAIN else [f"{figures['over_none']:.3f}"]
        lines.append(line)
    print(f"{result['model']}, {result['layers']} layers, {result['dtype']}: tokens/s, tokens of a row's step")
    print(record.table(header, lines))
    if (found := result["gate"]) is None:
        return
    where = f"{found['draft']} on {found['kind']} at {found['at_rows']} rows, bound {found['bound']:g}"
    print(f"{'met' if found['met'] else 'NOT met'}: looked-up drafts over none ({found['worst']:g}: {where})")
