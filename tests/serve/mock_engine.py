"""An engine without a model: it honours the contract of `jaxspec.engine.engine.Engine` and writes text by hash.

The output is a pure function of prompt, seed and position, so that every run of a request can be compared with every
other. Its ids are bytes, characters of several bytes included, and a step yields one to three of them, as speculation does.
"""

import copy
import hashlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from transformers import PreTrainedTokenizerFast

from jaxspec.engine.acceptance import acceptance_of
from jaxspec.engine.output import FinishReason, PromptLogprob, RequestOutput
from jaxspec.engine.request import Request
from jaxspec.errors import InvalidRequestError
from jaxspec.grammar.compiler import GrammarCompiler
from jaxspec.text import Tokenizer
from pallas_kernels.logit_rules.reference import mask_words
from serve.model import ServedModel

SPECIAL = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
TEMPLATE = (
    "<|begin|>{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
WORDS = ["alpha", "bêta", "γ", "日本語", "😀", "👩‍👩‍👧", " ", " ", "\n", "\n\n", "stop", "def f(x):"]
EOS = 257


def byte_tokenizer(*, chat: bool = True, template: str = TEMPLATE, special: Sequence[str] = ()) -> Tokenizer:
    """That of `byte_backend`."""
    rust = byte_backend(special)
    return Tokenizer(PreTrainedTokenizerFast(tokenizer_object=rust, chat_template=template if chat else None))


def byte_backend(special: Sequence[str] = ()) -> RustTokenizer:
    """Ids 0-255 are bytes in byte-level order, then the special tokens, further ones last."""
    rust = RustTokenizer(
        models.BPE(vocab={c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, merges=[])
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in [*SPECIAL, *special]])
    return rust


class _Taken:
    """What is left of a request in the hands of the front end that gave it to the engine."""

    def __getattribute__(self, name: str) -> object:
        raise AssertionError(f"a front end reads {name} of a request that is the engine's")


def taken(request: Request) -> Request:
    """The engine's own request; the one that was handed in fails whoever reads it from now on."""
    own = copy.copy(request)
    request.__class__ = _Taken  # type: ignore[assignment]
    return own


class MockEngine:
    """
    Args:
        step_seconds: how long a step takes.
        max_running: rows of a step; the other requests wait. Who goes first takes the row of who runs.
        cached_tokens: tokens of each prompt that the prefix cache has.
        k: drafts a window, of which a step accepts 0 to 2 in turn; 0: no speculation.

    Attributes:
        finished: requests that ended by themselves, in that order.
        fail: a step raises this.
        nan_in: prompts that begin with this id end with an error, as a NaN row does.
        gate: steps wait for it.
        says: what every output is, instead of words by hash; or a function of the prompt's text.
        prompts: the texts of what it was asked.
        eos: the end-of-text id.
    """

    def __init__(
        self,
        *,
        max_model_len: int = 512,
        max_running: int = 16,
        step_seconds: float = 0.0,
        k: int = 0,
        cached_tokens: int = 0,
        tokenizer: Tokenizer | None = None,
        says: str | Callable[[str], str] | None = None,
        eos: int = EOS,
    ):
        self.max_model_len = max_model_len
        self.aborted: list[str] = []
        self.finished: list[Request] = []
        self.fail: Exception | None = None
        self.nan_in: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self._max_running = max_running
        self._step_seconds = step_seconds
        self._tokenizer = tokenizer or byte_tokenizer()
        self.vocab_size = self._tokenizer.vocab_size
        self.says = says
        self.eos = eos
        self.prompts: list[str] = []
        self.steps_in_flight = 0
        self._requests: dict[str, Request] = {}
        self._sources: dict[str, Iterator[int]] = {}
        self._num_preemptions = 0
        self._early: list[RequestOutput] = []
        self._seeds = itertools.count(1)
        self._prompt_tokens = self._generation_tokens = 0
        self._cached_tokens = cached_tokens
        self._num_steps = self._prefill_tokens = self._cache_queries = self._cache_hits = 0
        self.windows = [0] * (k + 1) if k else []

    @property
    def has_work(self) -> bool:
        return bool(self._requests or self._early)

    def prepare(self) -> bool:
        return False

    def validate(self, request: Request) -> None:
        limit, max_tokens = self.max_model_len, request.params.max_tokens
        if not request.prompt_len:
            raise InvalidRequestError("the prompt is empty", param="prompt")
        for param, ids in (("prompt", request.tokens), ("logit_bias", request.params.logit_bias)):
            if outside := [i for i in ids if not 0 <= i < self.vocab_size]:
                raise InvalidRequestError(f"token id {outside[0]} is outside the vocabulary", param=param)
        if request.prompt_len + (1 if max_tokens is None else max_tokens) > limit:
            raise InvalidRequestError(
                f"prompt of {request.prompt_len} and {max_tokens} output tokens exceed the context of {limit}",
                param="max_tokens",
                code="context_length_exceeded",
            )

    def add(self, *requests: Request) -> None:
        """Whoever hands a request over can read it no more."""
        for request in requests:
            self.validate(request)
        for request in requests:
            self._queue(taken(request))

    def _queue(self, request: Request) -> None:
        params = request.params
        room = self.max_model_len - request.prompt_len
        request.max_total = request.prompt_len + min(room if params.max_tokens is None else params.max_tokens, room)
        request.stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else {self.eos})
        request.seed = 0 if params.greedy else (params.seed if params.seed is not None else next(self._seeds))
        request.windows = [0] * len(self.windows)
        request.num_drafts = max(len(self.windows) - 1, 0)
        self._prompt_tokens += request.prompt_len
        self._requests[request.id] = request
        self._sources[request.id] = self._text(request)

    def abort(self, request_id: str) -> None:
        if request_id in self._requests:
            self.aborted.append(request_id)
            request = self._forget(request_id)
            self._early.append(request.report(time.monotonic(), FinishReason.ABORT))

    def _forget(self, request_id: str) -> Request:
        del self._sources[request_id]
        return self._requests.pop(request_id)

    def step(self) -> list[RequestOutput]:
        self.dispatch_ahead()
        return self.read_oldest()

    def dispatch_ahead(self) -> None:
        """Nothing runs ahead here."""

    def read_oldest(self) -> list[RequestOutput]:
        time.sleep(self._step_seconds)
        self.gate.wait()
        if self.fail is not None:
            raise self.fail
        outputs, self._early = self._early, []
        now = time.monotonic()
        self._num_steps += 1
        for request in self._take_rows(now):
            if request.tokens[0] == self.nan_in:
                outputs.append(request.report(now, FinishReason.ERROR, "the model produced NaN"))
                self._forget(request.id)
                continue
            accepted = len(request.tokens) % 3 if request.num_output or not self.windows else 0
            if request.num_output and self.windows:
                request.windows[accepted] += 1
                request.drafted += request.num_drafts
                self.windows[accepted] += 1
            accepted = 0 if request.constraint else accepted
            ids = list(itertools.islice(self._sources[request.id], 1 + accepted))
            if request.constraint:
                ids = [_allowed(request, ids[0], self.vocab_size, self._tokenizer.ids_of(["<think>"]))]
            if request.params.prompt_logprobs is not None and not request.num_output:
                for i, token in list(enumerate(request.tokens))[1:]:
                    likeliest = self._alternatives(token, request.params.prompt_logprobs)
                    request.prompt_scores[i] = PromptLogprob(-token / 256, 1 + token % 3, likeliest)
            count = request.params.logprobs or 0
            alternatives = [self._alternatives(token, count) for token in ids] if count else []
            output = request.emit(
                ids, [-i / 256 for i in ids], alternatives, num_accepted=accepted, now=time.monotonic()
            )
            self._generation_tokens += len(output.new_ids)
            outputs.append(output)
            if output.finish_reason:
                self.finished.append(self._forget(request.id))
        return outputs

    def _take_rows(self, now: float) -> list[Request]:
        requests = sorted(self._requests.values(), key=lambda r: r.order)
        rows, others = requests[: self._max_running], requests[self._max_running :]
        for request in rows:
            if request.first_scheduled_time is None:
                request.num_cached_tokens = min(self._cached_tokens, request.prompt_len - 1)
                self._cache_queries += request.prompt_len
                self._cache_hits += request.num_cached_tokens
                self._prefill_tokens += request.prompt_len - request.num_cached_tokens
            request.scheduled(now)
        for request in others:
            if request.first_scheduled_time is not None and request.preempted_time is None:
                request.preempted_time = now
                request.num_preemptions += 1
                self._num_preemptions += 1
        return rows

    def _alternatives(self, token: int, count: int) -> tuple[tuple[int, float], ...]:
        """A multiple of 3 is not among the likeliest itself."""
        first = token if token % 3 else token + 1
        return tuple(((first + i) % self.vocab_size, -first / 256 - i) for i in range(count))

    def stats(self) -> SimpleNamespace:
        running = min(len(self._requests), self._max_running)
        return SimpleNamespace(
            ranks=(),
            num_running=running,
            num_waiting=len(self._requests) - running,
            kv_cache_usage=running / self._max_running,
            num_preemptions=self._num_preemptions,
            acceptance=acceptance_of(self.windows, max(len(self.windows) - 1, 0) * sum(self.windows)),
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            prefix_cache_queries=self._cache_queries,
            prefix_cache_hits=self._cache_hits,
            num_steps=self._num_steps,
            prefill_tokens=self._prefill_tokens,
            buckets_pending=0,
            compiles_while_serving=0,
            steps_by_drafts={len(self.windows) - 1: self._num_steps} if self.windows else {},
            expert_load=None,
        )

    def _text(self, request: Request) -> Iterator[int]:
        """Words by hash, with an end-of-text id after about forty words."""
        self.prompts.append(self._tokenizer.decode(request.tokens, skip_special_tokens=False))
        if self.says is not None:
            text = self.says if isinstance(self.says, str) else self.says(self.prompts[-1])
            yield from self._tokenizer.encode(text)
            yield from itertools.repeat(self.eos)
        prompt = bytes(str(request.tokens), "ascii")
        count = 0
        for position in itertools.count():
            digest = hashlib.sha256(prompt + f"/{request.seed}/{position}".encode()).digest()
            if digest[1] < 6 and count >= request.params.min_tokens:
                yield self.eos
            word = self._tokenizer.encode(WORDS[digest[0] % len(WORDS)])
            count += len(word)
            yield from word


def _allowed(request: Request, wanted: int, vocab_size: int, unwanted: frozenset[int]) -> int:
    """The wanted id if the request's constraint allows it, else one that it does, by hash: it thinks only if it wants to."""
    assert request.constraint
    words = np.empty((1, mask_words(vocab_size)), np.int32)
    request.constraint.fill_masks((), words)
    allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
    assert len(allowed), "nothing is allowed"
    if wanted in allowed:
        return wanted
    others = [i for i in allowed.tolist() if i not in unwanted] or allowed.tolist()
    return others[hash((request.seed, *request.tokens)) % len(others)]


def served(engine: MockEngine, tokenizer: Tokenizer | None) -> ServedModel:
    pages = {"block_size": "64", "num_gpu_blocks": "100", "cache_dtype": "float32", "enable_prefix_caching": "True"}
    description = {"Model": "mock", "KV cache": "no pages"}
    grammars = GrammarCompiler(tokenizer, engine.vocab_size, [engine.eos])
    return ServedModel(engine, tokenizer, description, lambda: (7, 0), cache_config=pages, grammars=grammars)
