"""Token counts of `write_heads`; the sizes of heads are in `pallas_kernels.gqa_decode.shapes`."""

TOKENS = (1, 4, 32, 128, 512, 2048, 8192)
# Columns that are rotated, where these are not all of a head.
ROTATED = {"glm-4.5-air": 64, "minimax-m2": 64, "qwen3.5-35b-a3b": 64}
