"""Keys and values from paged latents: one Mosaic GPU kernel for Hopper that reads pages in place.

A tile is two pages of latents times the up-projections of one head, [128 keys, 512] x [512, 128 + 128]: one warpgroup
feeds a ring of shared memory by TMA, two multiply a page each. Wider heads, 192 + 256, are more than an instruction's
256 columns and a thread's registers: their keys and values are two products, one after the other. As many thread blocks
as there are multiprocessors share the tiles of the pages that exist, whose number only the device knows: pages that the
shape allows but a call does not have cost no time.

A row of a product depends on its own key only: what a page holds after its request's last key, perhaps NaN, reaches no
other key, and 0 is written in its place.
"""

import functools
import math
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref

LATENT, ROPE, PAGE = 512, 64, 64
# Widths of keys, before the rotated part, and of values of a head.
WIDTHS = ((128, 128), (192, 256))
# Pages of a tile: one for each of the two consumer warpgroups.
PAGES = 2
# Latent columns of a stage: 16 KiB of latents and 32 KiB of weights. Three stages leave 64 KiB to keys and values on
# their way out, which are stored while the next product is computed.
DEPTH, STAGES = 64, 3
MOST_COLUMNS = 256  # of a product
STEPS = LATENT // DEPTH
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 232, 40

i32, f32, bf16 = jnp.int32, jnp.float32, jnp.bfloat16


