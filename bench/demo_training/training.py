"""What the training of the demo model and of its EAGLE3 heads share: mixture layers, optimizer, batches.

Training replaces the library's mixture layer by an equal one that compiles well (`dense_moe_forward`).
"""

from __future__ import annotations

import math
import platform
import subprocess
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional

from bench.demo_training.corpus import Corpus
from bench.demo_training.model import Target, mixture_layers


def rank_below(scores: Tensor) -> Tensor:
    """For each entry of the last axis, how many others are larger: a top-k of a few entries without a sort."""
    return (scores[..., None, :] > scores[..., :, None]).sum(-1)


def routing_weights(gate: Any, flat: Tensor) -> tuple[Tensor, Tensor]:
    """The noaux_tc router as dense [tokens, experts] weights, and which experts were chosen."""
    scores = functional.linear(flat.float(), gate.weight.float()).sigmoid()
    biased = (scores.detach() + gate.e_score_correction_bias).unflatten(-1, (gate.num_group, -1))
    group_score = torch.where(rank_below(biased) < 2, biased, 0.0).sum(-1)
    allowed = (rank_below(group_score) < gate.topk_group)[..., None].expand_as(biased)
    biased = torch.where(allowed, biased, float("-inf")).flatten(-2)
    chosen = rank_below(biased) < gate.top_k
    weights = scores * chosen
    if gate.norm_topk_prob:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * gate.routed_scaling_factor, chosen


def dense_moe_forward(moe: Any, hidden: Tensor) -> Tensor:
    """The mixture layer with every expert run on every token.

    With 8 small experts, two wide matrix products beat sorting tokens by expert: no gathers, and it all fuses.
    """
    flat = hidden.flatten(0, -2)
    weights, chosen = routing_weights(moe.gate, flat)
    if moe.training:
        moe.load.add_(chosen.sum(0))
    experts = moe.experts
    gate_up = functional.linear(flat, experts.gate_up_proj.flatten(0, 1)).unflatten(-1, (experts.num_experts, 2, -1))
    inner = functional.silu(gate_up[:, :, 0]) * gate_up[:, :, 1] * weights[..., None].to(hidden.dtype)
    routed = inner.flatten(1) @ experts.down_proj.transpose(1, 2).flatten(0, 1)
    return routed.view_as(hidden) + moe.shared_experts(hidden)


def prepare_for_training(model: Target, drafts: list[nn.Module], compiled: bool) -> None:
    model.set_attn_implementation("draft_chain")
    for moe in mixture_layers(model, *drafts):
        moe.register_buffer("load", torch.zeros(moe.experts.num_experts, device=model.device), persistent=False)
        moe.forward = types.MethodType(dense_moe_forward, moe)
    if compiled:
        # Layer by layer: the layers share their compiled code, so it needs seconds instead of minutes.
        torch._dynamo.config.recompile_limit = 64
        for module in (*model.model.layers, *drafts):
            module.compile(dynamic=False)


def update_router_biases(modules: list[Any], step: float) -> None:
    """Balance without an auxiliary loss: raise the bias of experts below the mean load, lower the others'."""
    for moe in modules:
        moe.gate.e_score_correction_bias.add_((moe.load.mean() - moe.load).sign(), alpha=step)
        moe.load.zero_()


def orthogonalize(matrices: Tensor) -> Tensor:
    """Muon's Newton-Schulz iteration on a stack of matrices: singular values towards 1."""
    x = matrices.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x if wide else x.mT


