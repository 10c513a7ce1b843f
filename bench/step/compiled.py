"""`bench compiled`: the kernels of a step, counted where there is no GPU.

XLA compiles a step for a GPU that is only described, an H200 of the sizes below, from shapes alone. What is listed is
the compiled module's schedule: our kernels, and those that XLA makes of the rest; loops are not looked into. A full step has
the kernels for rows without rules of sampling. Nothing runs, so XLA chooses matmuls without timing them: on a device it may
split one that it leaves whole here, or the other way round.

It needs jax's CUDA plugin without its libraries: `pip install --no-deps jax-cuda13-plugin jax-cuda13-pjrt`, of the version of
jaxlib.
"""

import argparse
import collections
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from bench.harness import record
from bench.harness.arguments import numbers
from bench.harness.models import SHAPES, declare, random_config
from bench.step.sizes import DEFAULT_TOKENS
from jaxspec.config import EngineConfig, Settings, resolve
from jaxspec.engine.batch import InputLayout
from jaxspec.engine.buckets import Bucket
from jaxspec.engine.compiler import xla_options
from jaxspec.engine.runner import bind
from jaxspec.engine.state import state_shapes
from jaxspec.engine.step import make_step
from jaxspec.errors import ConfigError
from jaxspec.models.decoder import CausalLM
from jaxspec.models.mtp import NextN
from jaxspec.models.params import nest, with_shardings
from jaxspec.models.registry import read_config
from pallas_kernels.readback import api as readback

