"""What `bench kernel` and `bench tune` measure: some calls of one operation in one executable, and an exact result."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax

from pallas_kernels import tuning

# Of one output vector's length. Rounding the weights, the products and the output to bfloat16 costs 0.2-0.5 %.
LARGEST_ERROR = 0.02


class Case:
    """One row of the table: a shape of one operation.

    The executable makes `calls` calls, each with its own inputs where XLA would merge equal ones. Its second argument is
    donated and becomes its result: results that are passed in again are written to the same addresses, so graphs are
    recorded once, and poison put there beforehand shows what a kernel does not write.

    Attributes:
        fill: what is in the donated arrays before the launch whose results are checked.
    """

    labels: ClassVar[tuple[str, ...]] = ()
    fill: ClassVar[float] = float("nan")
    calls: int

    @property
    def label(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.labels}

    @property
    def flops(self) -> float:
        """Of one call; 0 where it has no matmuls."""
        return 0.0

    @property
    def bytes(self) -> float:
        """That one call must read (and write, where writing is its purpose); 0 where only matmuls count."""
        return 0.0

    def inputs(self) -> Any:
        """Draws the inputs, the same ones every time."""
        raise NotImplementedError

    def results(self) -> Any:
        """Shapes of the results, which the executable is also given to write into."""
        raise NotImplementedError

    def many(self, inputs: Any, results: Any) -> Any:
        """`calls` calls. The values in `results` matter only to operations that work in place."""
        raise NotImplementedError

    def error(self, inputs: Any, results: Any) -> float:
        """The largest relative error of a sample of the results against float64."""
        raise NotImplementedError

    def lower(self) -> Any:
        shapes = jax.eval_shape(self.inputs)
        # Without `keep_unused` an unused argument would be dropped, and with it its buffer.
        return jax.jit(self.many, donate_argnums=1, keep_unused=True).lower(shapes, self.results())


@dataclass(frozen=True)
class WithOrWithout(Case):
    """Before another case as a base: that case with its kernel (1) or in plain XLA (0), whatever is chosen for the device.

    Attributes:
        up_to: the field of `Tuning` that says up to how many tokens the kernel runs.
    """

    T: int
    kernel: int = 1
    up_to: ClassVar[str]

    def many(self, inputs: Any, results: Any) -> Any:
        change: dict[str, Any] = {self.up_to: self.T * self.kernel}
        with tuning.use(replace(tuning.current(), **change)):
            return super().many(inputs, results)


def once(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Traces and lowers an operation once, however often an executable calls it. XLA inlines it again."""
    return jax.jit(operation)
