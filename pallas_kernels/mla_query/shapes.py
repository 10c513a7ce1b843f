"""Token counts of absorbed queries; the sizes of a head are in `pallas_kernels.mla_decode.shapes`."""

TOKENS = (1, 4, 8, 32, 128, 512, 1024)
