"""What PyTorch says: a float32 run of the Hugging Face class on the CPU, live or from a recorded file."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.errors import JaxspecError

RECORD_VERSION = 1

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
        residuals: float32 [layers + 1, T, H]: the embedding, then the residual stream behind each layer, over the
            T = prompt + N - 1 tokens that were fed; None in a record of tokens only.
        logits: float32 [T, V] or None.
        gaps: float32 [N]: largest less second largest logit at each new token.
    """

    prompt_ids: tuple[int, ...]
    new_ids: tuple[int, ...]
    logprobs: np.ndarray
    gaps: np.ndarray
    residuals: np.ndarray | None = None
    logits: np.ndarray | None = None


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
    """The Hugging Face class of a folder in eager mode: the plainest code path that transformers has."""

    def __init__(self, folder: Path, dtype: str = "float32"):
        try:
            import torch
            import transformers
        except ImportError as e:
            raise JaxspecError(
                "comparing with a Hugging Face folder needs PyTorch (pip install torch); without it, compare with a "
                "file that `jaxspec compare record` made on another machine"
            ) from e
        config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        cls = getattr(transformers, (config.architectures or ["?"])[0], None)
        if cls is None:
            raise JaxspecError(f"transformers has no class {config.architectures} for {folder}")
        options: dict[str, Any] = {"attn_implementation": "eager"}
        if "Deepseek" in cls.__name__:
            options["experts_implementation"] = "eager"
        # It would list the NextN layer's tensors, which the target class does not have.
        transformers.logging.set_verbosity_error()
        self._torch = torch
        self._model = cls.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True, **options)
        self._model.eval()
        self.vocab_size = int(config.vocab_size)
        self.max_position = int(config.max_position_embeddings)

    def run(self, prompt_ids: Sequence[int], new_tokens: int) -> ReferenceRun:
        """Continues a prompt greedily, then reads residual streams and logits of the whole sequence at once."""
        torch = self._torch
        with torch.no_grad():
            ids, cache, step = list(prompt_ids), None, list(prompt_ids)
            for _ in range(new_tokens):
                out = self._model(torch.tensor([step]), past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                step = [int(out.logits[0, -1].argmax())]
                ids += step
            fed = ids[:-1]
            streams = []
            layers = self._model.model.layers
            hooks = [layers[0].register_forward_pre_hook(lambda _m, args: streams.append(args[0][0].clone()))]
            for layer in layers:
                hooks.append(
                    layer.register_forward_hook(
                        lambda _m, _a, out: streams.append((out[0] if isinstance(out, tuple) else out)[0].clone())
                    )
                )
            logits = self._model(torch.tensor([fed]), use_cache=False).logits[0].float().numpy()
            for hook in hooks:
                hook.remove()
        residuals = torch.stack(streams).float().numpy()
        answers = logits[len(prompt_ids) - 1 :]
        new = np.array(ids[len(prompt_ids) :])
        top2 = np.partition(answers, -2, axis=1)[:, -2:]
        return ReferenceRun(
            tuple(prompt_ids),
            tuple(int(t) for t in new),
            log_softmax(answers)[np.arange(len(new)), new],
            (top2[:, 1] - top2[:, 0]).astype(np.float32),
            residuals,
            logits,
        )


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
                )
                for i in range(header["runs"])
            ]
    except (OSError, ValueError, KeyError) as e:
        raise JaxspecError(f"{path} is not a recorded PyTorch run (made by `jaxspec compare record`): {e}") from e
