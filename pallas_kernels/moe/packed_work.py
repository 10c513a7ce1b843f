"""A matmul of experts with codes of four bits: how it is cut, and what a block does of it (see `packed_matmul.py`)."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from pallas_kernels.compat import load, transpose_ref
from pallas_kernels.moe.activation import Clamp, joined
from pallas_kernels.moe.config import M, Tiles
from pallas_kernels.moe.grouped_matmul import OF_ROWS
from pallas_kernels.moe.packed_codes import UNIT, converted, group_of, interpreted, loaded
from pallas_kernels.quant.schemes import Scheme

i32, f32 = jnp.int32, jnp.float32


@dataclass(frozen=True)
class Matmul:
    """The slots' tokens by weights [E, parts, out_rows, columns].

    Attributes:
        parts: two are gate and up, whose products are joined.
        biased: whether there are biases, [E, parts, out_rows].
        same_tokens: all slots have the same ones.
    """

    tiles: Tiles
    scheme: Scheme
    parts: int
    out_rows: int
    columns: int
    biased: bool
    same_tokens: bool
    clamp: Clamp | None

    def __post_init__(self) -> None:
        t = self.tiles
        if self.out_rows % self.width or self.columns % UNIT:
            raise ValueError(f"{t} does not divide weights of [{self.out_rows}, {self.columns}]")
        if t.stages % t.splits:
            # A warpgroup counts the completions of a barrier by its own waits.
            raise ValueError(f"{t}: a stage has to be the same team's every time")

    @property
    def gated(self) -> bool:
        return self.parts == 2

    @property
    def width(self) -> int:
        """Output columns of a tile."""
        return self.tiles.consumers * (1 if self.gated else self.tiles.blocks) * M

    @property
    def num_tiles(self) -> int:
        return self.out_rows // self.width

    @property
    def depths(self) -> int:
        """Steps of an item of work, which is a slot and a tile."""
        return pl.cdiv(self.columns, self.tiles.depth)

    @property
    def units(self) -> int:
        return self.tiles.depth // UNIT

    @property
    def groups(self) -> int:
        """Scales of a row of a stage."""
        return self.tiles.depth // group_of(self.scheme)

    @property
    def num_arrays(self) -> int:
        """Of its weights: factor and biases if there are any, codes, scale."""
        return int(self.scheme.factor) + int(self.biased) + 2

    @property
    def pitch(self) -> int:
        """Bytes of codes of a row of a stage."""
        return self.tiles.depth // 2

    def place_of(self, member: Any, b: int, tile: Any) -> tuple[int, Any]:
        """The part of accumulator b of a member of a team, and its first row in a tile."""
        row = tile * self.width
        return (b, row + member * M) if self.gated else (0, row + (member * self.tiles.blocks + b) * M)


def share(first: Any, items: Any, grid: int) -> tuple[Any, Any]:
    """How many of `items`, dealt out to a grid in turn, a block has that gets item `first`.

    Returns:
        Also which item it gets first if others are dealt out after them.
    """
    mine = lax.div(items - first + (grid - 1), i32(grid))
    return mine, first + mine * grid - items


@dataclass(frozen=True)
class Work:
    """A block's items of a matmul.

    Attributes:
        expert, weights, x, out: in global memory; of each slot its expert, `Matmul.num_arrays`, tokens and results.
        w_smem, s_smem, x_smem, full: the ring's codes, scales and tokens, and barriers of what has come.
        w_stride, x_stride: how far apart a stage and the next are in `w_smem` and `s_smem`, and in `x_smem`.
        first: the number of the first item, which the others follow `grid` apart.
        items: how many.
        items_before, steps_before: of the block, those of another matmul.
        a_smem: where the interpreter has what is multiplied.
    """

    matmul: Matmul
    grid: int
    expert: Any
    weights: list[Any]
    x: Any
    out: Any
    w_smem: Any
    s_smem: Any
    x_smem: Any
    full: Any
    w_stride: int
    x_stride: int
    first: Any
    items: Any
    items_before: Any
    steps_before: Any
    a_smem: Any = None

    @property
    def steps(self) -> Any:
        return self.items * self.matmul.depths

    def item(self, j: Any) -> tuple[Any, Any]:
        """Slot and tile of the j-th item."""
        place = self.first + j * self.grid
        return lax.div(place, i32(self.matmul.num_tiles)), lax.rem(place, i32(self.matmul.num_tiles))

    def stage(self, step: Any) -> Any:
        return lax.rem(self.steps_before + step, i32(self.matmul.tiles.stages))

    def copy_weights(self, step: Any) -> None:
        """Starts the copies of a step's codes and scales."""
        m, t = self.matmul, self.matmul.tiles
        slot, tile = self.item(lax.div(step, i32(m.depths)))
        s, depth = self.stage(step), lax.rem(step, i32(m.depths))
        e, place = self.expert[slot], s * self.w_stride
        codes, scale = self.weights[-2:]
        for c in range(t.consumers):
            for b in range(t.blocks):
                part, row = m.place_of(c, b, tile)
                at = pl.ds(row, M)
                own = codes.at[e, part, at, pl.ds(depth * m.pitch, m.pitch)]
                plgpu.copy_gmem_to_smem(own, self.w_smem.at[place, c, b], self.full.at[s])
                own = scale.at[e, part, pl.ds(depth * m.groups, m.groups), at]
                plgpu.copy_gmem_to_smem(own, self.s_smem.at[place, c, b], self.full.at[s])

    def copy_tokens(self, step: Any) -> None:
        """Starts the copy of a step's tokens."""
        m, rows = self.matmul, self.x_smem.shape[1]
        slot, _ = self.item(lax.div(step, i32(m.depths)))
        s, depth = self.stage(step), lax.rem(step, i32(m.depths))
        # A dynamic index, because a static one must not reach past the last token.
        own = self.x.at[0 if m.same_tokens else slot, pl.ds(i32(0), rows), pl.ds(depth * m.tiles.depth, m.tiles.depth)]
        plgpu.copy_gmem_to_smem(own, self.x_smem.at[s * self.x_stride], self.full.at[s])

    def multiplied(self, j: Any, team: Any, member: Any, warpgroup: Any, free: Any) -> tuple[jax.Array, ...]:
        """A team's share of the sums of the j-th item, a member's rows."""
        m, t = self.matmul, self.matmul.tiles
        teams, rows = t.splits, self.x_smem.shape[1]

        def multiply(*sums: Any) -> tuple[jax.Array, ...]:
            before = self.steps_before + j * m.depths
            start = lax.rem(team + (teams - 1) * lax.rem(before, i32(teams)), i32(teams))

            @pl.loop(0, lax.div(m.depths - start + (teams - 1), i32(teams)))
            def _step(n: Any) -> None:
                s = self.stage(j * m.depths + start + n * teams)
                plgpu.barrier_wait(self.full.at[s])
                ahead = self._loads(s, member)
                for unit in range(m.units):
                    tokens = self.x_smem.at[s * self.x_stride, :, pl.ds(unit * UNIT, UNIT)]
                    for b in range(t.blocks):
                        own = self._weights(s, member, b, unit, ahead, warpgroup)
                        plgpu.wgmma(sums[b], own, transpose_ref(tokens, (1, 0)))
                        # While one is multiplied the next is made.
                        plgpu.wgmma_wait(1 if self.a_smem is None else 0)
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(free.at[s])

            return tuple(total[...] for total in sums)

        return pl.run_scoped(multiply, *[plgpu.ACC((M, rows), f32)] * t.blocks)

    def _tile(self, s: Any, member: Any, b: int) -> tuple[Any, Any]:
        place = s * self.w_stride
        return self.w_smem.at[place, member, b], self.s_smem.at[place, member, b]

    def _loads(self, s: Any, member: Any) -> dict[tuple[int, int], Any]:
        """Of all units of a stage, so that none has to be waited for between two products."""
        m = self.matmul
        if self.a_smem is not None:
            return {}
        each = ((unit, b) for unit in range(m.units) for b in range(m.tiles.blocks))
        return {(u, b): loaded(*self._tile(s, member, b), m.scheme, u, ordered=m.gated) for u, b in each}

    def _weights(self, s: Any, member: Any, b: int, unit: int, loads: Any, warpgroup: Any) -> Any:
        m = self.matmul
        if self.a_smem is None:
            return converted(loads[unit, b], m.scheme)
        operand = self.a_smem.at[warpgroup]
        operand[...] = interpreted(*self._tile(s, member, b), m.scheme, unit, ordered=m.gated)
        plgpu.commit_smem()
        return operand

    def results(self, sums: tuple[jax.Array, ...], j: Any, member: Any) -> tuple[jax.Array, ...]:
        """What a member stores of the j-th item, M output columns each."""
        m, numbers = self.matmul, self.weights[:-2]
        slot, tile = self.item(j)
        e, places = self.expert[slot], [m.place_of(member, b, tile) for b in range(m.tiles.blocks)]
        if m.scheme.factor:
            factor = numbers[0]
            sums = tuple(total * factor[e, part] for total, (part, _) in zip(sums, places, strict=True))
        if m.biased:
            biases = [load(numbers[-1], (e, part, pl.ds(row, M)), layout=OF_ROWS) for part, row in places]
            over = [lax.broadcast_in_dim(own, sums[0].shape, [0]) for own in biases]
            sums = tuple(total + own for total, own in zip(sums, over, strict=True))
        if not m.gated:
            return sums
        gate, up = sums
        return (joined(gate, up, m.clamp) if m.clamp else gate * (1.0 / (1.0 + jnp.exp(-gate))) * up,)
