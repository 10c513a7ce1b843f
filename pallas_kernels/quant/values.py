"""A quantised weight as a value: it goes where an array of weights goes."""

import functools
from collections.abc import Collection
from dataclasses import dataclass

import jax

from pallas_kernels.quant.schemes import Scheme


@functools.partial(jax.tree_util.register_dataclass, data_fields=("codes", "scale", "factor"), meta_fields=("scheme",))
@dataclass(frozen=True)
class Quantised:
    """Codes of a weight [*stack, out, in], `scheme.codes_shape`, and the scale of its blocks, `scheme.scale_shape`.

    `factor`: float32 [*stack], where the scheme has one.
    """

    codes: jax.Array
    scale: jax.Array
    scheme: Scheme
    factor: jax.Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the weight."""
        return (*self.codes.shape[:-1], self.codes.shape[-1] * self.scheme.packed)


Weight = jax.Array | Quantised


def in_schemes(schemes: Collection[Scheme], *weights: Weight) -> bool:
    """Whether all of the weights are quantised in one of the schemes."""
    return all(isinstance(weight, Quantised) and weight.scheme in schemes for weight in weights)


def unquantised_reason(*weights: Weight) -> str | None:
    """Why a kernel for unquantised weights does not support these, or None if they are arrays."""
    schemes = sorted({str(weight.scheme) for weight in weights if isinstance(weight, Quantised)})
    return f"it has no weights in {' or '.join(schemes)}" if schemes else None
