"""Makes a tokenizer.json from the tiktoken rank file of Moonshot's models (Kimi-K2, Moonlight).

Those folders hold `tiktoken.model` and Python code that would build the tokenizer. The code is never run; what it does
is small: byte-level BPE over the ranks, a split pattern that separates runs of Han characters from other letters, and
256 special ids after the ranks, named by tokenizer_config.json or else `<|reserved_token_N|>`. (To spare tiktoken, it
also cuts runs of more than 25000 characters with or without white space before splitting; that is not repeated here.)
"""

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from jaxspec.errors import ModelFormatError, plain, shown
from jaxspec.loading.hf_folder import TOKENIZER_CONFIG, check_size
from jaxspec.models.fields import flag, section, text_or, wrong

_CLASS = "TikTokenTokenizer"
_ADDED = "added_tokens_decoder"
_NUM_SPECIAL = 256
# Real files have 3 MiB and tokens of at most 128 bytes. Every split of every token is looked at.
MAX_FILE_BYTES = 32 * 2**20
MAX_TOKEN_BYTES = 1024
_FLAGS = ("single_word", "lstrip", "rstrip", "special")

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def read_ranks(file: Path) -> dict[bytes, int]:
    """Token bytes -> rank, from lines of base64 and a number. Ranks are token ids, so they must count 0, 1, 2, ..."""
    check_size(file, MAX_FILE_BYTES)
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            encoded, rank = line.split()
            token = base64.b64decode(encoded, validate=True)
            if not 0 < len(token) <= MAX_TOKEN_BYTES:
                raise ModelFormatError(
                    f"{file}, line {number} has a token of {len(token)} bytes (1 to {MAX_TOKEN_BYTES})"
                )
            ranks[token] = int(rank)
        except (ValueError, binascii.Error) as e:
            raise ModelFormatError(f"{file}, line {number} is not a base64 token and its rank") from e
    if sorted(ranks.values()) != list(range(len(ranks))) or any(bytes([b]) not in ranks for b in range(256)):
        raise ModelFormatError(f"{file} does not rank all 256 bytes and its tokens 0, 1, 2, ... without gaps")
    return ranks


def build_tokenizer(file: Path, config: Mapping[str, Any]) -> Tokenizer:
    """A fast tokenizer with the ids that the model's own code gives.

    Args:
        config: tokenizer_config.json; names the tokenizer class and, in `added_tokens_decoder`, the special tokens.

    Raises:
        ModelFormatError: a damaged rank file, or the tokenizer of a family whose split pattern is not known here.
    """
    tokenizer_class = text_or(config, "tokenizer_class", _CLASS, where=TOKENIZER_CONFIG)
    if tokenizer_class != _CLASS:
        raise ModelFormatError(
            f"{file}: tokenizer class {plain(tokenizer_class)} is not supported (supported: {_CLASS} of Kimi-K2 and "
            "Moonlight, or a folder with tokenizer.json)"
        )
    ranks = read_ranks(file)
    special = _special_tokens(len(ranks), section(config, _ADDED, where=TOKENIZER_CONFIG))
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[b] for b in token)

    vocab = {spell(token): rank for token, rank in ranks.items()} | {t.content: i for i, t in special.items()}
    merges = [(spell(left), spell(right)) for left, right in _merges(ranks)]
    # Like tiktoken, a piece that is a whole token is not merged.
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([special[i] for i in sorted(special)])
    return tokenizer


def _merges(ranks: dict[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Every split of every token into two tokens, in the order of the merged token's rank.

    tiktoken merges the neighbours that make the token of lowest rank, whatever merges made them; a list with one split
    of each token could miss some.
    """
    out = []
    for token, _ in sorted(ranks.items(), key=lambda item: item[1]):
        splits = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        out += sorted(splits, key=lambda s: (ranks[s[0]], ranks[s[1]]))
    return out


def _special_tokens(first: int, named: Mapping[str, Any]) -> dict[int, AddedToken]:
    out = {i: AddedToken(f"<|reserved_token_{i}|>", special=True) for i in range(first, first + _NUM_SPECIAL)}
    last = first + _NUM_SPECIAL - 1
    for key, token in named.items():
        if not isinstance(token, dict) or not isinstance(token.get("content"), str) or not token["content"]:
            raise wrong(f"{_ADDED}[{shown(key)}]", "an object with a text as its content", token, TOKENIZER_CONFIG)
        token_id = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else -1
        if token_id not in out:
            raise ModelFormatError(
                f"{TOKENIZER_CONFIG}: special token {shown(token['content'])} has id {plain(key)}, outside {first}..{last}"
            )
        flags = {name: flag(token, name, where=TOKENIZER_CONFIG) for name in _FLAGS}
        out[token_id] = AddedToken(token["content"], normalized=False, **flags)
    return out


def byte_letters() -> list[str]:
    """The printable character that byte-level BPE writes for each byte (GPT-2's table).

    Printable Latin-1 characters are themselves; the other 68 bytes are numbered from U+0100.
    """
    out = []
    shifted = 0
    for byte in range(256):
        if 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE:
            out.append(chr(byte))
        else:
            out.append(chr(0x100 + shifted))
            shifted += 1
    return out
