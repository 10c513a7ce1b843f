"""The search for operands that begin where Mosaic GPU's kernels refuse them, in modules written by hand."""

import pytest

from tests.bench.lowered import misplaced_operands

MODULE = """
  func.func public @main(%arg0: tensor<SHAPE>) -> tensor<8xi32> {
    %0 = stablehlo.slice %arg0 [RANGES] : (tensor<SHAPE>) -> tensor<8xi32>
    %1 = stablehlo.reshape %0 : (tensor<8xi32>) -> tensor<8xi32>
    %2 = call @kernel(%1) : (tensor<8xi32>) -> tensor<8xi32>
  }
  func.func private @kernel(%arg0: tensor<8xi32>) -> tensor<8xi32> {
    %0 = stablehlo.custom_call @mosaic_gpu_v2(%arg0) {} : (tensor<8xi32>) -> tensor<8xi32>
  }
"""


@pytest.mark.parametrize(
    ("shape", "ranges", "misplaced"),
    [
        ("136xi32", "8:136", 1),
        ("192xi32", "64:192", 0),
        ("8320x32xf32", "8192:8320, 0:32", 0),
        ("9x3xbf16", "1:9, 0:3", 1),
        ("1x64x16xf32", "0:1, 63:64, 0:16", 1),
        ("5x64x16xf32", "0:5, 63:64, 0:16", 0),  # five pieces, which XLA copies
        ("512xf8E4M3FN", "256:512", 0),
    ],
)
def test_slices_are_found_through_calls_and_reshapes(shape, ranges, misplaced):
    assert len(misplaced_operands(MODULE.replace("SHAPE", shape).replace("RANGES", ranges))) == misplaced
