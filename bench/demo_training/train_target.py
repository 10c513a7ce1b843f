"""Training of the demo target and its NextN layer, in phases, with checkpoints to continue from."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from bench.demo_training.corpus import Corpus
from bench.demo_training.model import DRAFT_STEPS, NextN, Target, mixture_layers, rope_at, to_bfloat16
from bench.demo_training.training import MuonAdam, Windows, prepare_for_training, update_router_biases

BIAS_STEP = 0.001  # of the load balancing, DeepSeek-V3 report section 2.1.2 and 4.2


@dataclass
class Phase:
    """A stretch of training; `share` is its part of the training time."""

    name: str
    share: float
    length: int
    rows: int
    trains_target: bool
    draft_steps: int
    max_steps: int | None = None


PHASES = [
    Phase("joint", 0.60, 1024, 96, True, 1),
    Phase("joint-long", 0.12, 4096, 24, True, 1),
    Phase("draft", 0.18, 1024, 64, False, DRAFT_STEPS),
    Phase("draft-long", 0.10, 4096, 16, False, DRAFT_STEPS),
]
SMOKE_PHASES = [
    Phase("joint", 0.5, 96, 2, True, 1, max_steps=3),
    Phase("joint-long", 0.1, 160, 1, True, 1, max_steps=1),
    Phase("draft", 0.4, 96, 2, False, DRAFT_STEPS, max_steps=2),
]


def language_loss(hidden: Tensor, head: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = functional.linear(hidden, head)
    return functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits


def draft_loss(hidden: Tensor, head: Tensor, target_logits: Tensor, labels: Tensor, step: int) -> Tensor:
    """Divergence from the target's distribution for the same token, plus a little cross entropy with the text.

    Draft step j at position i predicts the token whose target distribution is at position i + j.
    """
    draft = functional.log_softmax(functional.linear(hidden[:, :-step], head).float(), -1)
    target = functional.log_softmax(target_logits[:, step:].float(), -1)
    divergence = (target.exp() * (target - draft)).sum(-1).mean()
    text = -draft.gather(-1, labels[:, :-step, None]).mean()
    return divergence + 0.1 * text


class Trainer:
    def __init__(self, args: argparse.Namespace, folder: Path, corpus: Corpus, device: torch.device) -> None:
        torch.manual_seed(args.seed)
        config = DeepseekV3Config.from_pretrained(folder)
        model: Target = to_bfloat16(DeepseekV3ForCausalLM(config))
        self.model = model.to(device).train()
        self.nextn: Any = to_bfloat16(NextN(config)).to(device).train()
        compiled = device.type == "cuda"
        prepare_for_training(self.model, [self.nextn], compiled)
        self.language_loss: Callable = torch.compile(language_loss, dynamic=False) if compiled else language_loss
        self.draft_loss: Callable = torch.compile(draft_loss, dynamic=False) if compiled else draft_loss
        self.target_optimizer = MuonAdam(self.model.named_parameters())
        self.draft_optimizer = MuonAdam(self.nextn.named_parameters())
        self.args, self.device, self.corpus = args, device, corpus
        self.windows = Windows(corpus, device, args.seed)
        self.phases = SMOKE_PHASES if args.smoke else PHASES
        self.checkpoint = Path(args.work) / f"checkpoint-{'smoke' if args.smoke else 'full'}-{args.seed}.pt"
        self.done: dict[str, Any] = {
            "phase": 0,
            "phase_seconds": 0.0,
            "seconds": 0.0,
            "steps": 0,
            "tokens": 0,
            "log": [],
            "phases": {},
        }

    def save(self) -> None:
        state = {
            "done": self.done,
            "model": self.model.state_dict(),
            "nextn": self.nextn.state_dict(),
            "target_optimizer": self.target_optimizer.state(),
            "draft_optimizer": self.draft_optimizer.state(),
        }
        temporary = self.checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.rename(self.checkpoint)

    def resume(self) -> None:
        if self.checkpoint.exists():
            state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
            self.done = state["done"]
            self.model.load_state_dict(state["model"])
            self.nextn.load_state_dict(state["nextn"])
            self.target_optimizer.load(state["target_optimizer"])
            self.draft_optimizer.load(state["draft_optimizer"])
            self.windows = Windows(self.corpus, self.device, self.args.seed + self.done["steps"])

    def loss(self, phase: Phase, window: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Total, language-model and draft loss of one batch."""
        length = phase.length
        model, head = self.model, self.model.lm_head.weight
        with torch.set_grad_enabled(phase.trains_target):
            hidden = model.model(input_ids=window[:, :length], use_cache=False).last_hidden_state
            language, logits = self.language_loss(hidden, head, window[:, 1 : length + 1])
        drafted, target_logits = list[Tensor](), logits.detach()
        chain: list[tuple[Tensor, Tensor]] = []
        # In the joint phases the draft's gradient reaches the target's hidden states, embedding and head: it teaches
        # them to say something of the token after next. Later the target is final and only the draft layer learns.
        for step in range(1, phase.draft_steps + 1):
            with torch.set_grad_enabled(phase.trains_target):
                embedding = model.model.embed_tokens(window[:, step : step + length])
            hidden = self.nextn(embedding, hidden, rope_at(model, hidden, step - 1), chain)
            labels = window[:, step + 1 : step + 1 + length]
            weight = head if phase.trains_target else head.detach()
            drafted.append(self.draft_loss(hidden, weight, target_logits, labels, step))
        draft = torch.stack(drafted).mean()
        return (language + self.args.draft_weight * draft if phase.trains_target else draft), language, draft

    def rates(self, phase: Phase, fraction: float) -> tuple[float, float]:
        """Learning rates of target and draft: warm-up, constant, then linear to zero over each one's last part."""
        index = self.phases.index(phase)
        same = [p for p in self.phases if p.trains_target == phase.trains_target]
        before = sum(p.share for p in self.phases[:index] if p in same)
        progress = (before + fraction * phase.share) / sum(p.share for p in same)
        warm = min(1.0, (self.done["steps"] + 1) / 100)
        if phase.trains_target:
            peak = self.args.rate * warm
            return peak * min(1.0, max(0.01, (1 - progress) / 0.6)), peak
        return 0.0, self.args.rate * max(0.01, 1 - progress)

    @torch.no_grad()
    def held_out_loss(self, phase: Phase) -> float:
        """A quick look at the held-out text, in windows of the phase's shape."""
        tokens = torch.from_numpy(self.corpus.held_out[: phase.rows * phase.length + 1]).to(self.device).long()
        rows = (len(tokens) - 1) // phase.length
        used = rows * phase.length
        self.model.eval()
        hidden = self.model.model(input_ids=tokens[:used].view(rows, -1), use_cache=False).last_hidden_state
        value = self.language_loss(hidden, self.model.lm_head.weight, tokens[1 : used + 1].view(rows, -1))[0].item()
        self.model.train(phase.trains_target)
        return value

    def run(self) -> None:
        for index in range(self.done["phase"], len(self.phases)):
            self.run_phase(self.phases[index])
            self.done |= {"phase": index + 1, "phase_seconds": 0.0}
            self.save()

    def run_phase(self, phase: Phase) -> None:
        total = self.args.minutes * 60 * phase.share
        target_moes, draft_moes = mixture_layers(self.model), mixture_layers(self.nextn)
        before, started, last_look = self.done["phase_seconds"], time.monotonic(), time.monotonic()
        seconds_before = self.done["seconds"]
        self.model.train(phase.trains_target)
        steps, elapsed = 0, before
        while elapsed < total and (phase.max_steps is None or steps < phase.max_steps):
            target_rate, draft_rate = self.rates(phase, elapsed / total)
            window = self.windows.sample(phase.rows, phase.length, phase.draft_steps + 1)
            loss, language, draft = self.loss(phase, window)
            loss.backward()
            self.draft_optimizer.step(draft_rate)
            update_router_biases(draft_moes, BIAS_STEP * draft_rate / self.args.rate)
            if phase.trains_target:
                self.target_optimizer.step(target_rate)
                update_router_biases(target_moes, BIAS_STEP * target_rate / self.args.rate)
            steps += 1
            self.done["steps"] += 1
            self.done["tokens"] += phase.rows * phase.length
            if steps % 20 == 0 or steps <= 3:
                # Reading a loss waits for the GPU, so the clock below cannot run ahead of the work.
                entry: dict[str, Any] = {"phase": phase.name, "step": self.done["steps"], "loss": round(language.item(), 4),
                         "draft_loss": round(draft.item(), 4)}  # fmt: skip
                if not math.isfinite(entry["loss"] + entry["draft_loss"]):
                    raise FloatingPointError(f"training diverged: {entry}")
                now = time.monotonic()
                if now - last_look > 30 or steps == 1 or phase.max_steps:
                    entry["held_out_loss"] = round(self.held_out_loss(phase), 4)
                    entry["seconds"] = round(seconds_before + now - started, 1)
                    self.done["log"].append(entry)
                    print(json.dumps(entry | {"tokens": self.done["tokens"]}), flush=True)
                    last_look = now
                    self.done |= {"phase_seconds": elapsed, "seconds": seconds_before + now - started}
                    self.save()
            elapsed = before + time.monotonic() - started
        seconds = seconds_before + time.monotonic() - started
        earlier = self.done["phases"].get(phase.name, {"steps": 0})
        self.done["phases"][phase.name] = {
            "steps": earlier["steps"] + steps,
            "seconds": round(elapsed, 1),
            "sequence_length": phase.length,
            "sequences_per_step": phase.rows,
            "trains_target": phase.trains_target,
            "draft_steps": phase.draft_steps,
        }
        self.done["seconds"] = seconds


def forward_agreement(trainer: Trainer, folder: Path) -> dict:
    """The training forward against the library's own on the written folder, on one held-out window."""
    tokens = torch.from_numpy(trainer.corpus.held_out[None, : trainer.phases[0].length]).to(trainer.device).long()
    reloaded: Target = DeepseekV3ForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    reloaded = reloaded.to(trainer.device).eval()
    trainer.model.eval()
    with torch.inference_mode():
        ours, theirs = (m(input_ids=tokens, use_cache=False).logits.float() for m in (trainer.model, reloaded))
    return {
        "relative_logit_difference": round(((ours - theirs).norm() / theirs.norm()).item(), 6),
        "same_first_choice": round((ours.argmax(-1) == theirs.argmax(-1)).float().mean().item(), 4),
    }
