"""`bench convert`: how fast a checkpoint is converted and loaded, and how much host memory that needs.

First a checkpoint of random bf16 weights is written in Hugging Face layout, in shards as on the hub. Conversion and
loading then run in separate processes, whose peak memory (ru_maxrss) counts; the part that imports and jax's start need
is given beside it. All files are in the page cache, so this is the speed of the code, not of a disk.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import record
from bench.harness.shards import Tensor, write_checkpoint
from jaxspec.models.decoder import decoder_key_map
from jaxspec.models.registry import read_config

# Sizes chosen so that one mixture layer is a few hundred MiB, as in published models of this family.
LARGE: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "torch_dtype": "bfloat16",
    "vocab_size": 32768, "hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 11264, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192, "rope_theta": 50000.0,
    "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "n_routed_experts": 32, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.446,
    "scoring_func": "sigmoid", "topk_method": "noaux_tc", "num_nextn_predict_layers": 0, "eos_token_id": 1,
}  # fmt: skip
SMALL = LARGE | {
    "vocab_size": 4096, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
    "n_routed_experts": 8, "moe_intermediate_size": 256,
}  # fmt: skip
SHARD_BYTES = 2**30
MIB = 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--mib", type=int, metavar="N", help="checkpoint size at least (default: 2048; CPU: 64)")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder); about twice --mib")
    parser.add_argument("--worker", nargs="+", metavar="WORD", help=argparse.SUPPRESS)
    record.add_arguments(parser)


def make_checkpoint(folder: Path, at_least_bytes: int) -> int:
    """Writes the checkpoint, with as many layers as reach `at_least_bytes`, and returns its bytes."""
    base = LARGE if at_least_bytes >= 1024 * MIB else SMALL
    layers = 2
    while _bytes(shapes := _tensors(base | {"num_hidden_layers": layers})) < at_least_bytes:
        layers += 1
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(base | {"num_hidden_layers": layers}))
    rng = np.random.default_rng(0)

    def make(name: str) -> dict[str, np.ndarray]:
        if _is_float32(name):
            return {name: np.zeros(shapes[name], np.float32)}
        # Random sign and mantissa below one fixed exponent: finite numbers of about 0.01.
        bits = rng.integers(0, 2**16, shapes[name], np.uint16)
        return {name: (bits & 0x807F) | 0x3C00}

    weights = {name: {name: Tensor("F32" if _is_float32(name) else "BF16", shape)} for name, shape in shapes.items()}
    return write_checkpoint(folder, weights, make, shard_bytes=SHARD_BYTES)


def _tensors(hf: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {piece.name: piece.shape for pieces in decoder_key_map(read_config(hf)).values() for piece in pieces}


def _is_float32(name: str) -> bool:
    return name.endswith("e_score_correction_bias")


def _bytes(shapes: dict[str, tuple[int, ...]]) -> int:
    return sum(int(np.prod(shape)) * (4 if _is_float32(name) else 2) for name, shape in shapes.items())


def gib(size: float) -> str:
    return f"{size / 2**30:.2f}"


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def work(words: list[str]) -> int:
    """One measurement, in a process of its own: prints a JSON object."""
    import jax

    from bench.harness.models import mesh_of_one
    from convert.convert import convert_checkpoint
    from jaxspec.loading.checkpoint import load_params, open_checkpoint

    figures: dict[str, Any] = {}
    if words[0] == "convert":
        figures["baseline_bytes"] = _peak_bytes()
        started = time.perf_counter()
        convert_checkpoint(words[1], words[2])
        figures["seconds"] = time.perf_counter() - started
    else:
        mesh = mesh_of_one()
        jax.block_until_ready(jax.device_put(np.ones(8)))
        figures["baseline_bytes"] = _peak_bytes()
        figures["seconds"] = []
        for _ in range(2):
            started = time.perf_counter()
            _, params = load_params(open_checkpoint(words[1]), mesh)
            jax.block_until_ready(params)
            figures["seconds"].append(time.perf_counter() - started)
            figures["bytes"] = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
            del params
    figures["peak_bytes"] = _peak_bytes()
    print(json.dumps(figures))
    return 0


def _measure(*words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", "convert", "--worker", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().split("\n")[-1])


def run(arguments: argparse.Namespace) -> int:
    if arguments.worker:
        return work(arguments.worker)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        # This process must not start jax before the workers: on a GPU it would take most of the memory.
        gpu = arguments.mib is None and _has_gpu()
        source, out = Path(scratch) / "source", Path(scratch) / "out"
        size = make_checkpoint(source, (arguments.mib or (2048 if gpu else 64)) * MIB)
        largest = max(_parameter_bytes(source).items(), key=lambda item: item[1])
        converted = _measure("convert", str(source), str(out))
        loaded, direct = _measure("load", str(out)), _measure("load", str(source))
        layers = json.loads((source / "config.json").read_text())["num_hidden_layers"]
    result = {
        "benchmark": "convert",
        "checkpoint_bytes": size,
        "layers": layers,
        "largest_parameter": {"name": largest[0], "bytes": largest[1]},
        "files": "in the page cache",
        "convert": converted | {"bytes_per_s": size / converted["seconds"]},
        "load": _with_rates(loaded),
        "load_hugging_face": _with_rates(direct),
    }
    print(f"checkpoint {gib(size)} GiB, {layers} layers, largest parameter {gib(largest[1])} GiB ({largest[0]})")
    header = ["", "seconds", "MB/s", "peak GiB", "of it at start"]
    lines = [
        [
            what,
            f"{seconds:.2f}",
            f"{bytes_ / seconds / 1e6:.0f}",
            gib(figures["peak_bytes"]),
            gib(figures["baseline_bytes"]),
        ]
        for what, seconds, bytes_, figures in (
            ("convert", converted["seconds"], size, converted),
            *(
                (f"load {what} ({time_})", seconds, figures["bytes"], figures)
                for what, figures in (("converted", loaded), ("Hugging Face", direct))
                for time_, seconds in zip(("first", "again"), figures["seconds"], strict=True)
            ),
        )
    ]
    print(record.table(header, lines))
    record.write("convert", result, arguments)
    return 0


def _with_rates(loaded: dict[str, Any]) -> dict[str, Any]:
    first, again = (loaded["bytes"] / seconds for seconds in loaded["seconds"])
    return loaded | {"bytes_per_s": again, "bytes_per_s_first": first}


def _parameter_bytes(source: Path) -> dict[str, int]:
    """Bytes of each parameter, which conversion makes from one tensor or several."""
    pieces = decoder_key_map(read_config(json.loads((source / "config.json").read_text())))
    return {".".join(map(str, path)): _bytes({p.name: p.shape for p in parts}) for path, parts in pieces.items()}


def _has_gpu() -> bool:
    code = "import jax; print(jax.default_backend())"
    return (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False).stdout.strip()
        == "gpu"
    )
