"""Train the embedded demo model: a small DeepSeek-V3 with a NextN (MTP) layer, written as a hub folder.

    python -m bench.demo_training --out DIR                # on a machine with a GPU, about 10 minutes
    python -m bench.demo_training --out DIR --smoke        # on a CPU, about a minute: every stage, no useful model
    python -m bench.demo_training --out DIR --drafts       # the EAGLE3 heads for the target: see train_eagle3.py

DIR receives `target/` (config, bf16 weights, tokenizer, chat template, model card) and `train_demo.json` (the
measurements). An interrupted run continues from the checkpoint in --work when it is started again.

The model is Hugging Face's DeepseekV3ForCausalLM. Weights are trained as bf16 with a float32 master copy in the
optimizer, so what is measured and written is what was trained, without rounding at the end. Training replaces the
library's mixture layer by an equal one that compiles well (`training.dense_moe_forward`); the evaluation runs the
library's own forward on the written folder.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.demo_training.cards import write_card
from bench.demo_training.corpus import build_corpus
from bench.demo_training.evaluation import evaluate, verify_folder
from bench.demo_training.model import (
    CONFIG,
    hub_tensors,
    write_config_and_tokenizer,
    write_json,
    write_weights,
)
from bench.demo_training.train_eagle3 import train_drafts
from bench.demo_training.train_target import Trainer, forward_agreement
from bench.demo_training.training import (
    describe_environment,
)

DELIVERED_TARGET = Path(__file__).resolve().parents[2] / "jaxspec" / "demo" / "target"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--out", type=Path, required=True, help="where target/ and train_demo.json are written")
    parser.add_argument("--work", type=Path, default=Path("/tmp/train_demo"), help="corpus cache and checkpoint")
    parser.add_argument(
        "--minutes", type=float, help="training time, without corpus and evaluation; default 7.6 or 4.5"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--draft-weight", type=float, default=0.3, help="weight of the draft loss in the joint phases")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps of everything, on the CPU")
    parser.add_argument("--drafts", action="store_true", help="only train the EAGLE3 heads for --target")
    parser.add_argument("--target", type=Path, default=DELIVERED_TARGET, help="with --drafts: the target's folder")
    args = parser.parse_args()
    args.minutes = args.minutes or (4.5 if args.drafts else 7.6)
    return args


def main() -> None:
    args = parse_arguments()
    started = time.monotonic()
    if not args.smoke and not torch.cuda.is_available():
        raise SystemExit("training needs a GPU; --smoke runs every stage on the CPU")
    device = torch.device("cpu" if args.smoke else "cuda")
    if args.drafts:
        train_drafts(args, device)
        return
    folder = args.out / "target"
    corpus, tokenizer = build_corpus(args.work, args.seed, args.smoke)
    corpus_seconds = time.monotonic() - started
    print(json.dumps({"corpus_seconds": round(corpus_seconds, 1), **corpus.report["train"]}), flush=True)

    write_config_and_tokenizer(folder, tokenizer)
    trainer = Trainer(args, folder, corpus, device)
    trainer.resume()
    # The cuDNN kernel supports keys and values of different widths; on Hopper it is several times faster than the default.
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION] if device.type == "cuda" else [SDPBackend.MATH]):
        trainer.run()
    tensors = hub_tensors(trainer.model, trainer.nextn)
    write_weights(folder, tensors)

    verification = verify_folder(folder, tensors) | forward_agreement(trainer, folder)
    sizes = {"target": sum(p.numel() for p in trainer.model.parameters()),
             "nextn": sum(p.numel() for p in trainer.nextn.parameters())}  # fmt: skip
    options = {"minutes": args.minutes, "seed": args.seed, "rate": args.rate, "draft-weight": args.draft_weight}
    results: dict[str, Any] = {
        "command": "python -m bench.demo_training --out DIR" + (" --smoke" if args.smoke else "")
        + "".join(f" --{name} {value:g}" for name, value in options.items()),
        "environment": describe_environment(device),
        "parameters": sizes | {"total": sum(sizes.values())},
        "config": CONFIG,
        "training": {
            "optimizer": "Muon for matrices inside the layers (momentum 0.95, decoupled weight decay 0.1), Adam (0.9, "
            "0.95) for embedding, head, routers and norms; bf16 weights and gradients, float32 masters",
            "peak_learning_rate": args.rate,
            "draft_weight_in_joint_phases": args.draft_weight,
            "steps": trainer.done["steps"],
            "tokens": trainer.done["tokens"],
            "passes_over_the_corpus": round(trainer.done["tokens"] / len(corpus.train), 2),
            "seconds": round(trainer.done["seconds"], 1),
            "phases": trainer.done["phases"],
        },
        "verification": verification,
        "evaluation": evaluate(folder, corpus, device, args.smoke),
        "corpus": corpus.report,
        "log": trainer.done["log"],
    }  # fmt: skip
    results["wall_seconds"] = {"corpus": round(corpus_seconds, 1), "whole_run": round(time.monotonic() - started, 1)}
    write_card(folder, results)
    write_json(args.out / "train_demo.json", results)
    print(
        json.dumps({key: results[key] for key in ("training", "verification", "evaluation", "wall_seconds")}, indent=1)
    )


if __name__ == "__main__":
    main()
