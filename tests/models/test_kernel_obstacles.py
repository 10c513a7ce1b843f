"""What the check of a model's kernels sees: whatever the kernels will be given, in the shapes of one device."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bench.harness.models import SHAPES, declare, random_config
from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError
from jaxspec.loading.engine import check_kernels
from jaxspec.models.layers import MLP
from jaxspec.models.moe import MoESpec
from jaxspec.models.params import TENSOR_AXIS, Declare, declared, kernel_obstacles, quantised, with_shardings
from pallas_kernels import backend
from pallas_kernels.backend import REFERENCES
from pallas_kernels.moe.activation import Clamp
from pallas_kernels.quant.schemes import FP8_BLOCK, FP8_CHANNEL, INT4_G32, MXFP4, NVFP4, SCHEMES, Scheme

NAMES = ("gate_up", "down")


class Layers(nnx.Module):
    """A dense MLP and a mixture."""

    def __init__(self, inner: int = 512, **of_experts: Any) -> None:
        spec = {"num_experts": 2, "top_k": 1, "expert_dim": 128, "num_shared": 1, "scoring": "softmax"} | of_experts
        declare = Declare(jnp.bfloat16)
        self.dense = MLP(128, inner, declare)
        self.mlp = MoESpec(**spec).build(128, declare)


def layers_in(schemes: dict[str, Scheme | None], **sizes: Any) -> Layers:
    """`schemes`: by dotted path of an MLP; None for as it is."""
    return quantised(
        Layers(**sizes),
        {(*path.split("."), name): scheme for path, scheme in schemes.items() if scheme for name in NAMES},
    )


@pytest.fixture
def on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend.jax, "devices", lambda: [SimpleNamespace(platform="gpu", compute_capability="9.0")])


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("scheme", [None, *SCHEMES.values()], ids=str)
def test_declared_shapes_are_what_a_device_gets(scheme: Scheme | None, devices: int):
    """Of codes, scale and factor too, whichever axis is split."""
    model = layers_in({"dense": scheme, "mlp": scheme, "mlp.shared": scheme}, num_shared=2)
    mesh = jax.sharding.AbstractMesh((devices,), (TENSOR_AXIS,))
    placed = with_shardings(model, mesh)
    for owner, path in ((model.dense, ("dense",)), (model.mlp, ("mlp",)), (model.mlp.shared, ("mlp", "shared"))):
        for name in NAMES:
            got = declared(getattr(owner, name), mesh.shape)
            arrays = {(): got} if scheme is None else {(each,): getattr(got, each) for each in scheme.arrays((1, 1))}
            for array, value in arrays.items():
                whole = placed[*path, name, *array]
                assert (value.shape, value.dtype) == (whole.sharding.shard_shape(whole.shape), whole.dtype)


@pytest.mark.parametrize(("of_experts", "of_shared", "inner", "reason"), [
    (None, None, 128, None), (INT4_G32, None, 128, None), (NVFP4, NVFP4, 128, None), (INT4_G32, MXFP4, 128, None),
    (FP8_BLOCK, None, 128, None), (FP8_CHANNEL, FP8_CHANNEL, 128, None), (INT4_G32, FP8_BLOCK, 128, None),
    (FP8_CHANNEL, None, 192, "mlp: fp8_channel.*multiples of 128, not 128 and 192"),
])  # fmt: skip
def test_weights_without_kernels_name_the_ways_out(
    of_experts: Scheme | None, of_shared: Scheme | None, inner: int, reason: str | None, request: pytest.FixtureRequest
):
    """On a Hopper GPU MLPs of fitting sizes may be quantised; elsewhere nothing may, unless plain XLA is asked for."""
    layers = layers_in({"mlp": of_experts, "mlp.shared": of_shared}, expert_dim=inner)

    def check(reason: str | None, **options: Any) -> None:
        ways = rf"{reason}.*convert SRC OUT --quantization bf16, or use moe_backend \(--moe-backend\) reference"
        with pytest.raises(ConfigError, match=ways) if reason else nullcontext():
            check_kernels(Path("model"), [layers], jnp.bfloat16, EngineConfig(**options))

    check("mlp: .*: it " if of_experts else None)
    request.getfixturevalue("on_hopper")
    for name in ("auto", "mosaic"):
        check(reason, moe_backend=name)
    for name in REFERENCES:
        check(None, moe_backend=name)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("changes", [{"biases": True}, {"clamp": Clamp()}], ids=["biases", "clamp"])
def test_biases_and_clamps_are_seen(changes: dict[str, Any]):
    """The kernels have neither beside shared experts."""
    for num_shared, found in ((0, {}), (1, {"mlp": "it has no biases and no clamped SwiGLU beside shared experts"})):
        layers = layers_in({"mlp": INT4_G32}, num_shared=num_shared, **changes)
        assert kernel_obstacles(layers, jnp.bfloat16, {}) == found


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(("inner", "devices", "reason"), [
    (1408, 1, None), (1408, 2, None), (1408, 4, "multiples of 64, not 128 and 352"),
    (18432, 8, None), (2048, 8, None), (96, 1, "multiples of 64, not 128 and 96"),
])  # fmt: skip
def test_an_mlp_is_checked_as_a_device_has_it(inner: int, devices: int, reason: str | None):
    """Its part may be no whole tiles where the whole is."""
    found = kernel_obstacles(layers_in({"dense": INT4_G32}, inner=inner), jnp.bfloat16, {TENSOR_AXIS: devices})
    assert set(found) == ({"dense"} if reason else set())
    assert (reason or "") in found.get("dense", "")


@pytest.mark.usefixtures("on_hopper")
def test_published_sizes_that_no_fp8_kernel_reads():
    """Of the families that are published in FP8 one has an MLP that is not whole groups of 128: of 85.5 of them."""
    found: set[tuple[str, str, str]] = set()
    for name in SHAPES.keys() - {"gpt-oss-20b", "tiny", "deepseek-v3-toy", "kimi-k2-toy"}:
        model, _ = declare(random_config(name, 4), np.dtype(jnp.bfloat16), quantization="fp8", with_draft=False)
        found |= {(name, *each) for each in kernel_obstacles(model, jnp.bfloat16, {}).items()}
    assert found == {
        ("glm-4.5-air", "layers.0.mlp", "it needs MLPs of sizes that are multiples of 128, not 4096 and 10944"),
    }


@pytest.mark.usefixtures("on_hopper")
def test_an_mlp_that_is_half_quantised_has_no_kernel():
    model = Layers()
    quantised(model, {("dense", "down"): NVFP4})
    assert kernel_obstacles(model, jnp.bfloat16, {}) == {"dense": "it has no MLPs with weights in bfloat16 and nvfp4"}
    whole = layers_in({"dense": NVFP4})
    assert not kernel_obstacles(whole, jnp.bfloat16, {})
    assert "not in float32" in kernel_obstacles(whole, jnp.dtype("float32"), {})["dense"]
