"""Device code of the Triton kernel of gqa_decode. Imports triton: `triton.py` imports it when it is called."""

import triton
import triton.language as tl

# Triton reads globals only when they are declared constant.
PAGE = tl.constexpr(64)
# Finite, because the difference of two -inf is NaN.
MASKED = tl.constexpr(-1e30)


@triton.jit
def gqa_decode(
    q, k, v, page_tables, items, bounds, sinks, out, partial, lse,
    SCALE: tl.constexpr, SLIDING: tl.constexpr, SINKS: tl.constexpr, WINDOW: tl.constexpr, WINDOW_POWER: tl.constexpr,
    HEADS: tl.constexpr, GROUP: tl.constexpr,
    DIM: tl.constexpr, MAX_PAGES: tl.constexpr, ROWS: tl.constexpr, ROW_BLOCKS: tl.constexpr, PARTS: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """A program attends with ROWS of the query rows of one key head (tokens of the window times GROUP) to a run of pages.

    Args:
        q: [B, WINDOW, HEADS, GROUP, DIM]. k, v: [pages, 64, HEADS, DIM]. page_tables: [B, MAX_PAGES].
        items: see split_kv.Schedule. bounds: [B, WINDOW]. sinks: [HEADS, GROUP], exponents of 2.
        out: as q: the requests of one item.
        partial, lse: [I, WINDOW * HEADS * GROUP, DIM], the items of the others, and their base-2 log-sum-exp.
        SCALE: of the scores, as exponents of 2.
        SLIDING: the keys that a query sees before its bound; 0 for all.
        SINKS: a row begins with its sink in the item of the first page, so that it counts once.
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

    ALL: tl.constexpr = WINDOW * HEADS * GROUP
    head = block // ROW_BLOCKS
    row_R = (block % ROW_BLOCKS) * ROWS + tl.arange(0, ROWS)
    live_R = row_R < WINDOW * GROUP
    # Rows of padding repeat the last live one and are not stored.
    row_R = tl.minimum(row_R, WINDOW * GROUP - 1)
    bound_R = tl.load(bounds + request * WINDOW + row_R // GROUP)
    token_N = tl.arange(0, WINDOW_POWER)
    keys = tl.max(tl.load(bounds + request * WINDOW + token_N, mask=token_N < WINDOW, other=0), axis=0)

    # Where a row is among those of all key heads.
    place_R = ((row_R // GROUP) * HEADS + head) * GROUP + row_R % GROUP
    column_D = tl.arange(0, DIM)
    q_RD = tl.load(q + ((request * ALL + place_R).to(tl.int64) * DIM)[:, None] + column_D[None])

    start, stop = first * PARTS, tl.minimum(end * PARTS, tl.cdiv(keys, KEYS))
    table = page_tables + request * MAX_PAGES
    page = tl.load(table + first)
    top_R = tl.full((ROWS,), MASKED, tl.float32)
    sum_R = tl.zeros((ROWS,), tl.float32)
    if SINKS:
        begins = first == 0
        top_R = tl.where(begins, tl.load(sinks + head * GROUP + row_R % GROUP), top_R)
        sum_R = tl.where(begins, 1.0, sum_R)
    acc_RD = tl.zeros((ROWS, DIM), tl.float32)
    for tile in range(start, stop):
        slot_S = (tile % PARTS) * KEYS + tl.arange(0, KEYS)
        key_S = (tile // PARTS) * PAGE + slot_S
        # Slots that no request owns may hold NaN, and 0 times NaN is NaN.
        owned_S = key_S < keys
        at_S = page.to(tl.int64) * (PAGE * HEADS * DIM) + (slot_S * HEADS + head) * DIM
        at_SD = at_S[:, None] + column_D[None]
        k_SD = tl.load(k + at_SD, mask=owned_S[:, None], other=0.0)
        v_SD = tl.load(v + at_SD, mask=owned_S[:, None], other=0.0)
        # One tile ahead: otherwise each tile would wait for its page's number before it could request the page.
        page = tl.load(table + tl.minimum(tile + 1, stop - 1) // PARTS)

        x_RS = tl.dot(q_RD, k_SD.T) * SCALE
        x_RS = tl.where(key_S[None] < bound_R[:, None], x_RS, MASKED)
        if SLIDING:
            x_RS = tl.where(key_S[None] >= bound_R[:, None] - SLIDING, x_RS, MASKED)
        new_top_R = tl.maximum(top_R, tl.max(x_RS, axis=1))
        shrink_R = tl.exp2(top_R - new_top_R)
        p_RS = tl.exp2(x_RS - new_top_R[:, None])
        sum_R = sum_R * shrink_R + tl.sum(p_RS, axis=1)
        acc_RD = tl.dot(p_RS.to(v_SD.dtype), v_SD, acc_RD * shrink_R[:, None])
        top_R = new_top_R

    result_RD = (acc_RD / sum_R[:, None]).to(out.dtype.element_ty)
    if alone == 1:
        out_R = out + (request * ALL + place_R).to(tl.int64) * DIM
        tl.store(out_R[:, None] + column_D[None], result_RD, mask=live_R[:, None])
    else:
        partial_R = partial + (item * ALL + place_R).to(tl.int64) * DIM
        tl.store(partial_R[:, None] + column_D[None], result_RD, mask=live_R[:, None])
        tl.store(lse + item * ALL + place_R, top_R + tl.log2(sum_R), mask=live_R)
