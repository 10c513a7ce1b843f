"""`bench draft_ids`: does jaxspec propose the draft tokens that vLLM proposes?

Two random checkpoints, one of each kind of draft: "mtp", a DeepSeek-V3 model with one NextN layer, and "eagle3", a
Llama model with an EAGLE3 head that proposes half of its vocabulary. Three stages over one folder, since the two
engines may need different environments:

    python -m bench draft_ids make FOLDER       writes the checkpoints
    python -m bench draft_ids vllm FOLDER       runs vLLM over them and writes what it drafted
    python -m bench draft_ids compare FOLDER    drafts the same with jaxspec, and compares

The comparison is teacher-forced: for every step that vLLM made, jaxspec is given the tokens that vLLM knew then, and
drafts from there, so that one differing greedy token does not end the comparison of a whole text. A step's drafts after
its first difference are left out: they follow different tokens.

The engines may differ where bfloat16 cannot tell two tokens apart: a difference counts only if jaxspec's draft prefers
its own token to vLLM's by more than rounding can move the two. That bound is measured: jaxspec drafts once more in
float32, and a near-tie is at most four times the largest change of a first choice's log-probability, because each
engine's rounding may move both tokens. Each difference is listed with its gaps in bfloat16 and in float32: negative in
float32 means that there jaxspec prefers vLLM's token.
"""

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record

NUM_DRAFTS = 3
DTYPES = ("bfloat16", "float32")
# In nats, of the draft's log-probabilities in float32, where both engines are nearly exact.
EXACT = 1e-3

