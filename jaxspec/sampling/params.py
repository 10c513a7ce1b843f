"""The sampling parameters of a request, as users give them."""

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from jaxspec.errors import InvalidRequestError
from jaxspec.sampling.structured import StructuredOutputsParams

MAX_STOP_STRINGS = 16
MAX_STOP_STRING_LENGTH = 256
# Stop ids are compared on the device, in a row of fixed width that also holds the model's end-of-text ids.
MAX_STOP_TOKEN_IDS = 12
# Biases of a request on the device.
MAX_LOGIT_BIAS = 300
# Alternatives that a step reports for each position.
MAX_LOGPROBS = 20
# Outputs of one prompt. The server has a lower limit.
MAX_CHOICES = 1024


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request; they do not change once it is admitted.

    Attributes:
        max_tokens: most tokens to generate; None means up to the model's context limit, 0 only reads the prompt.
        temperature: 0 is greedy; otherwise logits are divided by it before sampling. Finite, >= 0.
        top_k: keep the k likeliest tokens, and those equal to the last of them; 0 or -1 keeps all.
        top_p: keep the smallest set of likeliest tokens whose probability reaches top_p (after temperature and
            top_k); in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest (after temperature, before top_k); in [0, 1].
        presence_penalty: subtracted from the logit of every token that occurs in the output; in [-2, 2].
        frequency_penalty: subtracted from a token's logit once for each time it occurs in the output; in [-2, 2].
        repetition_penalty: for every token that occurs in prompt or output, divides a positive logit and multiplies a
            negative one; in (0, 10].
        logit_bias: id -> value in [-100, 100], added to the id's logit before the penalties; at most 300 ids.
        min_tokens: end-of-text ids, stop_token_ids and stop strings do not end the output before it has this many
            tokens.
        seed: 64-bit seed; the same prompt, parameters and seed give the same text, whichever requests share the batch,
            and with any draft, any number of drafts, or none. None draws a fresh one, and the text follows the same
            distribution.
        stop: strings that end the generation; removed from the text unless `include_stop_str_in_output`.
        stop_token_ids: ids that end the generation, besides the model's end-of-text ids.
        ignore_eos: go on past the model's end-of-text ids.
        logprobs: None for none; 0 for the log-probability of each chosen token; N up to 20 also for those of the N
            likeliest tokens at each position. All are of the model's raw distribution, before the above changes it.
        prompt_logprobs: None for none; N up to 20 for the log-probability and the rank of each token of the prompt but the
            first, and of the N likeliest ids at its place. Such a prompt is not looked up in the prefix cache.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: keep the matched stop string at the end of the text.
        num_speculative_tokens: most drafts that are verified in a step; 0 decodes without speculation, None verifies
            all that the engine drafts. Changes the speed, not the distribution.
        structured_outputs: what the output has to look like; it ends when it does.
        greedy_drafts: draft the likeliest tokens although the request samples. Lossless too: such a draft is accepted
            with the target's probability of it, or with a seed where the target draws it.
        n: outputs of the prompt, 1 to 1024, each with a seed of its own: see `choices`.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    min_tokens: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    num_speculative_tokens: int | None = None
    greedy_drafts: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    n: int = 1

    def __post_init__(self):
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = dict(self.logit_bias)
        object.__setattr__(self, "logit_bias", bias)

        def check(ok: bool, param: str, wanted: str) -> None:
            if not ok:
                got = reprlib.repr(getattr(self, param))  # bounded: a list may be long
                raise InvalidRequestError(f"{param} must be {wanted}, got {got}", param=param)

        check(type(self.n) is int and 1 <= self.n <= MAX_CHOICES, "n", f"a whole number from 1 to {MAX_CHOICES}")
        check(self.max_tokens is None or self.max_tokens >= 0, "max_tokens", "at least 0")
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
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in [-2, 2]")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in [-2, 2]")
        check(0 < self.repetition_penalty <= 10, "repetition_penalty", "in (0, 10]")
        if len(bias) > MAX_LOGIT_BIAS or not all(isinstance(t, int) and -100 <= v <= 100 for t, v in bias.items()):
            raise InvalidRequestError(
                f"logit_bias must map at most {MAX_LOGIT_BIAS} ids to values in [-100, 100]", param="logit_bias"
            )
        most = math.inf if self.max_tokens is None else self.max_tokens
        check(0 <= self.min_tokens <= most, "min_tokens", "from 0 to max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"None or from 0 to {MAX_LOGPROBS}")
        check(
            self.num_speculative_tokens is None or self.num_speculative_tokens >= 0,
            "num_speculative_tokens",
            "None or at least 0",
        )
        if self.structured_outputs is not None and self.ignore_eos:
            raise InvalidRequestError(
                "ignore_eos does not go with structured_outputs: their end is an end-of-text id", param="ignore_eos"
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def choices(self) -> "tuple[SamplingParams, ...]":
        """The parameters of each of the n outputs, which have n = 1 themselves.

        With a seed, output i has seed + i: output 0 is what n = 1 would give. Without one each draws its own.
        """
        if self.n == 1:
            return (self,)
        first = replace(self, n=1)
        if self.seed is None:
            return (first,) * self.n
        return (first, *(replace(first, seed=(self.seed + i) % 2**64) for i in range(1, self.n)))
