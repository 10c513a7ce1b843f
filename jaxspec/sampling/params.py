"""What a user may ask of the sampler for one request."""

import math
from dataclasses import dataclass

from jaxspec.errors import InvalidRequestError

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
# Stop ids are compared on the device, in a row of fixed width that also holds the model's own end-of-text ids.
MAX_STOP_TOKEN_IDS = 12


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; they never change after it was admitted.

    Attributes:
        max_tokens: most tokens to generate, at least 1; None means up to the model's context limit.
        temperature: 0 is greedy; otherwise logits are divided by it before sampling. Finite, >= 0.
        top_k: keep the k most likely tokens (ties at the border are kept); 0 or -1 means all.
        top_p: keep the smallest set of most likely tokens whose probability reaches top_p (after temperature and
            top_k); in (0, 1].
        seed: 64-bit seed; the same prompt, parameters and seed give the same text whatever shares the batch.
            None draws a fresh one.
        stop: texts that end the generation; removed from the text unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the generation, besides the model's end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids.
        logprobs: None for none; 0 for the log-probability of each chosen token (of the model's raw distribution,
            before temperature, top_k and top_p).
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string at the end of the text.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

        def check(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                raise InvalidRequestError(f"{param} must be {wanted}, got {getattr(self, param)!r}", param=param)

        check(self.max_tokens is None or self.max_tokens >= 1, "max_tokens", "at least 1")
        check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a finite number >= 0")
        check(self.top_k >= -1, "top_k", "-1 or 0 (all tokens) or a positive number")
        check(math.isfinite(self.top_p) and 0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(self.seed is None or -(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        check(len(stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        check(
            all(0 < len(s) <= MAX_STOP_STRING_LENGTH for s in stop),
            "stop",
            f"non-empty strings of at most {MAX_STOP_STRING_LENGTH} characters",
        )
        check(len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS, "stop_token_ids", f"at most {MAX_STOP_TOKEN_IDS} ids")
        check(
            self.logprobs in (None, 0),
            "logprobs",
            "None or 0 (chosen tokens only; the top alternatives are not supported yet)",
        )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0