_COMMON: dict[str, Any] = {
    "torch_dtype": "bfloat16", "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 2048, "hidden_act": "silu",
    "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
# Sizes of attention as published: kernels are built for them.
MTP: dict[str, Any] = _COMMON | {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_hidden_layers": 3,
    "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 256, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 16,
    "num_experts_per_tok": 4, "moe_intermediate_size": 256, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "norm_topk_prob": True, "routed_scaling_factor": 1.0, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Eight layers: the default choice of captured layers, (2, L // 2, L - 3), must be three different ones.
TARGET: dict[str, Any] = _COMMON | {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 8, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "mlp_bias": False,
}  # fmt: skip
EAGLE3: dict[str, Any] = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 2048,
}  # fmt: skip

# vLLM's NextN layer reads a zero embedding with the first hidden state of a text; jaxspec, like the other engines, the
# second token's. Every prompt has this token there, whose embedding is zero, so that both read the same.
BLANK = 1

DRAFTS = {"mtp": None, "eagle3": "eagle3-head"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stage", choices=["make", "vllm", "compare"])
    parser.add_argument("folder", type=Path, help="of the checkpoints and of what vLLM drafted")
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of weights and activations (default: bfloat16)"
    )
    parser.add_argument("--prompts", type=int, default=16, metavar="N", help="for vllm (default: 16)")
    parser.add_argument("--tokens", type=int, default=32, metavar="N", help="for vllm: of each output (default: 32)")
    record.add_arguments(parser)


def make(folder: Path, seed: int = 0) -> None:
    """Writes the folders mtp, eagle3 and eagle3-head: Hugging Face layout, bfloat16, the same bits for one seed."""
    from jaxspec.models.decoder import decoder_key_map
    from jaxspec.models.eagle3 import eagle3_key_map, read_eagle3_config
    from jaxspec.models.mtp import nextn_key_map
    from jaxspec.models.registry import read_config

    rng = np.random.default_rng(seed)
    config = read_config(MTP)
    tensors = _random_tensors(rng, _shapes(decoder_key_map(config)) | _shapes(nextn_key_map(config)))
    nextn = f"model.layers.{config.num_layers}."
    tensors[f"{nextn}embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors[f"{nextn}shared_head.head.weight"] = tensors["lm_head.weight"]
    _write(folder / "mtp", MTP, tensors)

    _write(folder / "eagle3", TARGET, _random_tensors(rng, _shapes(decoder_key_map(read_config(TARGET)))))

    head = read_eagle3_config(EAGLE3)
    pieces = eagle3_key_map(head, prefix="midlayer.", own_embedding=False, own_head=True)
    tensors = _random_tensors(rng, _shapes(pieces))
    V, Vd = head.model.vocab_size, head.draft_vocab_size
    chosen = np.sort(rng.permutation(V)[:Vd])
    tensors["d2t"] = chosen - np.arange(Vd)
    tensors["t2d"] = np.isin(np.arange(V), chosen)
    _write(folder / "eagle3-head", EAGLE3, tensors)


def _shapes(pieces: Any) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for group in pieces.values() for piece in group}


def _random_tensors(rng: np.random.Generator, shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """float32. Weights N(0, 1 / fan_in), embeddings N(0, 1), norms U(0.5, 1.5), router biases N(0, 0.1)."""
    out = {}
    for name, shape in shapes.items():
        if "norm" in name:
            out[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
            continue
        value = rng.standard_normal(shape, np.float32)
        if "bias" in name:
            value *= 0.1
        elif "embed" in name:
            value[BLANK] = 0
        else:
            value /= math.sqrt(shape[-1])
        # Which of two equally good experts comes fourth is a near-tie too: no single one may decide a token.
        if "mlp.experts" in name and "down_proj" in name:
            value *= 0.5
        out[name] = value
    return out


def _write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    import ml_dtypes
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    half = {
        name: value if value.dtype != np.float32 or "bias" in name else value.astype(ml_dtypes.bfloat16)
        for name, value in tensors.items()
    }
    save_file(half, folder / "model.safetensors", metadata={"format": "pt"})


def make_prompts(count: int, vocab_size: int) -> list[list[int]]:
    """Random ids, from 3 tokens to some pages of them; see BLANK."""
    rng = np.random.default_rng(1)
    lengths = np.geomspace(3, 300, count).round().astype(int)
    prompts = [rng.integers(3, vocab_size, n).tolist() for n in lengths]
    return [[prompt[0], BLANK, *prompt[2:]] for prompt in prompts]


class Recorder:
    """Keeps what vLLM's proposer returns, one request at a time.

    Attributes:
        steps: of the current request: "known", how many of its tokens were known, the newest one included; "newest",
            that token; "drafts"; and "gaps", by how much each leads the second choice, in nats.
    """

    def __init__(self, proposer: Any):
        self.steps: list[dict[str, Any]] = []
        self._gaps: list[float] = []
        inner = proposer.propose
        recorder = self

        def propose(self: Any, *args: Any, **kwargs: Any) -> Any:
            bound = _bind(inner, self, args, kwargs)
            positions, last = bound["target_positions"], bound["token_indices_to_sample"]
            position = int(positions[-1] if last is None else positions[last[0]])
            newest = int(bound["next_token_ids"][0])  # read now: the proposer may reuse the buffers
            recorder._gaps = []
            drafts = inner(self, *args, **kwargs)
            recorder.steps.append(
                {
                    "known": position + 2,
                    "newest": newest,
                    "drafts": drafts[0].tolist(),
                    "gaps": recorder._gaps,
                }
            )
            return drafts

        def greedy_sample(self: Any, hidden_states: Any) -> Any:
            logits = self.model.compute_logits(hidden_states)
            two = logits[0].float().topk(2).values
            recorder._gaps.append(float(two[0] - two[1]))
            return logits.argmax(dim=-1)

        proposer.propose = propose
        proposer._greedy_sample = greedy_sample


def _bind(function: Any, *call: Any) -> dict[str, Any]:
    import inspect

    owner, args, kwargs = call
    bound = inspect.signature(function).bind(owner, *args, **kwargs)
    return dict(bound.arguments)


def run_vllm(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, dtype: str) -> dict[str, dict[str, Any]]:
    """vLLM's outputs and drafts, by name of the checkpoint; one prompt at a time, greedy."""
    # In this process, and with the runner whose proposer is patched.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    recorder = Recorder(SpecDecodeBaseProposer)
    out = {}
    for name in DRAFTS:
        engine = _vllm_engine(folder, name, dtype)
        runs = [_run_prompt(engine, recorder, prompt, tokens) for prompt in prompts]
        out[name] = {"vllm": vllm.__version__, "dtype": dtype, "runs": runs}
        del engine
        cleanup_dist_env_and_memory()
    return out


def _vllm_engine(folder: Path, name: str, dtype: str) -> Any:
    import vllm

    head = DRAFTS[name]
    speculation: dict[str, Any] = {"num_speculative_tokens": NUM_DRAFTS, "method": "mtp"}
    if head is not None:
        speculation |= {"method": "eagle3", "model": str(folder / head)}
    return vllm.LLM(
        model=str(folder / name),
        skip_tokenizer_init=True,
        dtype=dtype,
        speculative_config=speculation,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=4,
        max_num_batched_tokens=1024,
        gpu_memory_utilization=0.3,
        enable_prefix_caching=False,
        async_scheduling=False,
    )


def _run_prompt(engine: Any, recorder: Recorder, prompt: Sequence[int], tokens: int) -> dict[str, Any]:
    import vllm

    params = vllm.SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    recorder.steps = []
    [result] = engine.generate([{"prompt_token_ids": list(prompt)}], params, use_tqdm=False)
    output = [int(t) for t in result.outputs[0].token_ids]
    text = [*prompt, *output]
    # The last step may have gone past the end of the output.
    steps = [step for step in recorder.steps if step["known"] <= len(text)]
    if wrong := [step for step in steps if text[step["known"] - 1] != step["newest"]]:
        raise RuntimeError(f"the proposer's newest token is not the text's: {wrong[0]}")
    return {"prompt": list(prompt), "output": output, "steps": steps}


def run_jaxspec(
    folder: Path, name: str, texts: Sequence[Sequence[int]], dtype: str
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """For each text, in the order in which they end: its index, the drafts int [k] after it and log q [k, V]."""
    from jaxspec.engine.request import RequestState
    from jaxspec.llm import LLM
    from jaxspec.sampling.params import SamplingParams

    head = DRAFTS[name]
    llm = LLM(
        str(folder / name),
        dtype=dtype,
        num_speculative_tokens=NUM_DRAFTS,
        speculative_model=None if head is None else str(folder / head),
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        gpu_memory_utilization=0.3,
        readout_depth=0,  # the drafts are looked at between two steps
        enable_prefix_caching=False,  # each text is one of vLLM's cut short: every one is computed whole
    )
    engine = llm.engine
    # Drafts the likeliest tokens, as for a greedy request, for which a step would not write log q.
    params = SamplingParams(temperature=1, greedy_drafts=True, ignore_eos=True)
    waiting = {}
    for i, text in enumerate(texts):
        request = llm.make_request(list(text[:-1]), params)
        # As of a preempted request: the token after its prompt is known, and is not sampled again.
        request.tokens.append(text[-1])
        engine.add(request)
        waiting[i] = request
    while waiting:
        engine.step()
        state = engine.runner.state
        drafts = np.asarray(state.drafts)
        ready = {i: request for i, request in waiting.items() if request.state is RequestState.DECODE}
        log_q = np.asarray(state.draft_log_q) if ready else None
        for i, request in ready.items():
            assert log_q is not None
            yield i, drafts[request.slot], log_q[request.slot]
            engine.abort(request.id)
            del waiting[i]


def compare(
    theirs: Sequence[Sequence[int]],
    ours: Sequence[Sequence[int]],
    log_q: Sequence[np.ndarray],
    bound: float,
    exact: tuple[Sequence[Sequence[int]], Sequence[np.ndarray]] | None = None,
) -> dict[str, Any]:
    """Counts of equal drafts and of differences, over steps of k drafts each.

    Args:
        theirs, ours: for each step, the drafts.
        log_q: for each step, float [k, V]: our draft's log-probabilities.
        bound: largest gap of a near-tie, in nats.
        exact: drafts and log-probabilities in float32, used to report each difference's gap there too; null where these
            drafts had differed before, so that they follow other tokens.
    """
    equal, differences = 0, list[dict[str, Any]]()
    for step, (them, us, q) in enumerate(zip(theirs, ours, log_q, strict=True)):
        for i, (a, b) in enumerate(zip(them, us, strict=True)):
            if a == b:
                equal += 1
                continue
            gap = float(q[i, b] - q[i, a])
            found: dict[str, Any] = {"step": step, "draft": i, "vllm": int(a), "jaxspec": int(b), "gap": round(gap, 5)}
            differences.append(found)
            if exact is not None:
                same = list(exact[0][step][:i]) == list(us[:i])
                true = exact[1][step][i]
                found["float32_gap"] = round(float(true[b] - true[a]), 5) if same else None
            break
    real = [d for d in differences if not d["gap"] <= bound]
    return {
        "steps": len(theirs),
        "near_tie_nats": round(bound, 5),
        "positions": equal + len(differences),
        "equal": equal,
        "near_ties": len(differences) - len(real),
        "largest_near_tie": max((d["gap"] for d in differences if d not in real), default=0.0),
        "different": len(real),
        "differences": differences,
    }


def rounding_noise(
    ours: Sequence[Sequence[int]],
    log_q: Sequence[np.ndarray],
    exact: Sequence[Sequence[int]],
    exact_q: Sequence[np.ndarray],
) -> float:
    """How far rounding moves a candidate: the largest change, in nats, of the log-probability of either first choice.

    Args:
        ours, exact: for each step, the drafts in the lower and in the higher precision.
        log_q, exact_q: for each step, float [k, V].
    """
    noise = 0.0
    for us, q, them, true in zip(ours, log_q, exact, exact_q, strict=True):
        for i, (a, b) in enumerate(zip(us, them, strict=True)):
            noise = max(noise, *(abs(float(q[i, token] - true[i, token])) for token in (a, b)))
            if a != b:  # what follows drafts from other tokens
                break
    return noise


def _draft(folder: Path, name: str, texts: Sequence[Sequence[int]], dtype: str) -> tuple[list[Any], list[Any]]:
    """Drafts [k] and log q [k, V] after each text."""
    ids: list[Any] = [None] * len(texts)
    log_q: list[Any] = [None] * len(texts)
    for i, drafts, q in run_jaxspec(folder, name, texts, dtype):
        ids[i], log_q[i] = drafts.tolist(), q
    return ids, log_q


def _compare_model(folder: Path, name: str, theirs: dict[str, Any]) -> dict[str, Any]:
    steps = [(run, step) for run in theirs["runs"] for step in run["steps"]]
    texts = [[*run["prompt"], *run["output"]][: step["known"]] for run, step in steps]
    ours, log_q = _draft(folder, name, texts, theirs["dtype"])
    bound, exact = EXACT, None
    if theirs["dtype"] != "float32":
        exact = _draft(folder, name, texts, "float32")
        bound = 4 * rounding_noise(ours, log_q, *exact)
    result = compare([step["drafts"] for _, step in steps], ours, log_q, bound, exact)
    # What a step of vLLM added to the text: the accepted drafts, and one more token.
    added = [b["known"] - a["known"] for run in theirs["runs"] for a, b in pairwise(run["steps"])]
    return {"prompts": len(theirs["runs"]), "mean_accepted": round(float(np.mean(added)) - 1, 3)} | result


def run(arguments: argparse.Namespace) -> int:
    folder: Path = arguments.folder
    if arguments.stage == "make":
        make(folder)
        return 0
    if arguments.stage == "vllm":
        prompts = make_prompts(arguments.prompts, _COMMON["vocab_size"])
        for name, drafted in run_vllm(folder, prompts, arguments.tokens, arguments.dtype).items():
            (folder / f"{name}.json").write_text(record.dumps(drafted))
        return 0

    drafted = {name: json.loads((folder / f"{name}.json").read_text()) for name in DRAFTS}
    figures = {name: _compare_model(folder, name, theirs) for name, theirs in drafted.items()}
    columns = ("steps", "near_tie_nats", "positions", "equal", "near_ties", "largest_near_tie", "different")
    lines = [[name, *(str(f[c]) for c in columns)] for name, f in figures.items()]
    print(record.table(["draft", *(c.replace("_", " ") for c in columns)], lines))
    passed = all(f["different"] == 0 and f["positions"] > 0 for f in figures.values())
    first = next(iter(drafted.values()))
    result = {
        "benchmark": "draft_ids",
        "vllm": first["vllm"],
        "dtype": first["dtype"],
        "drafts_a_step": NUM_DRAFTS,
        "passed": passed,
        **figures,
    }
    record.write("draft_ids", result, arguments)
    return 0 if passed else 1
