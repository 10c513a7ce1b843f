"""Measurements on the written demo folder, and its model card.

Everything here runs on the folder's bf16 weights with the Hugging Face forward; only the draft layer, which the
library has no plain class for in every version, is the `NextN` module of model.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.demo_training.corpus import BEGIN, END, PAD, Corpus
from bench.demo_training.model import CONFIG, DRAFT_STEPS, Target, hub_tensors, load_nextn

SAMPLE_PROMPTS = ["def fibonacci(n):\n", "class Stack:\n", "import numpy as np\n\n\ndef softmax(x, axis=-1):\n"]
SAMPLE_CHAT = [{"role": "user", "content": "Write a Python function `is_prime`: Return True if n is a prime number."}]


def verify_folder(folder: Path, tensors: dict[str, Tensor]) -> dict:
    """Load the folder as a user would, and compare it with the trained weights."""
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
    )
    model, info = loaded
    unexpected = [name for name in info["unexpected_keys"] if f"layers.{CONFIG['num_hidden_layers']}." not in name]
    if info["missing_keys"] or unexpected or info["mismatched_keys"]:
        raise ValueError(f"the folder does not load cleanly: {info}")
    reloaded = hub_tensors(model, load_nextn(folder, model.config))
    if reloaded.keys() != tensors.keys():
        raise ValueError(f"names changed on the way through the folder: {reloaded.keys() ^ tensors.keys()}")
    for name, tensor in tensors.items():
        if tensor.dtype != reloaded[name].dtype or not torch.equal(tensor, reloaded[name]):
            raise ValueError(f"{name} changed on its way through the folder")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for text in ("def f(x):\n    return x  # π ≠ 3\n\n\n", "  leading, trailing  ", "\t\r\n<|end|", "汉字🙂"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        if tokenizer.decode(ids) != text or tokenizer.encode(text) != [BEGIN, *ids]:
            raise ValueError(f"the tokenizer does not round-trip {text!r}")
    rendered: Any = tokenizer.apply_chat_template(SAMPLE_CHAT, tokenize=False, add_generation_prompt=True)
    if not (rendered.startswith("<|begin|><|user|>Write") and rendered.endswith("number.<|assistant|>")):
        raise ValueError(f"unexpected chat rendering {rendered!r}")
    return {"loads_without_missing_keys": True, "weights_equal_trained_weights": True, "tokenizer_round_trips": True}


class Draft(Protocol):
    """What the measurements need of a draft: NextN and the EAGLE3 heads have it."""

    def begin(self, model: Target, tokens: Tensor) -> tuple[Tensor, Tensor]: ...

    def advance(
        self, model: Target, fed: Tensor, state: Tensor, step: int, chain: list[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Tensor]: ...


def held_out_windows(corpus: Corpus, length: int, rows: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """(tokens, next tokens) in consecutive windows, so that every held-out token is predicted once."""
    tokens = torch.from_numpy(corpus.held_out).long()
    count = (len(tokens) - 1) // length
    inputs, labels = (tokens[i : i + count * length].view(count, length).to(device) for i in (0, 1))
    for start in range(0, count, rows):
        yield inputs[start : start + rows], labels[start : start + rows]


@torch.inference_mode()
def held_out_metrics(model: Target, draft: Draft, corpus: Corpus, length: int, rows: int) -> dict:
    """Language-model figures, and how often the draft layer's choice is the target's, on the held-out text.

    In draft step j the draft layer is fed the text's own tokens, so the steps are judged one by one here.
    """
    sums = dict.fromkeys(("tokens", "nats", "correct"), 0.0)
    agree, overlap, judged = [0.0] * DRAFT_STEPS, [0.0] * DRAFT_STEPS, [0] * DRAFT_STEPS
    for inputs, labels in held_out_windows(corpus, length, rows, model.device):
        hidden, state = draft.begin(model, inputs)
        log_target = torch.log_softmax(model.lm_head(hidden).float(), -1)
        best = log_target.argmax(-1)
        sums["tokens"] += labels.numel()
        sums["nats"] -= log_target.gather(-1, labels[..., None]).sum().item()
        sums["correct"] += (best == labels).sum().item()
        chain: list[tuple[Tensor, Tensor]] = []
        for step in range(1, DRAFT_STEPS + 1):
            # Past the window's end there is no token to feed; those chains are not judged.
            shifted = torch.roll(inputs, -step, 1)
            state, logits = draft.advance(model, shifted, state, step, chain)
            proposed = torch.softmax(logits[:, :-step].float(), -1)
            agree[step - 1] += (proposed.argmax(-1) == best[:, step:]).sum().item()
            overlap[step - 1] += torch.minimum(proposed, log_target[:, step:].exp()).sum().item()
            judged[step - 1] += best[:, step:].numel()
    bytes_per_token = corpus.report["held_out"]["text_bytes"] / len(corpus.held_out)
    nats = sums["nats"] / sums["tokens"]
    return {
        "window": length,
        "tokens": int(sums["tokens"]),
        "nats_per_token": round(nats, 4),
        "bits_per_byte": round(nats / math.log(2) / bytes_per_token, 4),
        "top1_accuracy": round(sums["correct"] / sums["tokens"], 4),
        "draft_agreement_by_step": [round(a / n, 4) for a, n in zip(agree, judged, strict=True)],
        "draft_overlap_at_temperature_1_by_step": [round(o / n, 4) for o, n in zip(overlap, judged, strict=True)],
    }


@torch.inference_mode()
def continuations(model: Target, prompts: list[list[int]], new_tokens: int, temperature: float) -> list[list[int]]:
    """The target's answer to each prompt, up to and with its end token; greedy at temperature 0."""
    width = max(map(len, prompts))
    padded = torch.tensor([[PAD] * (width - len(p)) + p for p in prompts], device=model.device)
    torch.manual_seed(0)
    output = model.generate(
        padded,
        attention_mask=(padded != PAD).long(),
        max_new_tokens=new_tokens,
        pad_token_id=PAD,
        **({"do_sample": True, "temperature": temperature, "top_p": 1.0} if temperature else {"do_sample": False}),
    )
    answers = [row[width:] for row in output.tolist()]
    return [answer[: answer.index(END) + 1] if END in answer else answer for answer in answers]


