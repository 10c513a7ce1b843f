"""How drafts are looked up in a request's own text: what the methods without a model mean."""

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Lookup:
    """Drafts that are looked up: what followed where the end of a request's text occurred before.

    Attributes:
        least, most: how many tokens of the end must be equal, and how many are looked at.
        per_token: drafts for each equal token; None: always as many as a step may have.
        beside_model: a model drafts where nothing is found.
    """

    least: int
    most: int
    per_token: float | None = None
    beside_model: bool = False


# By method: the endings that are compared. Those of ngram are as vLLM's and others' examples have them; those of suffix as
# suffix decoding has them (arXiv 2411.04975), with as many drafts as tokens are equal.
LOOKUPS = {"ngram": Lookup(2, 4), "suffix": Lookup(1, 24, per_token=1.0)}
_LEAST_BESIDE_MODEL = 3
# More tokens than this hardly ever are equal, and each one is compared in every step.
MAX_LOOKUP = 64


def lookup_of(method: str, least: int | None, most: int | None) -> Lookup | None:
    """What a method looks up, with limits that were asked for; None where it is a model alone that drafts."""
    kind, _, model = method.partition("+")
    if kind not in LOOKUPS:
        return None
    default = LOOKUPS[kind]
    if least is None:
        # A shorter match than this predicts worse than a model does.
        least = min(_LEAST_BESIDE_MODEL if model else default.least, most or default.most)
    if most is None:
        most = max(least, default.most)
    return replace(default, least=least, most=most, beside_model=bool(model))