class MuonAdam:
    """Muon for the matrices inside the layers, Adam for the rest, on float32 masters of bf16 weights."""

    def __init__(self, named_parameters: Iterator[tuple[str, nn.Parameter]]) -> None:
        by_shape: dict[tuple[int, int], list[tuple[nn.Parameter, tuple[int, int]]]] = {}
        self.adam_parameters = []
        for name, parameter in named_parameters:
            if parameter.ndim == 1 or name.endswith(("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight")):
                self.adam_parameters.append(parameter)
                continue
            rows, columns = parameter.shape[-2:]
            # Each expert's gate and up projections lie in one tensor; Muon works on them one by one.
            shape = (rows // 2 if name.endswith("gate_up_proj") else rows, columns)
            by_shape.setdefault(shape, []).append((parameter, shape))
        self.groups: list[dict[str, Any]] = []
        for shape, members in by_shape.items():
            parameters = [parameter for parameter, _ in members]
            master = torch.cat([p.detach().float().view(-1, *shape) for p in parameters])
            self.groups.append({"shape": shape, "parameters": parameters, "master": master, "momentum": master * 0})
        self.adam_masters = [p.detach().float() for p in self.adam_parameters]
        self.adam = torch.optim.Adam(self.adam_masters, betas=(0.9, 0.95), fused=self.adam_masters[0].is_cuda)

    @torch.no_grad()
    def step(self, rate: float, weight_decay: float = 0.1) -> None:
        for group in self.groups:
            shape, parameters, momentum = group["shape"], group["parameters"], group["momentum"]
            gradient = torch.cat([p.grad.view(-1, *shape) for p in parameters]).float()
            momentum.lerp_(gradient, 0.05)
            update = orthogonalize(gradient.lerp_(momentum, 0.95))
            # Entries of the size Adam gives them, so that one learning rate serves both (Moonlight's scaling).
            group["master"].mul_(1 - rate * weight_decay).add_(update, alpha=-0.2 * math.sqrt(max(shape)) * rate)
            pieces = group["master"].split([p.numel() // math.prod(shape) for p in parameters])
            torch._foreach_copy_([p.data.view(-1, *shape) for p in parameters], list(pieces))
        for master, parameter in zip(self.adam_masters, self.adam_parameters, strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float()
        torch.nn.utils.clip_grad_norm_(self.adam_masters, 1.0)
        for settings in self.adam.param_groups:
            settings["lr"] = rate
        self.adam.step()
        torch._foreach_copy_([p.data for p in self.adam_parameters], self.adam_masters)
        for parameter in [*self.adam_parameters, *(p for group in self.groups for p in group["parameters"])]:
            parameter.grad = None

    def state(self) -> dict:
        groups = [{key: group[key] for key in ("master", "momentum")} for group in self.groups]
        return {"groups": groups, "masters": self.adam_masters, "adam": self.adam.state_dict()}

    def load(self, state: dict) -> None:
        for group, saved in zip(self.groups, state["groups"], strict=True):
            group["master"].copy_(saved["master"])
            group["momentum"].copy_(saved["momentum"])
        torch._foreach_copy_(self.adam_masters, state["masters"])
        self.adam.load_state_dict(state["adam"])


class Windows:
    """Random windows of the packed token stream, a quarter of them moved back to the start of their document."""

    def __init__(self, corpus: Corpus, device: torch.device, seed: int) -> None:
        self.tokens = torch.from_numpy(corpus.train).to(device)
        self.document_starts = corpus.train_starts
        self.rng = np.random.default_rng(seed)
        self.pending: dict[int, np.ndarray] = {}
        self.passes = 0.0

    def sample(self, rows: int, length: int, extra: int) -> Tensor:
        if len(self.pending.get(length, ())) < rows:
            offsets = np.arange(self.rng.integers(length), len(self.tokens) - length - extra, length)
            self.pending[length] = self.rng.permutation(offsets)
        starts, self.pending[length] = self.pending[length][:rows].copy(), self.pending[length][rows:]
        snapped = rows // 4
        places = np.searchsorted(self.document_starts, starts[:snapped], side="right") - 1
        starts[:snapped] = self.document_starts[places]
        self.passes += rows * length / len(self.tokens)
        index = torch.from_numpy(starts).to(self.tokens.device)[:, None]
        return self.tokens[index + torch.arange(length + extra, device=self.tokens.device)].long()


def describe_environment(device: torch.device) -> dict:
    environment: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU ({platform.machine()})",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if device.type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        environment["driver"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
        environment["cuda"] = torch.version.cuda
    return environment