def distinct_share(answers: list[list[int]], size: int = 4) -> float:
    """Different runs of `size` tokens over all runs, per answer: near 0 for an answer that loops."""
    runs = [[tuple(a[i : i + size]) for i in range(len(a) - size + 1)] for a in answers]
    return sum(len(set(r)) for r in runs) / max(sum(map(len, runs)), 1)


@torch.inference_mode()
def chain_acceptance(
    model: Target, draft: Draft, prompts: list[list[int]], answers: list[list[int]], settings: dict
) -> dict:
    """Speculative decoding with k = 3: the draft proposes its first choices, the target keeps those it decodes itself.

    `answers` are the target's `continuations` of held-out prompts with `settings`. The draft chains from every position
    are computed at once with exactly the cache contents they would have (see `chain_attention`), and each sequence is
    walked as an engine would: accept, add the target's own token, go on. At a temperature above 0 a draft token counts
    if the target's sample is that token, which is less than what rejection sampling accepts.
    """
    sequences = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    length = max(map(len, sequences))
    # Padding on the right: causal attention never sees it.
    text = torch.tensor([s + [PAD] * (length - len(s)) for s in sequences], device=model.device)
    fed, right = torch.roll(text, -1, 1), list[Tensor]()
    chain: list[tuple[Tensor, Tensor]] = []
    _, state = draft.begin(model, text)
    for step in range(1, DRAFT_STEPS + 1):
        state, logits = draft.advance(model, fed, state, step, chain)
        fed = logits.argmax(-1)
        right.append(fed == torch.roll(text, -1 - step, 1))
    accepted_by_position = torch.stack(right).cumprod(0).permute(1, 2, 0).tolist()
    tried, accepted_total, emitted = 0, [0] * DRAFT_STEPS, 0
    for prompt, sequence, flags in zip(prompts, sequences, accepted_by_position, strict=True):
        position = len(prompt) - 1
        while position + 1 + DRAFT_STEPS < len(sequence):
            accepted = sum(flags[position])
            tried += 1
            emitted += accepted + 1
            for step in range(accepted):
                accepted_total[step] += 1
            position += accepted + 1
    tried = max(tried, 1)
    reached = [tried, *accepted_total]
    return {
        "k": DRAFT_STEPS,
        "temperature": settings["temperature"],
        "prompts": len(prompts),
        "new_tokens_per_prompt": settings["new_tokens"],
        "distinct_4_token_runs": round(distinct_share(answers), 4),
        "verify_steps": tried,
        "mean_acceptance_length": round(emitted / tried, 4),
        "acceptance_by_position": [round(a / tried, 4) for a in accepted_total],
        "conditional_acceptance_by_position": [
            round(after / max(before, 1), 4) for before, after in zip(reached, accepted_total, strict=False)
        ],
    }


