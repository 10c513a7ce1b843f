"""Takes a model folder's tokenizer along: data files are copied, remote code is left behind."""

import json
import shutil
from pathlib import Path

from jaxspec.loading.hf_folder import inside, read_json

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
TIKTOKEN = "tiktoken.model"
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


def copy_tokenizer(folder: Path, out: Path) -> None:
    """Writes the tokenizer of `folder` into `out`; nothing where the model has none.

    `auto_map` names Python files that would run; without it the tokenizer loads from its data or not at all. A
    folder that has only a tiktoken rank file gets a tokenizer.json made from it.
    """
    for name in COPIED:
        if (folder / name).exists():
            shutil.copyfile(inside(folder, name), out / name)
    config = read_json(folder, TOKENIZER_CONFIG) if (folder / TOKENIZER_CONFIG).exists() else {}
    remote = config.pop("auto_map", None)
    if (folder / TIKTOKEN).exists() and not (folder / TOKENIZER).exists():
        from jaxspec.loading.tiktoken import build_tokenizer

        build_tokenizer(inside(folder, TIKTOKEN), config).save(str(out / TOKENIZER))
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    elif remote and (folder / TOKENIZER).exists():
        config["tokenizer_class"] = "PreTrainedTokenizerFast"
    if config:
        write_json(out / TOKENIZER_CONFIG, config)


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
