"""The tokenizer of a model folder: its data files are used, its code never is."""

import json
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxspec.errors import ModelFormatError
from jaxspec.loading.hf_folder import TOKENIZER_CONFIG, check_size, inside, naming, read_json
from jaxspec.models.fields import section, text_or, wrong
from jaxspec.text import Tokenizer

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
TIKTOKEN = "tiktoken.model"
_MAX_REASON = 400
COPIED = (
    TOKENIZER,
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
TOKENIZER_FILES = (*COPIED, TOKENIZER_CONFIG, TIKTOKEN)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a converted or Hugging Face folder; None where it has none.

    Raises:
        ModelFormatError: its files are damaged, or of a kind that is not supported.
    """
    if not has_tokenizer(folder):
        return None
    with naming(folder), tempfile.TemporaryDirectory() as copied:
        copy_tokenizer(folder, Path(copied))
        if (folder / TOKENIZER).exists():
            _check(read_json(folder, TOKENIZER))
        return _parse(Path(copied), folder)


def _check(tokenizer: dict[str, Any]) -> None:
    """Refuses what would end the process in the Rust parser; all else it reports."""
    model = section(tokenizer, "model", where=TOKENIZER)
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        # It cuts merged tokens at the prefix's length in bytes, be that in the middle of a character.
        if text_or(model, key, "", where=TOKENIZER):
            raise wrong(key, "empty: byte-level and sentencepiece vocabularies are supported", model[key], TOKENIZER)


def _parse(copied: Path, folder: Path) -> Tokenizer:
    try:
        return Tokenizer.from_folder(copied)
    except ModelFormatError as e:
        reason = str(e)
    except BaseException as e:  # the Rust parser panics at some files, and a panic is no Exception
        if isinstance(e, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        reason = f"cannot read the tokenizer in {folder}: {e}"
    raise ModelFormatError(" ".join(reason.replace(str(copied), str(folder)).split())[:_MAX_REASON])


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in (TOKENIZER, TIKTOKEN))


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Token -> id of a folder's tokenizer, without its added tokens; None where it has none."""
    if (folder / TOKENIZER).exists():
        with naming(folder):
            return _vocabulary(read_json(folder, TOKENIZER))
    if (folder / TIKTOKEN).exists():
        return json.loads(_from_ranks(folder, _tokenizer_config(folder)).to_str())["model"]["vocab"]
    return None


def _vocabulary(tokenizer: dict[str, Any]) -> dict[str, int] | None:
    """Of a parsed tokenizer.json; None where it lists its tokens in another way (Unigram)."""
    vocab = section(tokenizer, "model", where=TOKENIZER).get("vocab")
    return vocab if isinstance(vocab, dict) else None


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Writes the tokenizer of `folder` into `out`, where the model has one.

    Without `auto_map`, which names Python files to run, the tokenizer loads from its data or not at all. For a folder
    that has only a tiktoken rank file, tokenizer.json is made from it.
    """
    for name in COPIED:
        if (folder / name).exists():
            check_size(inside(folder, name))
            shutil.copyfile(inside(folder, name), out / name)
    config = _tokenizer_config(folder)
    remote = config.pop("auto_map", None)
    if (folder / TIKTOKEN).exists() and not (folder / TOKENIZER).exists():
        _from_ranks(folder, config).save(str(out / TOKENIZER))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif remote and (folder / TOKENIZER).exists():
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if config:
        write_json(out / TOKENIZER_CONFIG, config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_json(folder, TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}


def _from_ranks(folder: Path, config: dict[str, Any]) -> "tokenizers.Tokenizer":
    from jaxspec.loading.tiktoken import build_tokenizer

    return build_tokenizer(inside(folder, TIKTOKEN), config)