def list_pages(
    page_tables: jax.Array, starts_E: jax.Array, ends: jax.Array, first: jax.Array, count: int, keys: int
) -> jax.Array:
    """The pages of a list of blocks of `keys` keys, where request e's blocks are [starts_E[e], starts_E[e + 1]).

    Returns:
        int32 [count, 2]: for each page from block `first` on its number and how many of its keys its request owns; pages
        past a request's end or past the list have no keys.
    """
    E, max_pages = page_tables.shape
    per_block = keys // PAGE
    page_N = first * per_block + jnp.arange(count, dtype=i32)
    owner_N = jnp.sum((page_N // per_block)[:, None] >= starts_E[1:], axis=1, dtype=i32)
    row_N = jnp.minimum(owner_N, E - 1)
    nth_N = page_N - starts_E[row_N] * per_block
    owned_N = jnp.where(owner_N < E, jnp.clip(ends[row_N] - nth_N * PAGE, 0, PAGE), 0)
    return jnp.stack([page_tables[row_N, jnp.minimum(nth_N, max_pages - 1)], owned_N], axis=1).astype(i32)


@functools.partial(jax.jit, static_argnames=("blocks", "interpret"))
def decompress(
    latent: jax.Array,
    w_uk: jax.Array,
    w_uv: jax.Array,
    pages: jax.Array,
    count: jax.Array,
    *,
    blocks: int | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Keys and values of a list of pages, all bfloat16. Jitted, so that chunks share one lowering.

    Args:
        latent: [pages of the cache, PAGE, LATENT + ROPE]; w_uk: [H, D, LATENT], w_uv: [H, V, LATENT], D and V of WIDTHS.
        pages: int32 [N, 2] from `list_pages`, N even.
        count: int32 [], how many of them, from the first, to compute.
        blocks: thread blocks (default: multiprocessors of the device).

    Returns:
        k_nope [N * PAGE, H, D], k_rope [N * PAGE, ROPE], v [N * PAGE, H, V]: 0 for keys that no request owns, and
        uninitialised after `count` pages, rounded up to an even number.
    """
    N, (H, D, _), V = pages.shape[0], w_uk.shape, w_uv.shape[1]
    # The matrices of each product, as indices of (keys, values).
    products = ((0, 1),) if D + V <= MOST_COLUMNS else ((0,), (1,))
    # Products leave by pieces of so many columns, which a copy has next to each other in shared memory.
    piece = math.gcd(D, V)
    pieces = [sum((D, V)[i] for i in product) // piece for product in products]
    # Heads whose weights, 4 MiB, stay in the L2 cache while all pages are visited.
    group = math.gcd(H, 16)
    # The number of an H200, where there is no GPU to ask (lowering on a CPU).
    grid = min(blocks or getattr(jax.devices()[0], "core_count", None) or 132, N // PAGES * H)
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    smem = functools.partial(plgpu.SMEM, dtype=bf16, transforms=tiled)
    body = functools.partial(_body, products=products, unread=min(pieces) - 1, group=group, grid=grid)
    body.__name__ = "mla_decompress"  # type: ignore[attr-defined]
    return plgpu.kernel(
        body,
        out_type=(
            jax.ShapeDtypeStruct((N * PAGE, H, D), bf16),
            jax.ShapeDtypeStruct((N * PAGE, ROPE), bf16),
            jax.ShapeDtypeStruct((N * PAGE, H, V), bf16),
        ),
        scratch_types={
            "latents_s": smem((STAGES, PAGES, PAGE, DEPTH)),
            "weights_s": smem((STAGES, MOST_COLUMNS, DEPTH)),
            "out_s": smem((PAGES, max(pieces), PAGE, piece)),
            "full": plgpu.Barrier(num_arrivals=PAGES + len(products[0]), num_barriers=STAGES),
            "free": plgpu.Barrier(num_arrivals=PAGES, num_barriers=STAGES),
        },
        grid=(grid,),
        grid_names=("block",),
        num_threads=PAGES + 1,
        thread_name="wg",
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane, reduction_scratch_bytes=0
        ),
        interpret=interpret,
    )(latent, w_uk, w_uv, pages, -(-count.reshape(1) // PAGES))


def _body(
    latent,
    w_uk,
    w_uv,
    pages,
    num_tiles,
    k_nope,
    k_rope,
    v,
    *,
    latents_s,
    weights_s,
    out_s,
    full,
    free,
    products,
    unread,
    group,
    grid,
):
    """Every grid-th tile, head after head of a group: warpgroup 2 copies, warpgroups 0 and 1 compute a page each.

    A piece of a product is written where one was that at least `unread` others have left since.
    """
    wg, first = lax.axis_index("wg"), lax.axis_index("block")
    tiles, heads = num_tiles[0], w_uk.shape[0]
    mine = lax.div(tiles * heads - first + (grid - 1), i32(grid))
    matrices, steps, piece = ((w_uk, k_nope), (w_uv, v)), len(products) * STEPS, out_s.shape[3]

    def rows_of(product):
        """Each matrix of a product, where it is stored, and its rows in the ring."""
        start = 0
        for i in product:
            weights, out = matrices[i]
            yield weights, out, pl.ds(start, weights.shape[1])
            start += weights.shape[1]

    def item(j):
        """First page and head of this thread block's j-th tile."""
        place = first + j * grid
        passed, rest = lax.div(place, tiles * group), lax.rem(place, tiles * group)
        return lax.div(rest, i32(group)) * PAGES, passed * group + lax.rem(rest, i32(group))

    @pl.when(wg == PAGES)
    def _produce():
        plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")

        @pl.loop(0, mine)
        def _tile(j):
            page, head = item(j)
            numbers = [pages[page + p, 0] for p in range(PAGES)]
            for n, product in enumerate(products):

                @pl.loop(0, STEPS)
                def _step(d, n=n, product=product):
                    step = j * steps + (n * STEPS + d)
                    s, columns = lax.rem(step, i32(STAGES)), pl.ds(d * DEPTH, DEPTH)

                    @pl.when(step >= STAGES)
                    def _():
                        plgpu.barrier_wait(free.at[s])

                    for p, number in enumerate(numbers):
                        plgpu.copy_gmem_to_smem(latent.at[number, :, columns], latents_s.at[s, p], full.at[s])
                    for weights, _, rows in rows_of(product):
                        plgpu.copy_gmem_to_smem(weights.at[head, :, columns], weights_s.at[s, rows], full.at[s])

        # Every completion of a barrier must be awaited before the kernel ends.
        @pl.loop(lax.max(mine * steps - STAGES, i32(0)), mine * steps)
        def _drain(step):
            plgpu.barrier_wait(free.at[lax.rem(step, i32(STAGES))])

    @pl.when(wg < PAGES)
    def _consume():
        plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")

        def owned_only(x, owned):
            row = plgpu.broadcasted_iota(i32, x.shape, 0, layout=plgpu.Layout.WGMMA)
            return jnp.where(row < owned, x.astype(f32), 0.0).astype(bf16)

        @pl.loop(0, mine)
        def _tile(j):
            page, head = item(j)
            page += wg
            number, owned = pages[page, 0], pages[page, 1]
            rows = pl.ds(page * PAGE, PAGE)

            for n, product in enumerate(products):
                parts = list(rows_of(product))
                columns = sum(weights.shape[1] for weights, _, _ in parts)

                def multiply(total, n=n, columns=columns):
                    @pl.loop(0, STEPS)
                    def _step(d):
                        s = lax.rem(j * steps + (n * STEPS + d), i32(STAGES))
                        plgpu.barrier_wait(full.at[s])
                        plgpu.wgmma(
                            total, latents_s.at[s, wg], transpose_ref(weights_s.at[s, pl.ds(0, columns)], (1, 0))
                        )
                        plgpu.wgmma_wait(0)
                        plgpu.barrier_arrive(free.at[s])

                    return total[...]

                result = owned_only(pl.run_scoped(multiply, plgpu.ACC((PAGE, columns), f32)), owned)
                places = [(out, c) for _, out, _ in parts for c in range(0, out.shape[2], piece)]
                for i, (into, start) in enumerate(places):
                    plgpu.wait_smem_to_gmem(unread, wait_read_only=True)
                    out_s[wg, i] = result[:, i * piece : (i + 1) * piece]
                    plgpu.commit_smem()
                    plgpu.copy_smem_to_gmem(out_s.at[wg, i], into.at[rows, head, pl.ds(start, piece)])

            @pl.when(head == 0)
            def _copy_rope():
                rope = load(latent, (number, slice(None), pl.ds(LATENT, ROPE)), layout=plgpu.Layout.WGMMA)
                k_rope[rows, :] = owned_only(rope, owned)

        plgpu.wait_smem_to_gmem(0)
