"""The reference: float32 runs of the Hugging Face class on the CPU, made now or read from a recorded file."""

import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from convert.progress import Progress
from convert.torch_drafts import DraftChoice, DraftRun, TorchDraft, run_draft, torch_draft
from convert.torch_parts import is_quantised, stored_tensors
from jaxspec.errors import JaxspecError

RECORD_VERSION = 1
# Prompts that PyTorch continues as one batch.
FIRST_GROUP_SIZE, GROUP_SIZE = 2, 8

# Used where the folder has a tokenizer.
PROMPTS = (
    "def fibonacci(n):",
    "import os\nimport sys\n\n\ndef main():\n",
    "class Stack:\n    def __init__(self):\n",
    "The quick brown fox jumps over the lazy dog.",
    "for i in range(10):\n    print(",
    "def read_json(path):\n    with open(path) as f:\n",
    '"""Utilities for working with dates and times."""\n',
    "import numpy as np\n\n\ndef softmax(x, axis=-1):\n",
    "if __name__ == '__main__':\n",
    "try:\n    value = int(text)\nexcept ValueError:\n",
    "def test_addition():\n    assert add(1, 2) ==",
    "class Node:\n    def __init__(self, value, left=None, right=None):\n",
    "Returns the number of elements in the list",
    "with open(filename, 'rb') as handle:\n    data =",
    "def merge(a, b):\n    result = []\n    i = j = 0\n    while",
    "from typing import Any, Callable, Iterable\n\n\ndef compose(*functions: Callable)",
)


@dataclass(frozen=True)
class ReferenceRun:
    """One prompt's run.

    Attributes:
        prompt_ids, new_ids: the prompt and its greedy continuation.
        logprobs: float32 [N] of the new ids.
        residuals: float32 [layers + 1, T, H]: the embedding, then the residual stream after each layer, over the
            T = prompt + N - 1 tokens that were fed; None in a record of tokens only.
        logits: float32 [T, V] or None.
        gaps: float32 [N]: the largest logit minus the second largest, at each new token.
        drafts: what a draft says after each new token; None without one.
    """

    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    logprobs: np.ndarray
    gaps: np.ndarray
    residuals: np.ndarray | None = None
    logits: np.ndarray | None = None
    drafts: DraftRun | None = None

    @property
    def greedy_ids(self) -> tuple[int, ...]:
        """The likeliest id at each new token, from the logits."""
        assert self.logits is not None
        return tuple(self.logits[len(self.prompt_ids) - 1 :].argmax(axis=1).tolist())


