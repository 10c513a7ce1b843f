"""A tokenizer for models that have none: words of random letters, as many as a model's vocabulary has ids."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.text import Tokenizer

END = "<end>"
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz"  # most frequent first
_BEGINNINGS = {"": 0.45, "Ġ": 0.45, "_": 0.04, "'": 0.02, '"': 0.02, ".": 0.02}  # Ġ: a space
# Lengths have a gamma distribution of such a shape and scale. In that and in what masks inside strings of bounded length cost
# the words are like the first 163 840 of o200k_base: 5.9 characters in the mean for 5.4; with 3 to 10 characters left
# masks take 1.0 ms in the mean for 0.9. (Of words that are mostly longer they take 1.6.)
_SHAPE, _SCALE, _LONGEST = 6.0, 0.8, 16


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
    frequency = np.arange(1, len(letters) + 1) ** -0.7
    while (missing := vocab_size - len(ids)) > 0:
        drawn = rng.choice(letters, (missing, _LONGEST), p=frequency / frequency.sum())
        lengths = np.clip(np.rint(rng.gamma(_SHAPE, _SCALE, missing)).astype(int), 1, _LONGEST)
        beginnings = rng.choice(list(_BEGINNINGS), missing, p=list(_BEGINNINGS.values()))
        for beginning, word, length in zip(beginnings, drawn, lengths, strict=True):
            ids.setdefault(str(beginning) + "".join(word[:length]), len(ids))
    rust = RustTokenizer(models.BPE(vocab=ids, merges=[]))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=rust, eos_token=END)
