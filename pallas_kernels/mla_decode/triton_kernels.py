"""Device code of the Triton kernels of mla_decode. Imports triton: `triton.py` imports it when it is called."""

import triton
import triton.language as tl

# Triton reads globals only when they are declared constant.
KEY_DIM = tl.constexpr(576)
VALUE_DIM = tl.constexpr(512)
ROPE_DIM = tl.constexpr(64)
PAGE = tl.constexpr(64)
# Finite, because the difference of two -inf is NaN.
MASKED = tl.constexpr(-1e30)


@triton.jit
def mla_decode(
    q, latent, page_tables, items, bounds, out, partial, lse,
    SCALE: tl.constexpr, LIVE: tl.constexpr, HEADS: tl.constexpr, WINDOW: tl.constexpr, WINDOW_POWER: tl.constexpr,
    MAX_PAGES: tl.constexpr, ROWS: tl.constexpr, PARTS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A program attends with ROWS of a request's LIVE rows (tokens of the window times heads) to a run of pages.

    Args:
        q: [B, LIVE, 576]. latent: [pages, 64, 576]. page_tables: [B, MAX_PAGES]. bounds: [B, WINDOW].
        items: see split_kv.Schedule.
        out: [B, LIVE, 512]: the requests of one item.
        partial, lse: [I, LIVE, 512] and [I, LIVE], the items of the others, and their base-2 log-sum-exp.
        SCALE: of the scores, as exponents of 2.
        WINDOW_POWER: WINDOW rounded up to a power of two.
        PARTS, KEYS: a page is processed in PARTS parts of KEYS keys.
    """
    block = tl.program_id(0)
    item = tl.program_id(1)
    request = tl.load(items + item * 5)
    first = tl.load(items + item * 5 + 1)
    end = tl.load(items + item * 5 + 2)
    alone = tl.load(items + item * 5 + 4)
    if first == end:
        return

    row_R = block * ROWS + tl.arange(0, ROWS)
    live_R = row_R < LIVE
    # Rows of padding repeat the last live one and are not stored.
    row_R = tl.minimum(row_R, LIVE - 1)
    bound_R = tl.load(bounds + request * WINDOW + row_R // HEADS)
    token_N = tl.arange(0, WINDOW_POWER)
    keys = tl.max(tl.load(bounds + request * WINDOW + token_N, mask=token_N < WINDOW, other=0), axis=0)

    value_V = tl.arange(0, VALUE_DIM)
    rope_C = VALUE_DIM + tl.arange(0, ROPE_DIM)
    q_R = q + (request * LIVE + row_R).to(tl.int64) * KEY_DIM
    q_nope_RV = tl.load(q_R[:, None] + value_V[None])
    q_rope_RC = tl.load(q_R[:, None] + rope_C[None])

    start, stop = first * PARTS, tl.minimum(end * PARTS, tl.cdiv(keys, KEYS))
    table = page_tables + request * MAX_PAGES
    page = tl.load(table + first)
    top_R = tl.full((ROWS,), MASKED, tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    acc_RV = tl.zeros((ROWS, VALUE_DIM), tl.float32)
    for tile in range(start, stop):
        slot_S = (tile % PARTS) * KEYS + tl.arange(0, KEYS)
        key_S = (tile // PARTS) * PAGE + slot_S
        # Slots that no request owns may hold NaN, and 0 times NaN is NaN.
        owned_S = key_S < keys
        latent_S = latent + page.to(tl.int64) * (PAGE * KEY_DIM) + slot_S * KEY_DIM
        nope_SV = tl.load(latent_S[:, None] + value_V[None], mask=owned_S[:, None], other=0.0)
        rope_SC = tl.load(latent_S[:, None] + rope_C[None], mask=owned_S[:, None], other=0.0)
        # One tile ahead: otherwise each tile would wait for its page's number before it could request the page.
        page = tl.load(table + tl.minimum(tile + 1, stop - 1) // PARTS)

        x_RS = tl.dot(q_nope_RV, nope_SV.T)
        x_RS = tl.dot(q_rope_RC, rope_SC.T, x_RS) * SCALE
        x_RS = tl.where(key_S[None] < bound_R[:, None], x_RS, MASKED)
        new_top_R = tl.maximum(top_R, tl.max(x_RS, axis=1))
        shrink_R = tl.exp2(top_R - new_top_R)
        p_RS = tl.exp2(x_RS - new_top_R[:, None])
        sum_R = sum_R * shrink_R + tl.sum(p_RS, axis=1)
        acc_RV = tl.dot(p_RS.to(nope_SV.dtype), nope_SV, acc_RV * shrink_R[:, None])
        top_R = new_top_R

    result_RV = (acc_RV / sum_R[:, None]).to(out.dtype.element_ty)
    if alone == 1:
        out_R = out + (request * LIVE + row_R).to(tl.int64) * VALUE_DIM
        tl.store(out_R[:, None] + value_V[None], result_RV, mask=live_R[:, None])
    else:
        partial_R = partial + (item * LIVE + row_R).to(tl.int64) * VALUE_DIM
        tl.store(partial_R[:, None] + value_V[None], result_RV, mask=live_R[:, None])
        tl.store(lse + item * LIVE + row_R, top_R + tl.log2(sum_R), mask=live_R)