def choose_prompts(folder: Path, vocab_size: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts as ids: texts where the folder has a tokenizer, random ids of 3 to 40 tokens elsewhere."""
    if (folder / "tokenizer.json").exists():
        from jaxspec.text import Tokenizer

        tokenizer = Tokenizer.from_folder(folder)
        texts = [PROMPTS[i % len(PROMPTS)] + " " * (i // len(PROMPTS)) for i in range(count)]
        return [tokenizer.encode(text) for text in texts]
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocab_size, int(rng.integers(3, 41))).tolist() for _ in range(count)]


class TorchModel:
    """The Hugging Face class of a folder in eager mode: the plainest code path that transformers has.

    Of quantised weights it gets what they stand for, as `stored_tensors` has them: its own kernels for them need a GPU.

    Args:
        draft: also run this draft.

    Attributes:
        module: the class's instance. draft: see `torch_draft`.
    """

    def __init__(self, folder: Path, dtype: str = "float32", *, draft: DraftChoice | None = None):
        try:
            import torch
            import transformers
        except ImportError as e:
            raise JaxspecError(
                "comparing with a Hugging Face folder needs PyTorch (pip install torch); without it, compare with a "
                "file that `jaxspec compare record` made on another machine"
            ) from e
        wrapper = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        config = wrapper.get_text_config(decoder=True)
        options: dict[str, Any] = {"attn_implementation": "eager"}
        source: Path | None = folder
        if is_quantised(folder):
            source, options["config"], options["state_dict"] = None, config, stored_tensors(folder)
            vars(config).pop("quantization_config", None)
        elif config is not wrapper:  # a multimodal model: the class of its text part, under the names of that class
            prefixes = {r"^language_model\.": "", r"^model\.language_model\.": "model."}
            options |= {"config": config, "key_mapping": prefixes}
        named = (config.architectures or wrapper.architectures or ["?"])[0]
        cls = getattr(transformers, named.replace("ForConditionalGeneration", "ForCausalLM"), None)
        if cls is None:
            raise JaxspecError(f"transformers has no class {config.architectures} for {folder}")
        if hasattr(config, "num_experts_per_tok"):
            options["experts_implementation"] = "eager"
        # It would list the NextN layer's tensors, which the target class does not have.
        transformers.logging.set_verbosity_error()
        self._torch = torch
        self.module = cls.from_pretrained(source, dtype=getattr(torch, dtype), local_files_only=True, **options)
        self.module.eval()
        self.vocab_size = int(config.vocab_size)
        self.draft: TorchDraft | None = torch_draft(self.module, folder, draft.folder) if draft else None
        self.draft_steps = draft.steps if draft else 0

    def run(self, prompt_ids: Sequence[int], new_tokens: int) -> ReferenceRun:
        """Continues a prompt greedily, then reads residual streams and logits of the whole sequence at once."""
        return self.run_batch([prompt_ids], new_tokens)[0]

    def run_batch(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, advance: Callable[[int], None] = lambda _tokens: None
    ) -> list[ReferenceRun]:
        """`run` for several prompts, which are continued as one batch.

        Residual streams and logits are read of each sequence by itself, so padding has no part in them. The batch's
        matmuls may round differently; where that changed a token, the prompt is continued again by itself.

        Args:
            advance: called with a number of tokens each time that so many have been generated or read.
        """
        runs = []
        for prompt, new_ids in zip(prompts, self.generate(prompts, new_tokens, advance), strict=True):
            run = self.read(prompt, new_ids)
            if len(prompts) > 1 and run.greedy_ids != run.new_ids:
                run = self.run(prompt, new_tokens)
            advance(len(prompt) + new_tokens - 1 + new_tokens * self.draft_steps)
            runs.append(run)
        return runs

    def generate(
        self, prompts: Sequence[Sequence[int]], new_tokens: int, advance: Callable[[int], None]
    ) -> list[list[int]]:
        """Greedy continuations of left-padded prompts."""
        torch = self._torch
        width = max(map(len, prompts))
        padding = torch.tensor([width - len(p) for p in prompts])[:, None]
        step = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts])
        positions = (torch.arange(width) - padding).clamp(min=0)
        mask = torch.arange(width + new_tokens) >= padding
        # transformers 5.24 renamed the argument, and the result's field with it.
        cache_name = "cache" if "cache" in inspect.signature(self.module.forward).parameters else "past_key_values"
        cache, new_ids = None, []
        with torch.no_grad():
            for i in range(new_tokens):
                options = {}
                if padding.any():
                    options = {"attention_mask": mask[:, : width + i].long(), "position_ids": positions}
                out = self.module(step, **{cache_name: cache}, use_cache=True, **options)
                cache = out[cache_name]
                step = out.logits[:, -1:].argmax(dim=-1)
                positions = positions[:, -1:] + 1
                new_ids.append(step)
                advance(len(prompts))
        return torch.cat(new_ids, dim=1).tolist()

    def read(self, prompt_ids: Sequence[int], new_ids: Sequence[int]) -> ReferenceRun:
        """Residual streams and logits of a sequence, in one pass without a cache."""
        torch = self._torch
        streams: list[Any] = []
        finals: list[Any] = []
        layers = self.module.model.layers
        hooks = [self.module.model.norm.register_forward_hook(lambda _m, _a, out: finals.append(out[0].clone()))]
        hooks += [layers[0].register_forward_pre_hook(lambda _m, args: streams.append(args[0][0].clone()))]
        for layer in layers:
            hooks.append(
                layer.register_forward_hook(
                    lambda _m, _a, out: streams.append((out[0] if isinstance(out, tuple) else out)[0].clone())
                )
            )
        with torch.no_grad():
            fed = [*prompt_ids, *new_ids[:-1]]
            logits = self.module(torch.tensor([fed]), use_cache=False).logits[0].float().numpy()
        for hook in hooks:
            hook.remove()
        answers, residuals, drafts = logits[len(prompt_ids) - 1 :], torch.stack(streams), None
        if self.draft is not None:
            ids, first = [*prompt_ids, *new_ids], len(prompt_ids) - 1
            drafts = run_draft(self.draft, ids, finals[0], residuals, first=first, steps=self.draft_steps)
        top2 = np.partition(answers, -2, axis=1)[:, -2:]
        return ReferenceRun(
            tuple(prompt_ids),
            tuple(new_ids),
            log_softmax(answers)[np.arange(len(new_ids)), new_ids],
            (top2[:, 1] - top2[:, 0]).astype(np.float32),
            residuals.float().numpy(),
            logits,
            drafts,
        )


class Reference:
    """What is compared with: recorded runs, or those that PyTorch makes when they are asked for.

    Attributes:
        prompts: ids of each prompt.
        longest: tokens of the longest prompt and its continuation.
        positions: tokens that jaxspec runs: each sequence once as it is generated, and once more in prefill where the
            runs have logits.
    """

    def __init__(self, path: Path, *, num_prompts: int, new_tokens: int, draft: DraftChoice | None = None):
        """`path`: a recorded file, or a Hugging Face folder, to which the numbers apply.

        Raises:
            JaxspecError: it is neither of them, a number is not positive, or there is no such draft; a file has none.
        """
        self._recorded = read_record(path) if path.is_file() else None
        if self._recorded is not None:
            self.prompts: list[Sequence[int]] = [run.prompt_ids for run in self._recorded]
            lengths = [len(run.prompt_ids) + len(run.new_ids) for run in self._recorded]
            if draft and any(run.drafts is None or run.drafts.ids.shape[1] < draft.steps for run in self._recorded):
                raise JaxspecError(
                    f"{path} has no run of a draft for {draft.steps} steps: record it again with --num-speculative-tokens "
                    f"{draft.steps}, and --speculative-model for an EAGLE3 draft"
                )
        else:
            if not (path / "config.json").is_file():
                raise JaxspecError(
                    f"{path} is neither a recorded run nor a Hugging Face folder (it has no config.json)"
                )
            if min(num_prompts, new_tokens) < 1:
                raise JaxspecError("--num-prompts and --new-tokens must be at least 1")
            self._model, self._new_tokens = TorchModel(path, draft=draft), new_tokens
            self.prompts = list(choose_prompts(path, self._model.vocab_size, num_prompts))
            lengths = [len(prompt) + new_tokens for prompt in self.prompts]
        self.longest = max(lengths)
        has_logits = self._recorded is None or self._recorded[0].logits is not None
        self.positions = sum(length - 1 for length in lengths) * (2 if has_logits else 1)

    def groups(self, progress: Progress) -> Iterator[list[ReferenceRun]]:
        """All runs in order, a few at a time and the first very few, so that there is a result early."""
        if self._recorded is None:
            each = 2 * self._new_tokens - 1 + self._new_tokens * self._model.draft_steps
            progress.start("PyTorch", sum(len(p) + each for p in self.prompts), "tokens")
        begin, end = 0, FIRST_GROUP_SIZE
        while begin < len(self.prompts):
            if self._recorded is None:
                advance = partial(progress.advance, f"prompts {begin + 1} to {min(end, len(self.prompts))}")
                yield self._model.run_batch(self.prompts[begin:end], self._new_tokens, advance)
            else:
                yield self._recorded[begin:end]
            begin, end = end, end + GROUP_SIZE


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return (x - np.log(np.exp(x).sum(axis=-1, keepdims=True))).astype(np.float32)


def write_record(path: Path, runs: Sequence[ReferenceRun], *, tokens_only: bool) -> None:
    """Saves runs as one compressed .npz, written beside the file and then renamed."""
    arrays: dict[str, np.ndarray] = {}
    for i, run in enumerate(runs):
        arrays[f"{i}.prompt_ids"] = np.array(run.prompt_ids, np.int32)
        arrays[f"{i}.new_ids"] = np.array(run.new_ids, np.int32)
        arrays[f"{i}.logprobs"], arrays[f"{i}.gaps"] = run.logprobs, run.gaps
        if not tokens_only:
            assert run.residuals is not None
            assert run.logits is not None
            arrays[f"{i}.residuals"], arrays[f"{i}.logits"] = run.residuals, run.logits
        if run.drafts is not None:
            arrays[f"{i}.drafts.ids"] = run.drafts.ids
            if not tokens_only:
                arrays |= {f"{i}.drafts.{name}": getattr(run.drafts, name) for name in _DRAFT_ARRAYS}
    header = json.dumps({"version": RECORD_VERSION, "runs": len(runs)})
    temporary = path.with_name(f".{path.name}.tmp")
    with open(temporary, "wb") as f:
        np.savez_compressed(f, allow_pickle=False, header=np.frombuffer(header.encode(), np.uint8), **arrays)
    temporary.replace(path)


def read_record(path: Path) -> list[ReferenceRun]:
    """Loads what `write_record` saved.

    Raises:
        JaxspecError: the file is not such a record.
    """
    try:
        with np.load(path, allow_pickle=False) as data:
            header = json.loads(data["header"].tobytes())
            if header["version"] != RECORD_VERSION:
                raise JaxspecError(f"{path} is a record of version {header['version']}; record it again")
            return [
                ReferenceRun(
                    tuple(data[f"{i}.prompt_ids"].tolist()),
                    tuple(data[f"{i}.new_ids"].tolist()),
                    data[f"{i}.logprobs"],
                    data[f"{i}.gaps"],
                    data.get(f"{i}.residuals"),
                    data.get(f"{i}.logits"),
                    _read_drafts(data, i),
                )
                for i in range(header["runs"])
            ]
    except (OSError, ValueError, KeyError) as e:
        raise JaxspecError(f"{path} is not a recorded PyTorch run (made by `jaxspec compare record`): {e}") from e


_DRAFT_ARRAYS = ("inputs", "hidden", "logits")


def _read_drafts(data: Any, run: int) -> DraftRun | None:
    ids = data.get(f"{run}.drafts.ids")
    return None if ids is None else DraftRun(ids, *(data.get(f"{run}.drafts.{name}") for name in _DRAFT_ARRAYS))
