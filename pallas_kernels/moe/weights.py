"""The weights of a mixture's experts as one value."""

import functools
from dataclasses import dataclass

import jax

from pallas_kernels.moe.activation import Clamp
from pallas_kernels.quant.values import Quantised, Weight


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("gate_up", "down", "shared", "biases", "first"),
    meta_fields=("clamp",),
)
@dataclass(frozen=True)
class ExpertWeights:
    """Routed experts, and the shared ones beside them.

    Attributes:
        gate_up: [E, 2, I, H], gate first. down: [E, H, I]. Both as checkpoints store them, [out, in].
        shared: gate_up [2, S, H] and down [H, S] of the shared experts, which are one MLP of their joint inner size S.
        biases: of the routed experts, [E, 2, I] and [E, H].
        clamp: how the routed experts join gate and up, where it is not SwiGLU.
        first: int32 [], the id of the first of the E experts, where others are elsewhere: of a token's experts those
            count that are here, and of the shared inner size S what is here.
    """

    gate_up: Weight
    down: Weight
    shared: tuple[Weight, Weight] | None = None
    biases: tuple[jax.Array, jax.Array] | None = None
    clamp: Clamp | None = None
    first: jax.Array | None = None

    @property
    def special(self) -> bool:
        """Biases or a clamp, which most kernels do not have."""
        return self.biases is not None or self.clamp is not None

    @property
    def quantised(self) -> bool:
        """Whether a weight is."""
        return any(isinstance(weight, Quantised) for weight in (self.gate_up, self.down, *(self.shared or ())))

    @property
    def shared_inner(self) -> int:
        """The joint inner size of the shared experts; 0 without any."""
        return 0 if self.shared is None else self.shared[1].shape[1]

    def arrays(self) -> tuple[jax.Array, jax.Array, tuple[jax.Array, jax.Array] | None]:
        """gate_up, down and shared, for kernels that have been asked whether they support them: none is quantised."""
        arrays = (self.gate_up, self.down, *(self.shared or ()))
        assert not self.quantised
        gate_up, down, *shared = arrays
        return gate_up, down, tuple(shared) or None  # type: ignore[return-value]
