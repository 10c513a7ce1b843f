"""How far two arrays are apart, over many of them."""

from dataclasses import dataclass

import numpy as np


@dataclass
class Errors:
    """Running maximum and root mean square of differences."""

    maximum: float = 0.0
    squares: float = 0.0
    count: int = 0

    def add(self, difference: np.ndarray) -> None:
        if difference.size:
            # A NaN must show, and Python's max would drop it.
            self.maximum = float(np.maximum(self.maximum, np.abs(difference).max()))
            self.squares += float(np.square(difference.astype(np.float64)).sum())
            self.count += difference.size

    @property
    def rms(self) -> float:
        return (self.squares / self.count) ** 0.5 if self.count else 0.0

    def as_json(self) -> dict[str, float]:
        return {"max": self.maximum, "rms": self.rms}
