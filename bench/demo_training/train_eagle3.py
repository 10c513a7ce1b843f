"""Train the two EAGLE3 heads of the demo target (see eagle3.py); the target stays as it is.

    python -m bench.demo_training --out DIR --drafts             # on a machine with a GPU, about 6 minutes
    python -m bench.demo_training --out DIR --drafts --smoke     # on a CPU, about a minute

DIR receives `eagle3-llama/`, `eagle3-mla/` (config, bf16 weights, card) and `train_eagle3.json` (the measurements).

Both heads learn from the same batches, so the target runs once for both. Each batch is drafted for DRAFT_STEPS steps
from every position (EAGLE-3's training-time test): from the second step on a head reads its own hidden states, with
the attention that it has while it drafts (`model.chain_attention`).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import DeepseekV3ForCausalLM

from bench.demo_training.cards import write_draft_card
from bench.demo_training.corpus import Corpus, build_corpus
from bench.demo_training.eagle3 import CONFIGS, Eagle3Head, load_head, write_head
from bench.demo_training.evaluation import evaluate_drafts, load_target
from bench.demo_training.model import DRAFT_STEPS, Target, rope_at, to_bfloat16, write_json
from bench.demo_training.training import MuonAdam, Windows, describe_environment, prepare_for_training

WARM_UP_STEPS = 100


@dataclass
class Phase:
    name: str
    share: float  # of the training time
    length: int
    rows: int
    max_steps: int | None = None


# The second phase is for the rope positions that the first one never sees.
PHASES = [Phase("short", 0.75, 1024, 64), Phase("long", 0.25, 4096, 16)]
SMOKE_PHASES = [Phase("short", 0.7, 96, 2, max_steps=3), Phase("long", 0.3, 160, 1, max_steps=1)]


@torch.no_grad()
def target_states(model: Target, tokens: Tensor, captured: list[int]) -> tuple[Tensor, Tensor]:
    """The captured residual streams side by side, and the target's logits.

    The layers are called one by one: collecting hidden states by the library's hooks would break up compiled layers.
    """
    hidden = model.model.embed_tokens(tokens)
    rope, streams = rope_at(model, hidden, 0), []
    for index, layer in enumerate(model.model.layers):
        if index in captured:
            streams.append(hidden)
        hidden = layer(hidden, position_embeddings=rope)
    return torch.cat(streams, -1), model.lm_head(model.model.norm(hidden))


def divergence(normed: Tensor, head: Tensor, target_logits: Tensor, step: int) -> Tensor:
    """KL divergence from the target's distribution, renormalised to the draft's vocabulary.

    Draft step j at position i predicts the token whose target distribution is at position i + j.
    """
    draft = functional.log_softmax(functional.linear(normed[:, :-step], head).float(), -1)
    target = functional.log_softmax(target_logits[:, step:].float(), -1)
    return (target.exp() * (target - draft)).sum(-1).mean()


class DraftTrainer:
    def __init__(self, args: argparse.Namespace, corpus: Corpus, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        self.args, self.device = args, device
        model: Target = DeepseekV3ForCausalLM.from_pretrained(args.target)
        self.model = model.to(device).eval().requires_grad_(False)
        counts = torch.bincount(torch.from_numpy(corpus.train).long(), minlength=self.model.config.vocab_size)
        self.heads: dict[str, Eagle3Head] = {}
        for name, config in CONFIGS.items():
            self.heads[name] = Eagle3Head(config)
            self.heads[name].start_from(self.model, counts)
            to_bfloat16(self.heads[name]).to(device).train()
        self.coverage = {name: counts[h.t2d.cpu()].sum().item() / len(corpus.train) if h.reduced else 1.0
                         for name, h in self.heads.items()}  # fmt: skip
        prepare_for_training(self.model, list(self.heads.values()), device.type == "cuda")
        self.divergence: Callable = divergence
        if device.type == "cuda":
            self.divergence = torch.compile(divergence, dynamic=False)
        self.optimizers = {name: MuonAdam(head.named_parameters()) for name, head in self.heads.items()}
        self.windows = Windows(corpus, device, args.seed)
        self.steps, self.tokens, self.seconds = 0, 0, 0.0
        self.log: list[dict] = []
        self.phases: dict[str, dict] = {}

    def loss(self, head: Eagle3Head, window: Tensor, streams: Tensor, target_logits: Tensor) -> list[Tensor]:
        """The divergence of each draft step."""
        length, losses = streams.shape[1], list[Tensor]()
        chain: list[tuple[Tensor, Tensor]] = []
        state = head.fc(streams)
        if head.reduced:
            target_logits = target_logits[..., head.target_ids()]
        for step in range(1, DRAFT_STEPS + 1):
            embedding = self.model.model.embed_tokens(window[:, step : step + length])
            state, normed = head(embedding, state, head.rope(state, step - 1), chain)
            losses.append(self.divergence(normed, head.lm_head.weight, target_logits, step))
        return losses

    def run(self) -> None:
        done = 0.0
        for phase in SMOKE_PHASES if self.args.smoke else PHASES:
            self.run_phase(phase, done)
            done += phase.share

    def run_phase(self, phase: Phase, done: float) -> None:
        captured = next(iter(self.heads.values())).captured
        total, elapsed, steps, started, last_look = self.args.minutes * 60 * phase.share, 0.0, 0, time.monotonic(), 0.0
        while elapsed < total and (phase.max_steps is None or steps < phase.max_steps):
            progress = done + phase.share * elapsed / total
            rate = self.args.rate * min(1.0, (self.steps + 1) / WARM_UP_STEPS) * max(0.01, 1 - progress)
            window = self.windows.sample(phase.rows, phase.length, DRAFT_STEPS + 1)
            streams, target_logits = target_states(self.model, window[:, : phase.length], captured)
            losses = {}
            for name, head in self.heads.items():
                losses[name] = self.loss(head, window, streams, target_logits)
                torch.stack(losses[name]).mean().backward()
                self.optimizers[name].step(rate)
            steps += 1
            self.steps += 1
            self.tokens += phase.rows * phase.length
            if steps % 20 == 0 or steps <= 3:
                # Reading a loss waits for the GPU, so the clock below cannot run ahead of the work.
                entry: dict[str, Any] = {"phase": phase.name, "step": self.steps}
                entry |= {name: [round(loss.item(), 4) for loss in each] for name, each in losses.items()}
                if not all(math.isfinite(sum(entry[name])) for name in losses):
                    raise FloatingPointError(f"training diverged: {entry}")
                elapsed = time.monotonic() - started
                if steps == 1 or elapsed - last_look > 20 or phase.max_steps:
                    self.log.append(entry | {"seconds": round(self.seconds + elapsed, 1)})
                    print(json.dumps(self.log[-1]), flush=True)
                    last_look = elapsed
            elapsed = time.monotonic() - started
        self.seconds += elapsed
        self.phases[phase.name] = {"steps": steps, "seconds": round(elapsed, 1), "sequence_length": phase.length,
                                   "sequences_per_step": phase.rows, "draft_steps": DRAFT_STEPS}  # fmt: skip


@torch.inference_mode()
def verify(trainer: DraftTrainer, model: Target, exported: dict[str, Eagle3Head], tokens: Tensor) -> dict:
    """The exported weights are the trained ones, and the training forward is that of the library's target."""
    report = {}
    for name, head in exported.items():
        trained = trainer.heads[name].state_dict()
        for key, tensor in head.state_dict().items():
            if tensor.dtype != trained[key].dtype or not torch.equal(tensor, trained[key]):
                raise ValueError(f"{name}: {key} changed on its way through the folder")
        streams, _ = target_states(trainer.model, tokens, head.captured)
        fed = torch.roll(tokens, -1, 1)
        ours = head.advance(model, fed, head.fc(streams), 1, [])[1]
        theirs = head.advance(model, fed, head.begin(model, tokens)[1], 1, [])[1]
        finite = theirs.isfinite()
        difference = (ours[finite].float() - theirs[finite].float()).norm() / theirs[finite].float().norm()
        report[name] = {
            "weights_equal_trained_weights": True,
            "relative_logit_difference_of_training_and_library_forward": round(difference.item(), 6),
        }
    return report


