"""A tokenizer for models that have none: words of random letters, as many as a model's vocabulary has ids."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.text import Tokenizer

END = "<end>"
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # most frequent first
_BEGINNINGS = ("", "Ġ", "Ġ", "_", "'", '"', ".")  # Ġ: a space
_LONGEST = 10


def made_up_tokenizer(vocab_size: int) -> Tokenizer:
    """Of exactly `vocab_size` ids: the end of text (id 0), the bytes, then words. The same for everyone.

    Too small a vocabulary lacks the byte 255, which no text has.
    """
    return Tokenizer(_words(vocab_size))


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Gives a checkpoint's folder the tokenizer of `made_up_tokenizer`, as Hugging Face stores one."""
    _words(vocab_size).save_pretrained(folder)


def _words(vocab_size: int) -> Any:
    """It as a `PreTrainedTokenizerFast`."""
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

    ids = {token: i for i, token in enumerate([END, *sorted(pre_tokenizers.ByteLevel.alphabet())][:vocab_size])}
    rng = np.random.default_rng(0)
    letters = np.array(list(_LETTERS))
    frequency = 1 / np.arange(1, len(letters) + 1)
    while (missing := vocab_size - len(ids)) > 0:
        drawn = rng.choice(letters, (missing, _LONGEST), p=frequency / frequency.sum())
        lengths = rng.integers(2, _LONGEST + 1, missing)
        beginnings = rng.choice(_BEGINNINGS, missing)
        for beginning, word, length in zip(beginnings, drawn, lengths, strict=True):
            ids.setdefault(str(beginning) + "".join(word[:length]), len(ids))
    rust = RustTokenizer(models.BPE(vocab=ids, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END)
