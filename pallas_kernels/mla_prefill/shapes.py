"""Sizes of MLA over prompt chunks; those of a head and of the cache are in `pallas_kernels.mla_decode.shapes`."""

# Tokens of a chunk, and cached tokens before it.
CHUNKS = ((4096, 0), (2048, 0), (2048, 2048), (2048, 6144))
