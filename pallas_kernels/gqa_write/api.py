"""What lies between the projection of grouped-query attention and its kernels: norms, rotation, and the write to the caches."""

import jax

from pallas_kernels import tuning
from pallas_kernels.backend import choose, current
from pallas_kernels.gqa_write import mosaic, reference
from pallas_kernels.gqa_write.reference import HeadNorms


def write_heads(
    k_cache: jax.Array,
    v_cache: jax.Array,
    qkv: jax.Array,
    bias: jax.Array | None,
    norms: HeadNorms | None,
    cos: jax.Array,
    sin: jax.Array,
    pages: jax.Array,
    offsets: jax.Array,
    *,
    eps: float,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Norms and rotates queries and keys, and writes keys and values to their caches, in place where these are donated.

    There is no backend option of its own: up to `Tuning.head_kernel_tokens` tokens the kernel runs where it supports the call,
    otherwise plain XLA, as where attention is set to "reference".

    Args:
        k_cache, v_cache: [num_pages, page_size, K, D] the layer's caches.
        qkv: [T, K, G + 2, D] as the projection leaves it: of each key head its G queries, the key, the value.
        bias: [K, G + 2, D], added first; None for none.
        norms: of queries and keys before they are rotated (Qwen3, MiniMax-M2); None for none. Squares it does not give are
            summed here: by the kernel, where that costs less than kernels of XLA (`mosaic.sums_squares`).
        cos, sin: float32 [T, R / 2]: the first R columns of a head are rotated by halves (RoPE, arXiv 2104.09864), the
            others pass.
        pages, offsets: int32 [T] where each token goes; padding tokens go to page 0.
        eps: of the norms.

    Returns:
        The caches with the tokens written, and the queries [T, K, G, D].
    """
    if qkv.shape[0] <= tuning.current().head_kernel_tokens and current().attention != "reference":
        reasons = {"mosaic": mosaic.unsupported_reason(k_cache, qkv, cos)}
        if choose("gqa_write", "auto", reasons) == "mosaic":
            if norms is not None and not mosaic.sums_squares(qkv):
                norms = norms.with_squares(qkv, bias)
            return mosaic.write_heads(k_cache, v_cache, qkv, bias, norms, cos, sin, pages, offsets, eps=eps)
    return reference.write_heads(k_cache, v_cache, qkv, bias, norms, cos, sin, pages, offsets, eps=eps)
