"""Experts of a single token on Hopper with routed weights in `int4_g32` and shared ones in bfloat16: one Mosaic GPU kernel.

As `one_token.py`, with a ring for each kind of weights. Codes become bfloat16 numbers as `dequantise` makes them, in registers,
each warp those of its row. Rows of shared experts come first, because they do not wait for the choice.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, run_in_place
from pallas_kernels.matvec import WARPS, row_products, warp_per_row
from pallas_kernels.meet import meet
from pallas_kernels.moe import int4_rows
from pallas_kernels.moe.int4_rows import GROUP
from pallas_kernels.moe.one_token_config import CONSUMERS, ROWS, Cut, cut
from pallas_kernels.moe.selection import COLUMNS, Routing, read_block, select_experts
from pallas_kernels.moe.selection import ROWS as ROUTED_ROWS
from pallas_kernels.moe.weights import ExpertWeights
from pallas_kernels.quant.schemes import INT4_G32
from pallas_kernels.quant.values import Quantised, in_schemes, unquantised_reason

# Shared memory of each ring, and of a stage at most.
RING_BYTES, STAGE_BYTES = 48 * 1024, 16 * 1024
# Rows of `down` whose scales are copied with a stage, of which the first are its own: Pallas copies 128 bytes at a time.
DOWN_SCALE_ROWS = 16
f32, bf16, i32 = jnp.float32, jnp.bfloat16, jnp.int32


def supports(parameters: ExpertWeights) -> bool:
    """Whether the weights are of schemes and sizes that the kernel supports, and all experts on this device."""
    H, inner, S = parameters.gate_up.shape[-1], parameters.gate_up.shape[2], parameters.shared_inner
    plain = parameters.shared is None or not unquantised_reason(*parameters.shared)
    sizes = H % 256 == 0 and inner % 128 == 0 and S % 64 == 0
    return in_schemes((INT4_G32,), parameters.gate_up, parameters.down) and plain and sizes and parameters.first is None


_cut = functools.partial(cut, stage_bytes=STAGE_BYTES, ring_bytes=RING_BYTES)


@dataclass(frozen=True)
class Sizes:
    """Sizes of a call: k of E experts, hidden and inner size, joint inner size S of the shared experts, blocks."""

    E: int
    k: int
    H: int
    inner: int
    S: int
    grid: int

    @property
    def shared_up(self) -> Cut:
        return _cut(256, 2 * 2 * ROWS * 256, self.H)

    @property
    def up(self) -> Cut:
        return _cut(256, 2 * ROWS * 128, self.H)

    @property
    def shared_down(self) -> Cut:
        columns = math.gcd(self.S, 128)
        return _cut(columns, 2 * ROWS * columns, self.S)

    @property
    def down(self) -> Cut:
        """A stage lies within one expert."""
        columns = math.gcd(self.inner, 256)
        return _cut(columns, ROWS * columns // 2, self.inner)


def run(
    x: jax.Array,
    parameters: ExpertWeights,
    choice: list[jax.Array],
    routing: Routing | None,
    k: int,
    residual: jax.Array | None,
    counter: jax.Array | None,
    blocks: int | None,
    interpret: Any,
) -> jax.Array:
    """As `one_token._run`."""
    gate_up, down = parameters.gate_up, parameters.down
    assert isinstance(gate_up, Quantised)
    assert isinstance(down, Quantised)
    E, _, inner, H = gate_up.shape
    grid = blocks or getattr(jax.devices()[0], "core_count", None) or 132
    z = Sizes(E, k, H, inner, parameters.shared_inner, grid)
    inputs = [*choice, x, *([] if residual is None else [residual])]
    for array, columns in ((gate_up.codes, z.up.columns // 2), (down.codes, z.down.columns // 2)):
        inputs.append(array.reshape(*array.shape[:-1], -1, columns))
    inputs += [gate_up.scale, down.scale]
    for shared, of_loads in zip(parameters.shared or (), (z.shared_up, z.shared_down) if z.S else (), strict=True):
        assert isinstance(shared, jax.Array)
        inputs.append(shared.reshape(*shared.shape[:-1], -1, of_loads.columns))
    h, out = (jax.ShapeDtypeStruct(shape, bf16) for shape in ((z.S + k * inner,), (1, H)))
    kernel = functools.partial(_kernel, z, len(choice), routing, residual is not None, interpret)
    if interpret:
        h_up = plgpu.kernel(out_type=h, **kernel("up"))(*inputs)
        return plgpu.kernel(out_type=out, **kernel("down"))(*inputs, h_up)
    counter = jnp.zeros(1, i32) if counter is None else counter
    _, _, result = run_in_place(inputs=inputs, outs=[counter], new=[h, out], **kernel("up", "down"))
    return result


class _Ring:
    """Stages in shared memory that the producer fills in turn and the consumers give back."""

    def __init__(self, stages: int, full: Any, free: Any):
        self.stages, self.full, self.free = stages, full, free

    def slot(self, step: Any) -> Any:
        return lax.rem(step, i32(self.stages))

    def await_free(self, step: Any) -> None:
        @pl.when(step >= self.stages)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[self.slot(step)])

    def drain(self, steps: Any) -> None:
        """Every completion of a barrier must be awaited before the kernel ends."""

        @pl.loop(lax.max(steps - self.stages, i32(0)), steps)
        def _(step: Any) -> None:
            plgpu.barrier_wait(self.free.at[self.slot(step)])

    def give_back(self, slot: Any) -> None:
        plgpu.commit_smem()  # reads must have completed before TMA writes there again
        plgpu.barrier_arrive(self.free.at[slot])


def _kernel(
    z: Sizes, choice_inputs: int, routing: Routing | None, adds: bool, interpret: Any, *halves: str
) -> dict[str, Any]:
    """Arguments of `plgpu.kernel` for one or both halves of the work, as `one_token._kernel`.

    After the choice, x and the residual come codes of gate_up [E, 2, inner, parts, bytes] and down [E, H, parts, bytes], their
    scales, and if S the shared experts' [2, S, parts, columns] and [H, parts, columns].
    """
    E, k, H, inner, S, grid = z.E, z.k, z.H, z.inner, z.S, z.grid
    cuts, stages_of_row = {"up": z.up, "down": z.down}, {"up": H // z.up.depth, "down": inner // z.down.depth}
    if S:
        cuts |= {"shared_up": z.shared_up, "shared_down": z.shared_down}
        stages_of_row |= {"shared_up": H // z.shared_up.depth, "shared_down": S // z.shared_down.depth}

    def moe_one_token_int4(*inputs, up_scale_s, down_scale_s, **scratch):
        chooses, x, refs = inputs[:choice_inputs], inputs[choice_inputs], inputs[choice_inputs + 1 :]
        live = chooses[-1]
        ids, weights = (scratch["ids_s"], scratch["weights_s"]) if routing else chooses[:2]
        residual = refs[0] if adds else None
        (gate_up, down, up_scale, down_scale), given = refs[int(adds) :][:4], refs[int(adds) :][4:]
        (shared_gate_up, shared_down), given = (given[:2], given[2:]) if S else ((None, None), given)
        counter, h, out = {"up": (None, *given, None), "down": (None, *given), "updown": given}["".join(halves)]
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        rings = {name: _Ring(c.stages, scratch[f"{name}_full"], scratch[f"{name}_free"]) for name, c in cuts.items()}
        smem = {name: scratch[f"{name}_s"] for name in cuts}

        def share(items):
            """How many of `items`, dealt out in turn, are this block's."""
            return lax.div(items - block + (grid - 1), i32(grid))

        def expert(j):
            # Clamped, because any other number would read past the weights.
            return lax.max(lax.min(ids[0, j], i32(E - 1)), i32(0))

        is_up, is_down = "up" in halves, "down" in halves
        rows = {
            "shared_up": share(i32(S // ROWS)) if is_up else i32(0),
            "up": share(i32(k * inner // ROWS)) if is_up else i32(0),
            "down": share(i32(H // ROWS)) if is_down else i32(0),
        }
        rows["shared_down"] = rows["down"]
        steps = {name: rows[name] * (stages * (k if name == "down" else 1)) for name, stages in stages_of_row.items()}

        def row_of(item):
            return (block + item * grid) * ROWS

        def parts_at(name, stage):
            return pl.ds(stage * cuts[name].parts, cuts[name].parts)

        @pl.when(warpgroup == CONSUMERS)
        def _produce():
            def fill_shared_up(step):
                ring, stages = rings["shared_up"], i32(stages_of_row["shared_up"])
                at, s = pl.ds(row_of(lax.div(step, stages)), ROWS), ring.slot(step)
                ring.await_free(step)
                own = shared_gate_up.at[:, at, parts_at("shared_up", lax.rem(step, stages))]
                plgpu.copy_gmem_to_smem(own, smem["shared_up"].at[s], ring.full.at[s])

            def fill_up(step):
                ring, stages = rings["up"], i32(stages_of_row["up"])
                row, stage, s = row_of(lax.div(step, stages)), lax.rem(step, stages), ring.slot(step)
                e, at = expert(lax.div(row, i32(inner))), pl.ds(lax.rem(row, i32(inner)), ROWS)
                ring.await_free(step)
                plgpu.copy_gmem_to_smem(gate_up.at[e, :, at, parts_at("up", stage)], smem["up"].at[s], ring.full.at[s])
                groups = z.up.depth // GROUP
                own = up_scale.at[e, :, pl.ds(stage * groups, groups), at]
                plgpu.copy_gmem_to_smem(own, up_scale_s.at[s], ring.full.at[s])

            def fill_row(item):
                """Of `down`: the shared experts' columns, then the choices'."""
                first_row = row_of(item)
                at = pl.ds(first_row, ROWS)
                for stage in range(stages_of_row["shared_down"] if S else 0):
                    ring, step = rings["shared_down"], item * stages_of_row["shared_down"] + stage
                    s = ring.slot(step)
                    ring.await_free(step)
                    own = shared_down.at[at, parts_at("shared_down", stage)]
                    plgpu.copy_gmem_to_smem(own, smem["shared_down"].at[s], ring.full.at[s])

                @pl.loop(0, k * stages_of_row["down"])
                def _(n):
                    ring, step = rings["down"], item * (k * stages_of_row["down"]) + n
                    of_expert = i32(stages_of_row["down"])
                    e, stage, s = expert(lax.div(n, of_expert)), lax.rem(n, of_expert), ring.slot(step)
                    ring.await_free(step)
                    plgpu.copy_gmem_to_smem(
                        down.at[e, at, parts_at("down", stage)], smem["down"].at[s], ring.full.at[s]
                    )
                    groups = z.down.depth // GROUP
                    own = down_scale.at[e, pl.ds(stage * groups, groups), pl.ds(first_row, DOWN_SCALE_ROWS)]
                    plgpu.copy_gmem_to_smem(own, down_scale_s.at[s], ring.full.at[s])

            begun = lax.min(steps["shared_up"], i32(z.shared_up.stages)) if S else i32(0)
            if S:
                pl.loop(0, begun)(fill_shared_up)
            if routing:
                logits, bias, _ = read_block(chooses, 0, 1)
                _, ids[...], weights[...] = select_experts(logits, bias, E, routing)
                plgpu.barrier_arrive(scratch["routed"])
                plgpu.barrier_wait(scratch["routed"])
            if S:
                pl.loop(begun, steps["shared_up"])(fill_shared_up)
            pl.loop(0, steps["up"])(fill_up)
            pl.loop(0, rows["down"])(fill_row)
            for name, ring in rings.items():
                ring.drain(steps[name])

        @pl.when(warpgroup < CONSUMERS)
        def _consume():
            my_rows = pl.ds(warpgroup * WARPS, WARPS)

            def tile_of(name, s, half, part, layout):
                """The weights of this warpgroup's rows in one load of columns."""
                if name.startswith("shared"):
                    place = (s, half, my_rows, part) if name == "shared_up" else (s, my_rows, part)
                    return load(smem[name], (*place, slice(None)), layout=layout)
                scale_s = up_scale_s if name == "up" else down_scale_s
                if interpret:
                    return int4_rows.interpreted(smem[name].at[s], scale_s.at[s], half, part, warpgroup * WARPS)
                return int4_rows.numbers(smem[name].at[s], scale_s.at[s], half, part)

            def multiplied(name, step, part_of, halves_of):
                """The products of one stage with the token's values, of each half; still to be summed over columns."""
                ring, c = rings[name], cuts[name]
                layout, s = warp_per_row(c.columns), ring.slot(step)
                totals: list[Any] = [None] * halves_of
                plgpu.barrier_wait(ring.full.at[s])
                for part in range(c.parts):
                    vector = part_of(part, c.columns, layout)
                    for half in range(halves_of):
                        product = row_products(tile_of(name, s, half, part, layout), vector, layout)
                        totals[half] = product if totals[half] is None else totals[half] + product
                ring.give_back(s)
                return totals

            def gated(name, first_row):
                @pl.loop(0, rows[name])
                def _(item):
                    sums: list[Any] = [None, None]
                    for stage in range(stages_of_row[name]):

                        def part_of(part, columns, layout, stage=stage):
                            at = pl.ds((stage * cuts[name].parts + part) * columns, columns)
                            return load(x, (0, at), layout=layout.reduce(0)).astype(f32)

                        each = multiplied(name, item * stages_of_row[name] + stage, part_of, 2)
                        sums = each if stage == 0 else [a + b for a, b in zip(sums, each, strict=True)]
                    gate, up = (total.sum(axis=1) for total in sums)
                    value = gate * (1.0 / (1.0 + jnp.exp(-gate))) * up
                    h[pl.ds(first_row + row_of(item) + warpgroup * WARPS, WARPS)] = value.astype(bf16)

            if is_up:
                if S:
                    gated("shared_up", 0)
                gated("up", S)
            if routing:
                plgpu.barrier_wait(scratch["routed"])
            if counter is not None:
                meet(counter, grid * CONSUMERS)

            def projected(name, first, n, stages):
                """Of a row of `down`, summed over columns: `stages` stages from step n on."""
                total: Any = None
                for stage in range(stages):

                    def part_of(part, columns, layout, stage=stage):
                        at = pl.ds(first + (stage * cuts[name].parts + part) * columns, columns)
                        return load(h, (at,), layout=layout.reduce(0)).astype(f32)

                    (each,) = multiplied(name, n + stage, part_of, 1)
                    total = each if total is None else total + each
                return total.sum(axis=1)

            if is_down:

                @pl.loop(0, rows["down"])
                def _down(item):
                    mine = pl.ds(row_of(item) + warpgroup * WARPS, WARPS)
                    total: Any = None
                    if S:
                        per_row = stages_of_row["shared_down"]
                        total = projected("shared_down", 0, item * per_row, per_row)
                    per_expert = stages_of_row["down"]
                    for j in range(k):
                        n = item * (k * per_expert) + j * per_expert
                        each = weights[0, j] * projected("down", S + j * inner, n, per_expert)
                        total = each if total is None else total + each
                    kept = plgpu.layout_cast(jnp.zeros((WARPS,), f32), warp_per_row(z.down.columns).reduce(1))
                    if residual is not None:
                        kept = load(residual, (0, mine), layout=warp_per_row(z.down.columns).reduce(1)).astype(f32)

                    @pl.when(live[0] == 1)
                    def _():
                        # The experts' sum is rounded before the residual is added, as in the reference.
                        out[0, mine] = (kept + total.astype(bf16).astype(f32)).astype(bf16)

                    @pl.when(live[0] != 1)
                    def _():
                        out[0, mine] = kept.astype(bf16)

    def ring(name: str, halves_of: tuple[int, ...], width: int, dtype: Any, copies: int) -> dict[str, Any]:
        c = cuts[name]
        return {
            f"{name}_s": plgpu.SMEM((c.stages, *halves_of, ROWS, c.parts, width), dtype),
            f"{name}_full": plgpu.Barrier(num_arrivals=copies, num_barriers=c.stages),
            f"{name}_free": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=c.stages),
        }

    rings_of_shared = {}
    if S:
        rings_of_shared = ring("shared_up", (2,), z.shared_up.columns, bf16, 1)
        rings_of_shared |= ring("shared_down", (), z.shared_down.columns, bf16, 1)

    routing_scratch = {
        "ids_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), i32),
        "weights_s": plgpu.SMEM((ROUTED_ROWS, COLUMNS), f32),
        "routed": plgpu.Barrier(),
    }
    return {
        "body": moe_one_token_int4,
        "scratch_types": {
            **rings_of_shared,
            **ring("up", (2,), z.up.columns // 2, jnp.uint8, 2),
            **ring("down", (), z.down.columns // 2, jnp.uint8, 2),
            "up_scale_s": plgpu.SMEM((z.up.stages, 2, z.up.depth // GROUP, ROWS), bf16),
            "down_scale_s": plgpu.SMEM((z.down.stages, z.down.depth // GROUP, DOWN_SCALE_ROWS), bf16),
            **(routing_scratch if routing else {}),
        },
        "grid": (z.grid,),
        "grid_names": ("block",),
        "num_threads": CONSUMERS + 1,
        "thread_name": "warpgroup",
        # Reductions stay within a warp, and all that shared memory needs is the rings' barriers.
        "compiler_params": plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        "interpret": interpret,
    }  # fmt: skip
