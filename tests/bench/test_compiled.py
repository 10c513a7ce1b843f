"""`bench compiled`: what is read from a compiled module, and what is said where nothing can compile one."""

import importlib.util

import pytest

from bench.__main__ import main
from bench.step.compiled import Kernel, kernels, per_layer

TEXT = """HloModule jit_flat_step, is_scheduled=true

%fused_add (p: bf16[1,8]) -> bf16[1,8] {
  %p = bf16[1,8]{1,0} parameter(0)
  ROOT %add.1 = bf16[1,8]{1,0} add(%p, %p), metadata={op_name="jit(f)/target/layer1/mlp/add" stack_frame_id=3}
}

%with_rules (b: bf16[1,8]) -> bf16[1,8] {
  %b = bf16[1,8]{1,0} parameter(0)
  %loop_add_fusion.3 = bf16[1,8]{1,0} fusion(%b), kind=kLoop, calls=%fused_add
  ROOT %loop_add_fusion.4 = bf16[1,8]{1,0} fusion(%loop_add_fusion.3), kind=kLoop, calls=%fused_add
}

%without (c: bf16[1,8]) -> bf16[1,8] {
  %c = bf16[1,8]{1,0} parameter(0)
  ROOT %loop_add_fusion.5 = bf16[1,8]{1,0} fusion(%c), calls=%x, metadata={op_name="jit(f)/verify/cond/branch_0_fun/min"}
}

ENTRY %main.1 (a: bf16[1,8]) -> (bf16[1,8]) {
  %a = bf16[1,8]{1,0} parameter(0), metadata={op_name="leaves[0]"}
  %input_scatter_fusion = s32[9,4]{1,0} fusion(%a), kind=kInput, calls=%x, metadata={op_name="jit(f)/target/scatter"}
  %mpmd_map.5 = (bf16[1,8]{1,0}) custom-call(%a), target="mosaic_gpu_v2", metadata={op_name="jit(f)/target/layer0/norm"}
  %get-tuple-element.1 = bf16[1,8]{1,0} get-tuple-element(%mpmd_map.5), index=0
  %bitcast.1 = bf16[8]{0} bitcast(%get-tuple-element.1)
  %loop_add_fusion = bf16[1,8]{1,0} fusion(%get-tuple-element.1), kind=kLoop, calls=%fused_add
  %mpmd_map.9 = s32[1]{0} custom-call(%a), target="mosaic_gpu_v2", metadata={op_name="jit(f)/draft/layer0/x"}
  %cond.1 = bf16[1,8]{1,0} conditional(%p, %a, %a), true_computation=%with_rules, false_computation=%without
  ROOT %tuple = (bf16[1,8]{1,0}) tuple(%loop_add_fusion)
}
"""


def test_kernels_are_read_in_their_order():
    """Views are none; a fusion without a name of its own is where its code is; rows without rules take the shorter branch."""
    found = kernels(TEXT)
    assert found == [
        Kernel("input_scatter_fusion", False, "target/scatter"),
        Kernel("mpmd_map.5", True, "target/layer0/norm"),
        Kernel("loop_add_fusion", False, "target/layer1/mlp/add"),
        Kernel("mpmd_map.9", True, "draft/layer0/x"),
        Kernel("loop_add_fusion.5", False, "verify/cond/branch_0_fun/min"),
    ]
    assert [each.layer for each in found] == [None, 0, 1, 0, None]
    assert per_layer(found) == {0: 1, 1: 1}  # a draft's are none of the target's


@pytest.mark.skipif(importlib.util.find_spec("jax_plugins") is not None, reason="a plugin of jax is installed")
def test_without_the_plugin_it_is_said_what_to_install(capsys):
    assert main(["compiled", "--layers", "1", "--rows", "1"]) == 1
    assert "pip install --no-deps jax-cuda13-plugin" in capsys.readouterr().err


def test_a_shape_without_mtp_cannot_draft(capsys, monkeypatch):
    monkeypatch.setattr("bench.step.compiled.described_device", lambda: None)
    assert main(["compiled", "--model", "qwen3-30b-a3b", "--tokens", "3"]) == 1
    assert "no MTP layer" in capsys.readouterr().err
