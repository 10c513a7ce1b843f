"""Over how many devices a model can be split, which devices a mesh has, and what several of them refuse."""

import os
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_split_kernels
from jaxspec.loading.mesh import choose_devices, make_mesh
from jaxspec.models.decoder import CausalLM
from jaxspec.models.gqa import spread_heads
from jaxspec.models.params import TENSOR_AXIS, with_shardings
from jaxspec.models.registry import read_config
from tests.tiny_models import CONFIGS


@pytest.mark.parametrize(
    ("name", "change", "devices", "message"),
    [
        ("v3", {}, 3, "does not divide 256, the vocab axis of embed.weight; use 1, 2 or 4"),
        ("v3", {"vocab_size": 258}, 3, "does not divide 4, the heads axis of layers.0.attention.o; use 1 or 2"),
        ("v2", {"n_routed_experts": 6}, 4, "does not divide 6, the experts axis of layers.1.mlp.down; use 1 or 2"),
        ("minimax-m2", {}, 4, "does not divide 2, the kv_heads axis of layers.0.attention.o; use 1 or 2"),
        (
            "llama", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}, 4,
            "does not divide 1, the kv_heads axis of layers.0.attention.o; use 1 or 2",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_split_names_the_sizes_that_would_do(name, change, devices, message):
    with pytest.raises(ConfigError, match=re.escape(message) + "$"):
        split(CausalLM(read_config(CONFIGS[name] | change), jnp.float32), devices)


def split(model: CausalLM, devices: int) -> None:
    """Over a mesh that need not be there."""
    spread_heads(model, devices)
    with_shardings(model, jax.sharding.AbstractMesh((devices,), (TENSOR_AXIS,)))


@settings(max_examples=12, deadline=None)
@example(kv_heads=2, groups=6, columns=189)
@given(
    kv_heads=st.sampled_from([1, 2, 3]), groups=st.sampled_from([1, 2, 6]), columns=st.sampled_from([12, 16, 21, 36])
)
def test_sizes_that_are_named_are_those_that_split(kv_heads, groups, columns):
    """Whatever size is asked for, one that spreads key heads over devices too: the same sizes are named, and only they work."""
    heads = kv_heads * groups
    config = read_config(
        CONFIGS["llama"]
        | {
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16, "num_hidden_layers": 1,
            "intermediate_size": columns, "vocab_size": 72,
        }
    )  # fmt: skip
    named, working = set(), {1}
    for devices in range(2, heads + 2):
        try:
            split(CausalLM(config, jnp.float32), devices)
        except ConfigError as error:
            named.add(str(error).partition("; use ")[2])
        else:
            working.add(devices)
    *others, last = map(str, sorted(working))
    assert named == {f"{', '.join(others)} or {last}" if others else last}


def test_mesh_follows_device_order():
    """Kernels count the devices of others in jax's order. Of several processes each brings as many, in their order."""
    assert list(make_mesh(4).devices.flat) == jax.devices()[:4]
    devices = [SimpleNamespace(id=i, process_index=i // 8) for i in range(24)]
    assert [d.id for d in choose_devices(devices, 3, 6)] == [0, 1, 8, 9, 16, 17]
    with pytest.raises(ConfigError, match=r"\b16 must be a multiple of 3, the number of processes \(--nnodes\)"):
        choose_devices(devices, 3, 16)
    with pytest.raises(ConfigError, match="27 needs 9 devices of process 0, but there are 8"):
        choose_devices(devices, 3, 27)


def test_several_gpus_run_on_kernels_or_are_refused():
    """Here no device has kernels, so whatever is not asked for as plain XLA is named."""
    mixture, gated, dense = (
        CausalLM(read_config(CONFIGS[name]), jnp.bfloat16) for name in ("v3", "qwen3.5-moe", "qwen3")
    )
    for model, options, named in (
        (gated, {"attention_backend": "reference"}, r"reference for moe_backend \(--moe-backend\), or"),
        (mixture, {}, r"attention_backend \(--.*\) and moe_backend \(--moe-backend\)"),
        (mixture, {"attention_backend": "reference"}, r"reference for moe_backend \(--moe-backend\), or"),
        (dense, {}, r"reference for attention_backend \(--attention-backend\), or"),
    ):
        with pytest.raises(ConfigError, match=r"plain XLA: .* needs an NVIDIA GPU.*" + named):
            check_split_kernels([model], EngineConfig(**options), "bfloat16")
    check_split_kernels([dense], EngineConfig(attention_backend="reference"), "bfloat16")
    check_split_kernels([mixture], EngineConfig(attention_backend="reference", moe_backend="reference"), "bfloat16")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"NCCL_NVLS_ENABLE": "1"}, "set NCCL_NVLS_ENABLE=0"),
        ({"NVSHMEM_DISABLE_NVLS": "0", "NCCL_NVLS_ENABLE": "0"}, "set NVSHMEM_DISABLE_NVLS=1"),
        ({"XLA_FLAGS": "--a=1 --xla_gpu_experimental_enable_nvshmem=true"}, "in XLA_FLAGS"),
        ({"XLA_FLAGS": "--a=1", "NCCL_NVLS_ENABLE": "0"}, None),
    ],
)
def test_environment_refuses_multicast_and_unknown_flags(given, named, monkeypatch):
    """Several devices only: what is not set is set off, before jax is asked for devices; what is set stays as it is."""
    for name in ("NCCL_NVLS_ENABLE", "NVSHMEM_DISABLE_NVLS"):
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    make_mesh(1)
    assert dict(os.environ) == before
    if named is None:
        devices, asked = jax.devices(), []
        monkeypatch.setattr(jax, "devices", lambda: (asked.append(dict(os.environ)), devices)[1])
        make_mesh(2)
        assert asked == [before | {"NCCL_NVLS_ENABLE": "0", "NVSHMEM_DISABLE_NVLS": "1"}]
    else:
        with pytest.raises(ConfigError, match=named):
            make_mesh(2)
        assert dict(os.environ) == before
