"""Rows of `bench kernel` for sampling: one pass over the logits, draws, what top_k and top_p keep, alternatives, and rules."""

from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from bench.kernel.arrays import exact, largest_error, normal, spread
from bench.kernel.case import Case, once
from jaxspec.sampling.columns import Columns
from jaxspec.sampling.penalties import adjust
from pallas_kernels.logit_rules import reference
from pallas_kernels.logit_rules.reference import LogitRules, mask_words
from pallas_kernels.sampling.api import Bounds, cutoffs, gumbel_argmax, likeliest, logits_stats
from pallas_kernels.sampling.keys import float_of, weight_scale
from pallas_kernels.sampling.reference import gumbel
from pallas_kernels.sampling.shapes import ROWS, VOCABULARIES

LOWEST = float(np.finfo(np.float32).min)


@dataclass(frozen=True)
class Sampling(Case):
    """R rows of V logits, of which `draws` rows draw and the others are greedy."""

    R: int
    draws: int
    V: int = VOCABULARIES["moonlight"]
    calls: int = 8
    labels: ClassVar[tuple[str, ...]] = ("R", "draws")

    @property
    def bytes(self) -> float:
        return 2.0 * self.R * self.V

    def inputs(self) -> Any:
        logits = [normal(i, (self.R, self.V), 3.0) for i in range(self.calls)]
        keys = np.random.default_rng(0).integers(0, 2**32, (self.R, 2), np.uint32)
        return logits, jnp.asarray(keys), jnp.asarray(np.arange(self.R) < self.draws)

    def results(self) -> Any:
        return [(jax.ShapeDtypeStruct((self.R,), jnp.float32),) * 2] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        logits, keys, drawing = inputs
        ones = jnp.ones(self.R)

        def choose(logits: jax.Array) -> tuple[jax.Array, jax.Array]:
            stats = logits_stats(logits, ones)
            every = jnp.arange(self.R, dtype=jnp.int32)
            drawn = gumbel_argmax(logits, every, ones, keys, drawing, stats.argmax)
            return stats.log_z, jnp.where(drawing, drawn, stats.argmax).astype(jnp.float32)

        call = once(choose)
        return [call(each) for each in logits]

    def error(self, inputs: Any, results: Any) -> float:
        """Of the log-sum-exp of some rows of the last call; infinite if one of their ids differs."""
        logits, keys, drawing = inputs
        log_z, ids = (exact(each) for each in results[-1])
        rows = np.array(spread(self.R, 4))
        x = exact(logits[-1][rows])
        noise = np.where(exact(drawing)[rows, None], exact(gumbel(keys[rows], self.V)), 0.0)
        if not np.array_equal(np.argmax(x + noise, axis=1), ids[rows]):
            return float("inf")
        top = x.max(axis=1)
        return largest_error(log_z[rows], top + np.log(np.exp(x - top[:, None]).sum(axis=1)))


@dataclass(frozen=True)
class Cutoffs(Case):
    """R rows of V logits, all of which have top_k (0: none) and top_p (1: none). At least one pass is read."""

    R: int
    top_k: int
    top_p: float
    V: int = VOCABULARIES["moonlight"]
    calls: int = 4
    labels: ClassVar[tuple[str, ...]] = ("R", "top_k", "top_p")

    @property
    def bytes(self) -> float:
        return 2.0 * self.R * self.V

    def inputs(self) -> Any:
        logits = [normal(i, (self.R, self.V), 3.0) for i in range(self.calls)]
        return [(each, jax.nn.logsumexp(each.astype(jnp.float32), axis=1)) for each in logits]

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.R,), jnp.float32)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        ones = jnp.ones(self.R)

        def least(logits: jax.Array, log_z: jax.Array) -> jax.Array:
            highest = logits.max(axis=1).astype(jnp.float32)
            scale = weight_scale(highest, log_z)
            total = jnp.exp(log_z - highest) * scale
            bounds = Bounds(
                ones, -jnp.inf * ones, jnp.full(self.R, self.top_k), self.top_p * ones, highest, scale, total
            )
            # Where all is kept the cut is -inf, or no float.
            return jnp.nan_to_num(float_of(cutoffs(logits, bounds)), nan=LOWEST, neginf=LOWEST)

        call = once(least)
        return [call(*each) for each in inputs]

    def error(self, inputs: Any, results: Any) -> float:
        """0, or infinite if some row of the last call keeps fewer or more than it should."""
        rows = np.array(spread(self.R, 4))
        for x, cut in zip(exact(inputs[-1][0][rows]), exact(results[-1])[rows], strict=True):
            kept = np.ones(self.V, bool)
            if self.top_k:
                kept = x >= np.sort(x)[-self.top_k]
            p = np.where(kept, np.exp(x - x.max()), 0.0)
            p /= p.sum()
            if self.top_p < 1:
                # A cut may lie below the least logit that it keeps: all of their probability are kept.
                enough, without = p[x >= cut].sum(), p[x > x[x >= cut].min(initial=np.inf)].sum()
                right = not kept[x < cut].any() or enough >= self.top_p - 1e-5
                right &= without < self.top_p + 1e-5
            else:
                right = np.array_equal(kept, x >= cut)
            if not right:
                return float("inf")
        return 0.0


