"""Sizes of grouped-query attention over prompt chunks; the heads are in `pallas_kernels.gqa_decode.shapes`."""

# Tokens of a chunk, and cached tokens before it.
CHUNKS = ((4096, 0), (2048, 0), (2048, 2048), (2048, 6144), (256, 8192))