def train_drafts(args: argparse.Namespace, device: torch.device) -> None:
    started = time.monotonic()
    tokenizer = Tokenizer.from_file(str(args.target / "tokenizer.json"))
    corpus, _ = build_corpus(args.work, args.seed, args.smoke, tokenizer)
    corpus_seconds = time.monotonic() - started
    print(json.dumps({"corpus_seconds": round(corpus_seconds, 1), **corpus.report["train"]}), flush=True)

    trainer = DraftTrainer(args, corpus, device)
    backend = SDPBackend.CUDNN_ATTENTION if device.type == "cuda" else SDPBackend.MATH
    with sdpa_kernel([backend]):  # see `main` in __main__.py
        trainer.run()
    for name, head in trainer.heads.items():
        write_head(args.out / name, CONFIGS[name], head)

    model, _, arithmetic = load_target(args.target, device)
    exported = {name: load_head(args.out / name).to(device) for name in CONFIGS}
    tokens = torch.from_numpy(corpus.held_out[None, : 96 if args.smoke else 1024]).to(device).long()
    verification = verify(trainer, model, exported, tokens)
    evaluation = evaluate_drafts(model, exported, corpus, args.smoke)
    results: dict[str, Any] = {
        "command": "python -m bench.demo_training --out DIR --drafts" + (" --smoke" if args.smoke else "")
        + f" --minutes {args.minutes:g} --seed {args.seed} --rate {args.rate:g}",
        "environment": describe_environment(device),
        "training": {
            "optimizer": "Muon for matrices inside the layer (momentum 0.95, decoupled weight decay 0.1), Adam (0.9, "
            "0.95) for output head and norms; bf16 weights and gradients, float32 masters",
            "peak_learning_rate": args.rate,
            "steps": trainer.steps,
            "tokens": trainer.tokens,
            "passes_over_the_corpus": round(trainer.tokens / len(corpus.train), 2),
            "seconds": round(trainer.seconds, 1),
            "phases": trainer.phases,
        },
        "arithmetic": arithmetic,
        "heads": {
            name: {
                "config": CONFIGS[name],
                "captured_layer_inputs": exported[name].captured,
                "parameters": sum(p.numel() for p in exported[name].parameters()),
                "file_bytes": (args.out / name / "model.safetensors").stat().st_size,
                "vocabulary_coverage": round(trainer.coverage[name], 4),
                "verification": verification[name],
                "evaluation": evaluation[name],
            }
            for name in CONFIGS
        },
        "corpus": {part: corpus.report[part] for part in ("train", "held_out")},
        "log": trainer.log,
    }  # fmt: skip
    results["wall_seconds"] = {"corpus": round(corpus_seconds, 1), "whole_run": round(time.monotonic() - started, 1)}
    for name in CONFIGS:
        write_draft_card(args.out / name, name, results)
    write_json(args.out / "train_eagle3.json", results)
    print(json.dumps({key: results[key] for key in ("training", "heads", "wall_seconds")}), flush=True)
