"""Sizes of absorbed MLA in published models, and the contexts that are measured."""

# Of each token's cache entry: the latent, and the rotated key beside it.
LATENT, ROPE = 512, 64
CACHED = LATENT + ROPE
# Of a head before absorption: the query's unrotated part, and the value. DeepSeek, Kimi, Moonlight; then GLM.
NOPE, VALUE = 128, 128
WIDE_NOPE, WIDE_VALUE = 192, 256
# Heads of published models with the second.
WIDE_HEADS = {"glm-4.7-flash": 20, "glm-5": 64}
SCALE = (NOPE + ROPE) ** -0.5

HEADS = {"demo": 4, "moonlight": 16, "kimi-k2": 64, "deepseek-v3": 128}
# Tokens a request: plain decoding, and verification of three drafts.
WINDOWS = (1, 4)
# Requests, and cached tokens of each.
CONTEXTS = (
    (1, 1024), (1, 8192), (1, 65536), (8, 1024), (8, 8192), (32, 4096), (64, 1024), (128, 4096), (128, 8192),
)  # fmt: skip