@dataclass(frozen=True)
class Alternatives(Case):
    """The 20 likeliest of V logits in each of R rows, of which `wanted` ask for them."""

    R: int
    wanted: int
    V: int = VOCABULARIES["moonlight"]
    calls: int = 4
    count: int = 20
    labels: ClassVar[tuple[str, ...]] = ("R", "wanted")

    @property
    def bytes(self) -> float:
        return 2.0 * self.wanted * self.V

    def inputs(self) -> Any:
        return [normal(i, (self.R, self.V), 3.0) for i in range(self.calls)]

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.R, self.count), jnp.float32)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        wanted = jnp.arange(self.R) < self.wanted
        call = once(lambda logits: jnp.where(wanted[:, None], likeliest(logits, self.count, wanted).logits, 0.0))
        return [call(each) for each in inputs]

    def error(self, inputs: Any, results: Any) -> float:
        """Infinite if a row's values are not the largest."""
        rows = np.array(spread(self.R, 4))
        largest = -np.sort(-exact(inputs[-1][rows]), axis=1)[:, : self.count]
        right = np.where(rows[:, None] < self.wanted, largest, 0.0)
        return 0.0 if np.array_equal(exact(results[-1])[rows], right) else float("inf")


@dataclass(frozen=True)
class Rules(Case):
    """R rows of V logits that draw, in windows of n, of which `ruled` windows have penalties, biases and a mask."""

    R: int
    n: int
    ruled: int
    V: int = VOCABULARIES["moonlight"]
    calls: int = 4
    labels: ClassVar[tuple[str, ...]] = ("R", "n", "ruled")

    @property
    def bytes(self) -> float:
        return 2.0 * self.R * self.V

    def inputs(self) -> Any:
        W, biases, rng = self.R // self.n, 8, np.random.default_rng(0)
        has_rules = np.arange(W) < self.ruled
        arrays = {
            "slots": np.arange(W, dtype=np.int32),
            "counts": (rng.random((W, self.V)) < 0.01).astype(np.int32),
            "repetition": np.where(has_rules, 1.1, 1).astype(np.float32),
            "frequency": np.where(has_rules, 0.2, 0).astype(np.float32),
            "presence": np.where(has_rules, 0.1, 0).astype(np.float32),
            "num_bias": np.where(has_rules, biases, 0).astype(np.int32),
            "bias_ids": rng.integers(0, self.V, (W, biases), np.int32),
            "bias_values": rng.normal(size=(W, biases)).astype(np.float32),
            "stop_ids": np.full((W, 4), -1, np.int32),
            "min_total": np.zeros(W, np.int32),
            "constrained": has_rules,
            "masks": rng.integers(-(2**31), 2**31, (W, self.n, mask_words(self.V)), np.int32),
        }
        logits = [normal(i, (W, self.n, self.V), 3.0) for i in range(self.calls)]
        keys = jnp.asarray(rng.integers(0, 2**32, (self.R, 2), np.uint32))
        return logits, keys, LogitRules(**{name: jnp.asarray(array) for name, array in arrays.items()})

    def results(self) -> Any:
        return [jax.ShapeDtypeStruct((self.R,), jnp.float32)] * self.calls

    def many(self, inputs: Any, results: Any) -> Any:
        del results
        logits, keys, rules = inputs

        def draw(logits: jax.Array, keys: jax.Array, rules: LogitRules) -> jax.Array:
            windows, R = rules.slots.shape[0], self.R
            drafts = jnp.zeros((windows, self.n - 1), jnp.int32)
            target = adjust(logits, drafts, rules, jnp.full(windows, 9))
            nobody = jnp.full(R, -1, jnp.int32)
            drawn = target.draw(None, jnp.ones(R), keys, jnp.ones(R, bool), nobody, None, None, Columns(self.V))
            return drawn.astype(jnp.float32)

        call = once(draw)
        return [call(each, keys, rules) for each in logits]

    def error(self, inputs: Any, results: Any) -> float:
        """Infinite if some row of the last call draws another id than the reference."""
        logits, keys, rules = inputs
        windows = np.array(spread(self.R // self.n, 2))
        some = jax.tree.map(lambda a: a[windows], rules)._replace(slots=jnp.arange(len(windows)))
        drafts = jnp.zeros((len(windows), self.n - 1), jnp.int32)
        ruled = reference.adjust(logits[-1][windows], drafts, some, jnp.full(len(windows), 9), self.V, None)
        rows = (windows[:, None] * self.n + np.arange(self.n)).reshape(-1)
        scores = exact(ruled).reshape(len(rows), self.V) + exact(gumbel(keys[rows], self.V))
        return 0.0 if np.array_equal(np.argmax(scores, axis=1), exact(results[-1])[rows]) else float("inf")


_RULES = ((0, 1.0), (50, 1.0), (0, 0.95), (50, 0.95))
_RULE_ROWS = (1, 32, 128, 512)

# Of plain steps and of windows of three drafts, in which nobody has rules, one request or all.
RULED = tuple(Rules(W * n, n, ruled) for W, n in ((1, 1), (32, 1), (128, 1), (128, 4)) for ruled in sorted({0, 1, W}))

SAMPLING: dict[str, list[Case]] = {
    "all": [
        *(Sampling(R, draws) for R in ROWS for draws in (0, R)),
        *(Cutoffs(R, *rule) for R in _RULE_ROWS for rule in _RULES),
        *(Alternatives(R, wanted) for R in _RULE_ROWS for wanted in (0, R)),
        *RULED,
    ],
    "quick": [
        *(Sampling(R, 0) for R in (1, 128)),
        *(Cutoffs(R, *rule) for R in _RULE_ROWS for rule in _RULES),
        *(Alternatives(R, R) for R in _RULE_ROWS),
        *RULED,
    ],
    "tiny": [Sampling(3, 2, 40, 2), Cutoffs(3, 5, 0.9, 40, 2), Alternatives(3, 2, 40, 2), Rules(6, 2, 1, 40, 2)],
}
