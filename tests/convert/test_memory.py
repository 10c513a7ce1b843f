"""Converting needs memory for the largest part of a model, and loading for as much beside the weights."""

import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bench.harness.published import PUBLISHED
from bench.harness.shards import Tensor
from tests.tiny_models import CONFIGS

H, WIDTH = 2048, 8192  # gate_up is 64 MiB in bfloat16, the largest tensor that is written
LARGEST = 2 * WIDTH * H * 2
CONFIG = CONFIGS["llama"] | {"hidden_size": H, "intermediate_size": WIDTH, "torch_dtype": "bfloat16"}

CONVERT = """
from convert.convert import convert_checkpoint

convert_checkpoint(sys.argv[1], sys.argv[2])
"""
# On a CPU the weights that have been placed are in the same memory.
LOAD = """
import jax, numpy
from jaxspec.loading.checkpoint import load_params, open_checkpoint

_, params = load_params(open_checkpoint(sys.argv[1]), jax.sharding.Mesh(numpy.array(jax.devices()[:1]), ("tensor",)))
"""
PEAK = """
# Not ru_maxrss, which a new process inherits from the one that started it.
with open("/proc/self/status") as f:
    print(next(line.split()[1] for line in f if line.startswith("VmHWM")))
"""


def write_checkpoint(folder: Path, layers: int, stored: str = "bf16") -> None:
    """A Llama of `layers` layers of 96 MiB in one shard each, of random bytes (zeros would not be written out).

    stored: what its MLPs are in, "bf16" or a format of `PUBLISHED`.
    """
    config = CONFIG | {"num_hidden_layers": layers}
    K, N, D, V = (config[k] for k in ("num_key_value_heads", "num_attention_heads", "head_dim", "vocab_size"))
    layer = {
        "input_layernorm": (H,), "post_attention_layernorm": (H,), "self_attn.q_proj": (N * D, H),
        "self_attn.k_proj": (K * D, H), "self_attn.v_proj": (K * D, H), "self_attn.o_proj": (H, N * D),
        "mlp.gate_proj": (WIDTH, H), "mlp.up_proj": (WIDTH, H), "mlp.down_proj": (H, WIDTH),
    }  # fmt: skip

    def tensors(name: str, shape: tuple[int, ...]) -> dict[str, Tensor]:
        if stored == "bf16" or ".mlp." not in name:
            return {name: Tensor("BF16", shape)}
        out, inputs = shape
        return PUBLISHED[stored].tensors(name, (out, inputs))

    shards = [{f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()} for i in range(layers)]
    shards.append({"model.embed_tokens.weight": (V, H), "model.norm.weight": (H,), "lm_head.weight": (V, H)})
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    weight_map = {}
    noise = np.random.default_rng(0).integers(0, 0x7F, 2**24, np.uint8).tobytes()
    for number, shapes in enumerate(shards):
        header, end = {}, 0
        for name, tensor in (item for weight in shapes.items() for item in tensors(*weight).items()):
            begin, end = end, end + tensor.nbytes
            header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [begin, end]}
            weight_map[name] = f"model-{number}.safetensors"
        encoded = json.dumps(header).encode()
        with (folder / f"model-{number}.safetensors").open("wb") as f:
            f.write(struct.pack("<Q", len(encoded)) + encoded)
            for begin in range(0, end, len(noise)):
                f.write(noise[: end - begin])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def peak_bytes(tmp_path: Path, layers: int, work: str = CONVERT, stored: str = "bf16") -> int:
    try:
        write_checkpoint(tmp_path / "in", layers, stored)
        command = [sys.executable, "-c", f"import sys{work}{PEAK}", str(tmp_path / "in"), str(tmp_path / "out")]
        return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024
    finally:
        shutil.rmtree(tmp_path / "in", ignore_errors=True)
        shutil.rmtree(tmp_path / "out", ignore_errors=True)


@pytest.mark.long
def test_peak_memory_does_not_grow_with_depth(tmp_path: Path, record_property):
    if shutil.disk_usage(tmp_path).free < 6 * 2**30:
        pytest.skip("needs 6 GiB of free disk")
    shallow, deep = (peak_bytes(tmp_path, layers) for layers in (3, 5))
    record_property("peak_mib", {"3 layers": shallow >> 20, "5 layers": deep >> 20})
    assert max(shallow, deep) <= 4 * LARGEST + 2**29
    assert abs(deep - shallow) <= 0.1 * shallow


@pytest.mark.slow
def test_loading_holds_one_part_beside_the_weights(tmp_path: Path, record_property):
    shallow, deep = (peak_bytes(tmp_path, layers, LOAD) for layers in (1, 3))
    record_property("peak_mib", {"1 layer": shallow >> 20, "3 layers": deep >> 20})
    layer = LARGEST * 3 // 2
    assert deep <= 3 * layer + 2 * LARGEST + 2**29
    assert deep - shallow <= 2 * layer + 2**26


@pytest.mark.long
@pytest.mark.parametrize(
    ("stored", "bits"), [pytest.param("fp8", 8 + 32 / 128**2, marks=pytest.mark.full), ("int4", 4 + 16 / 32)]
)
def test_loading_codes_holds_one_part_beside_them(stored: str, bits: float, tmp_path: Path, record_property):
    """Six more layers are as many more bytes as their codes and scales: no copy of them stays, and none in bfloat16.

    Beside seven layers all threads that read are at work already, each with a tensor or two of its own.
    """
    shallow, deep = (peak_bytes(tmp_path, layers, LOAD, stored) for layers in (7, 13))
    record_property("peak_mib", {"7 layers": shallow >> 20, "13 layers": deep >> 20})
    weights = 6 * (LARGEST * 3 // 2) * bits / 16
    assert abs(deep - shallow - weights) <= 96 * 2**20
