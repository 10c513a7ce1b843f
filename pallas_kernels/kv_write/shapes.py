"""Token counts of cache writes; the sizes of an entry are in `pallas_kernels.mla_decode.shapes`."""

TOKENS = (1, 32, 128, 2048)