KIND = "NVIDIA H200"
# XLA's GpuTargetConfigProto.
_TARGET = f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: 4916000000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 150000000000 shared_memory_per_block_optin: 232448 cuda_compute_capability {{ major: 9 minor: 0 }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 driver_version: "13.0.0" runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 12 patch: 0 }} device_description_str: "{KIND}"
"""
PROMPTS = 8
_KERNELS = ("fusion", "custom-call", "copy", "sort", "scatter", "reduce", "dynamic-update-slice")
_INSTRUCTION = re.compile(rf"\s+(?:ROOT )?%?([\w.\-]+) = .*? ({'|'.join(_KERNELS)})\(")
_OP_NAME, _CALLED = re.compile(r'op_name="([^"]*)"'), re.compile(r"calls=%?([\w.\-]+)")
_BRANCH = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")


class Kernel(NamedTuple):
    """One of a compiled step.

    Attributes:
        name: of the instruction. ours: a kernel of this project.
        place: of the step's code, the first that it computes: "target/layer0/attention/dot_general".
    """

    name: str
    ours: bool
    place: str

    @property
    def layer(self) -> int | None:
        """Whose it is; None outside of layers."""
        found = re.search(r"\blayer(\d+)\b", self.place)
        return int(found[1]) if found else None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=list(SHAPES), default="moonlight", help="the shape (default: moonlight)")
    layers = "of the model; the kernels of the last one are taken for those of all that are left out (default: 3)"
    parser.add_argument("--layers", type=int, default=3, metavar="N", help=layers)
    parser.add_argument("--rows", type=numbers, default=[1, 32, 128], metavar="N,N,...", help="default: 1,32,128")
    prompts = f"prompt tokens beside them, of up to {PROMPTS} requests (default: 0)"
    parser.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help=prompts)
    tokens = f"drafted by an MTP layer (default: 0; {DEFAULT_TOKENS} for a cycle)"
    parser.add_argument("--tokens", type=int, default=0, metavar="K", help=tokens)
    quantization = "put its weights into this scheme, as `jaxspec convert` would (default: bf16)"
    parser.add_argument("--quantization", choices=["bf16", "fp8", "int4"], default="bf16", help=quantization)
    parser.add_argument("--variant", choices=["lean", "full"], default="full", help="of the sampler (default: full)")
    parser.add_argument("--list", action="store_true", help="each kernel")
    record.add_arguments(parser)


def compiled_text(model: CausalLM, draft: NextN | None, settings: Settings, bucket: Bucket, device: Any) -> str:
    """The compiled module of a step on a device that need not be there."""
    mesh = Mesh(np.array([device]), ("tensor",))
    layout = InputLayout(bucket, settings.page_size, settings.max_pages)
    # Kernels ask the first device what it is.
    with mock.patch.object(jax, "devices", return_value=[_Described()]):
        bound = [bind(each, nest(with_shardings(each, mesh))) if each else (None, None) for each in (model, draft)]
        (target_def, draft_def), params = zip(*bound, strict=True)
        leaves, structure = jax.tree.flatten(params)
        state = state_shapes(model, settings, mesh, draft=draft)
        step = make_step((target_def, draft_def), layout, settings, readback=readback.is_used())

        def flat_step(leaves: list[jax.Array], *rest: Any) -> Any:
            return step(jax.tree.unflatten(structure, leaves), *rest)

        inputs = jax.ShapeDtypeStruct((layout.size,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
        traced = jax.jit(flat_step, donate_argnums=1).trace(leaves, state, inputs)
        lowered = traced.lower(lowering_platforms=("cuda",))
    # When kernels run does not change which there are.
    return lowered.compile(xla_options(bucket, branches=bucket.variant == "full", concurrent=False)).as_text()


class _Described:
    platform, compute_capability, device_kind, core_count, id, process_index = "gpu", "9.0", KIND, 132, 0, 0


def kernels(text: str) -> list[Kernel]:
    """Of a compiled module, in the order in which they run."""
    lines: dict[str, list[str]] = {}  # of each computation
    for line in text.splitlines():
        if line and not line[0].isspace():
            computation = lines.setdefault(line.removeprefix("%").split(" ", 1)[0], [])
        else:
            computation.append(line)
    named = {name: map(_OP_NAME.search, each) for name, each in lines.items()}
    places = {name: next((found[1] for found in each if found), "") for name, each in named.items()}

    def listed(computation: str) -> list[Kernel]:
        out: list[Kernel] = []
        for line in lines[computation]:
            if ways := [listed(branch) for branch in _BRANCH.findall(line)]:
                without_rules: list[Kernel] = min(ways, key=len)
                out += without_rules
            elif " conditional(" in line:
                raise ValueError(f"branches of an unknown form: {line.strip()[:200]}")
            if (found := _INSTRUCTION.match(line)) is None:
                continue
            called, own = _CALLED.search(line), _OP_NAME.search(line)
            place = own[1] if own else places.get(called[1], "") if called else ""
            out.append(Kernel(found[1], "mosaic_gpu" in line, place.split("/", 1)[-1]))
        return out

    return listed("ENTRY")


def per_layer(found: Iterable[Kernel]) -> Mapping[int, int]:
    """How many kernels each layer of the target has."""
    return collections.Counter(
        each.layer for each in found if each.layer is not None and each.place.startswith("target")
    )


def run(arguments: argparse.Namespace) -> int:
    device = described_device()
    whole = read_config(random_config(arguments.model)).num_layers
    layers, k = min(arguments.layers, whole), arguments.tokens
    model, draft = declare(
        random_config(arguments.model, layers),
        np.dtype(jnp.bfloat16),
        quantization=arguments.quantization,
        with_draft=bool(k),
    )
    if k and not draft:
        raise ConfigError(f"{arguments.model} has no MTP layer to draft with: leave --tokens out")
    most = max(arguments.rows)
    settings = resolve(
        EngineConfig(
            max_model_len=4096, max_num_seqs=most, num_gpu_blocks_override=2048, num_speculative_tokens=k,
            adaptive_speculation=False, max_num_batched_tokens=max(2048, arguments.prompt_tokens + most * (k + 1)),
        ),
        model_max_position=model.config.max_position, page_bytes=0, free_bytes=0, on_gpu=True,
    )  # fmt: skip
    results = []
    for rows in arguments.rows:
        bucket = Bucket(arguments.prompt_tokens, PROMPTS * bool(arguments.prompt_tokens), rows, arguments.variant, k)
        found = kernels(compiled_text(model, draft, settings, bucket, device))
        each = per_layer(found)
        last = each.get(layers - 1, 0)
        total = len(found) + (whole - layers) * last
        results.append(
            {
                "rows": rows, "kernels": total, "kernels_per_layer": round(total / whole, 2),
                "ours": sum(x.ours for x in found),
                "of_each_layer": [each.get(i, 0) for i in range(layers)], "besides": len(found) - sum(each.values()),
                "listed": [x._asdict() for x in found],
            }
        )  # fmt: skip
        if arguments.list:
            for x in found:
                print(f"{'ours' if x.ours else 'XLA ':4s}  {x.name[:36]:36s}  {x.place}")
    lines = [
        [str(r["rows"]), str(r["kernels"]), f"{r['kernels_per_layer']:.2f}", str(r["of_each_layer"]), str(r["besides"])]
        for r in results
    ]
    header = ["rows", f"kernels of {whole} layers", "a layer", f"of the first {layers} layers", "besides"]
    print(record.table(header, lines))
    result = {"benchmark": "compiled", "model": arguments.model, "layers": whole, "compiled_layers": layers} | {
        "quantization": arguments.quantization, "drafted_tokens": k, "prompt_tokens": arguments.prompt_tokens,
        "variant": arguments.variant, "device_described": KIND,
        "rows": results,
    }  # fmt: skip
    record.write(f"compiled_{arguments.model}", result, arguments)
    return 0


def described_device() -> Any:
    """The GPU that steps are compiled for.

    Raises:
        ConfigError: jax has no plugin that knows it.
    """
    # The plugin looks for libraries that only a device needs.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    try:
        described = topologies.get_topology_desc(
            platform="cuda", topology_name=KIND, topology="1x1x1", target_config=_TARGET
        )
    except (NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            "compiling for a GPU that is not there needs jax's CUDA plugin: pip install --no-deps jax-cuda13-plugin "
            f"jax-cuda13-pjrt, of jaxlib's version ({error})"
        ) from None
    return described.devices[0]