@torch.inference_mode()
def samples(model: Target, folder: Path, new_tokens: int) -> list[dict]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.bos_token + prompt for prompt in SAMPLE_PROMPTS]
    prompts.append(tokenizer.apply_chat_template(SAMPLE_CHAT, tokenize=False, add_generation_prompt=True))
    results = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt, add_special_tokens=False)
        for temperature in (0.0, 0.8):
            answer = continuations(model, [ids], new_tokens, temperature)[0]
            results.append({"prompt": prompt, "temperature": temperature, "text": tokenizer.decode(answer)})
    return results


def load_target(folder: Path, device: torch.device) -> tuple[Target, str, str]:
    """The target with the library's own forward, its kind of mixture layer, and a description of the arithmetic."""
    on_gpu = device.type == "cuda"
    experts = "grouped_mm" if on_gpu else "eager"
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="sdpa", experts_implementation=experts
    )
    where = "the GPU" if on_gpu else "the CPU"
    return model.to(device).eval(), experts, f"bf16 on {where}, sdpa attention, {experts} experts"


def evaluate_drafts(model: Target, drafts: Mapping[str, Draft], corpus: Corpus, smoke: bool) -> dict:
    """Each draft's figures; all of them draft for the same answers of the target."""
    windows = [(64, 64)] if smoke else [(1024, 16), (4096, 4)]
    runs: list[dict[str, Any]] = [
        {"new_tokens": 24 if smoke else 256, "temperature": temperature} for temperature in (0.0, 0.8)
    ]
    answers = [continuations(model, corpus.prompts, **settings) for settings in runs]
    return {
        name: {
            "held_out": [held_out_metrics(model, draft, corpus, length, rows) for length, rows in windows],
            "speculative_decoding": [
                chain_acceptance(model, draft, corpus.prompts, answer, settings)
                for settings, answer in zip(runs, answers, strict=True)
            ],
        }
        for name, draft in drafts.items()
    }


def evaluate(folder: Path, corpus: Corpus, device: torch.device, smoke: bool) -> dict:
    model, experts, arithmetic = load_target(folder, device)
    nextn = load_nextn(folder, model.config).to(device)
    nextn.block.mlp.experts.config._experts_implementation = experts
    return {
        "arithmetic": arithmetic,
        **evaluate_drafts(model, {"nextn": nextn}, corpus, smoke)["nextn"],
        "router_bias_range": [
            [round(gate.min().item(), 4), round(gate.max().item(), 4)]
            for name, gate in [*model.named_buffers(), *nextn.named_buffers()]
            if name.endswith("e_score_correction_bias")
        ],
        "samples": samples(model, folder, 24 if smoke else 160),
    }
