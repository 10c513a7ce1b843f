"""Corpus, tokenizer and chat format of the embedded demo model (see __main__.py).

The text is Python source that is already installed where the script runs: the standard library and the
permissively licensed packages of the current environment. Nothing is downloaded.
"""

from __future__ import annotations

import ast
import hashlib
import json
import multiprocessing
import re
import sysconfig
import textwrap
from collections import Counter
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

VOCAB_SIZE = 4096
SPECIAL_TOKENS = ["<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>"]
BEGIN, END, SYSTEM, USER, ASSISTANT, PAD = range(len(SPECIAL_TOKENS))

CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages -%}
  {%- if message['role'] == 'system' -%}
    {{- '<|system|>' + message['content'] -}}
  {%- elif message['role'] == 'user' -%}
    {{- '<|user|>' + message['content'] -}}
  {%- elif message['role'] == 'assistant' -%}
    {{- '<|assistant|>' + message['content'] + eos_token -}}
  {%- else -%}
    {{- raise_exception('unknown role: ' + message['role']) -}}
  {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
  {{- '<|assistant|>' -}}
{%- endif -%}
"""

# One identifier with an optional joining character (space, underscore, dot, bracket), up to three digits, a run of
# punctuation, a run of newlines, an indentation that leaves its last space to the word after it. Newlines and
# indentation are separate pieces, so a prompt that ends in a newline is cut the way the training text is.
SPLIT_PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|[\r\n]+|[^\S\r\n]+(?!\S)|[^\S\r\n]+"

PERMISSIVE_IDS = {
    "0bsd", "apache-2.0", "bsd-2-clause", "bsd-3-clause", "bsl-1.0", "cc0-1.0", "cnri-python", "hpnd", "isc", "mit",
    "mit-0", "mit-cmu", "psf-2.0", "python-2.0", "unlicense", "zlib", "llvm-exception",
}  # fmt: skip
PERMISSIVE_CLASSIFIERS = {
    "apache software license", "bsd license", "isc license (iscl)", "mit license", "mit no attribution license (mit-0)",
    "python software foundation license", "the unlicense (unlicense)", "zlib/libpng license",
}  # fmt: skip
PERMISSIVE_NAMES = {
    "3-clause bsd license", "apache", "apache 2.0", "apache 2.0 license", "apache license 2.0",
    "apache license, version 2.0", "bsd", "bsd 3-clause", "bsd license", "bsd-3-clause license", "isc license",
    "mit license", "modified bsd", "new bsd", "psf",
}  # fmt: skip
# A package may carry other people's code under other licences in such folders; its own licence does not cover them.
VENDORED = {
    "_vendor", "_vendored", "vendor", "vendored", "third_party", "thirdparty", "extern", "externals", "site-packages",
}  # fmt: skip

MAX_FILE_BYTES = 200_000
CHAT_SHARE = 0.08
HELD_OUT_ONE_IN = 100
NEAR_DUPLICATE = 0.7


@dataclass
class Source:
    """One Python file that passed the filters."""

    package: str
    text: str
    digest: str
    functions: list[tuple[str, str, str, str]]  # name, header line, first docstring line, source

    @property
    def held_out(self) -> bool:
        return int(self.digest[:8], 16) % HELD_OUT_ONE_IN == 0


@dataclass
class Document:
    """Token ids of special tokens and plain strings, in order."""

    parts: list[int | str]
    package: str
    is_chat: bool
    prompt_parts: int = 0  # chat: how many parts come before the last answer

    @property
    def n_bytes(self) -> int:
        return sum(len(part.encode()) for part in self.parts if isinstance(part, str))


@dataclass
class Corpus:
    train: np.ndarray
    train_starts: np.ndarray
    held_out: np.ndarray
    held_out_starts: np.ndarray
    prompts: list[list[int]]  # held-out prefixes for the acceptance test
    report: dict = field(default_factory=dict)


def permissive_licence(dist: metadata.Distribution) -> str | None:
    """The licence a package declares, if every part of it is permissive; else None."""
    declared: Any = dist.metadata  # a message, which has `get` in all versions of Python
    expression = declared.get("License-Expression")
    short_name = (declared.get("License") or "").strip()
    if not expression and re.fullmatch(r"[\w.+-]+( (AND|OR|WITH) [\w.+-]+)*", short_name):
        expression = short_name
    if expression:
        names = [word for word in re.findall(r"[\w.+-]+", expression) if word not in {"AND", "OR", "WITH"}]
        if all(name.lower() in PERMISSIVE_IDS for name in names):
            return expression
    classifiers = [c for c in dist.metadata.get_all("Classifier") or [] if c.startswith("License ::")]
    classifiers = [c.split("::")[-1].strip() for c in classifiers]
    if classifiers:
        return " / ".join(classifiers) if all(c.lower() in PERMISSIVE_CLASSIFIERS for c in classifiers) else None
    return short_name if short_name.lower() in PERMISSIVE_NAMES else None


def find_files(stdlib_only: bool) -> tuple[list[tuple[str, str]], dict[str, str]]:
    """(package, path) of every candidate file, and the licence of each package."""
    paths = sysconfig.get_paths()
    stdlib = Path(paths["stdlib"])
    licences = {"python-stdlib": "PSF-2.0"}
    skipped_dirs = {"site-packages", "dist-packages", "idlelib", "ensurepip", "lib2to3"}
    files = [
        ("python-stdlib", str(path))
        for path in stdlib.rglob("*.py")
        if not skipped_dirs.intersection(path.relative_to(stdlib).parts)
    ]
    if stdlib_only:
        return files, licences
    for dist in metadata.distributions(path=sorted({paths["purelib"], paths["platlib"]})):
        licence = permissive_licence(dist)
        if licence is None:
            continue
        name = dist.metadata["Name"].lower()
        licences[name] = f"{licence} (version {dist.version})"
        for entry in dist.files or []:
            if entry.suffix == ".py" and ".." not in entry.parts and not VENDORED.intersection(entry.parts):
                files.append((name, str(dist.locate_file(entry))))
    return files, licences


def strip_licence_header(text: str) -> str:
    """Drop a leading comment block that only repeats a licence: it would be the best-learned text of all."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    head = "\n".join(lines[:end]).lower()
    return "\n".join(lines[end:]) if "copyright" in head or "licen" in head or "spdx" in head else text


def documented_functions(tree: ast.Module, text: str) -> list[tuple[str, str, str, str]]:
    lines = text.split("\n")
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef) or node.name.startswith(("test", "__")):
            continue
        summary = (ast.get_docstring(node) or "").split("\n")[0].strip()
        first_line = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        source = textwrap.dedent("\n".join(lines[first_line : node.end_lineno]))
        if 15 <= len(summary) <= 120 and 120 <= len(source) <= 1800:
            header = next((line for line in source.split("\n") if line.startswith("def ")), "")
            found.append((node.name, header, summary, source))
    return found


def read_source(candidate: tuple[str, str]) -> Source | None:
    """Read one file; None if it is not ordinary hand-written Python of a reasonable size."""
    package, path = candidate
    try:
        data = Path(path).read_bytes()
        if not 300 <= len(data) <= MAX_FILE_BYTES:
            return None
        text = data.decode("utf-8").replace("\r\n", "\n")
        head = text[:2000].lower()
        if "generated by" in head or "automatically generated" in head or "do not edit" in head:
            return None
        digits = sum(map(text.count, "0123456789")) / len(text)
        if digits > 0.10 or len(data) > 1.02 * len(text) or max(map(len, text.split("\n"))) > 400:
            return None
        tree = ast.parse(text)
    except (OSError, UnicodeDecodeError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions = documented_functions(tree, text)
    text = strip_licence_header(text).strip("\n") + "\n"
    if len(text) < 300:
        return None
    return Source(package, text, hashlib.sha256(text.encode()).hexdigest(), functions)


def long_line_hashes(text: str) -> list[int]:
    return [hash(line) for line in map(str.strip, text.split("\n")) if len(line) >= 20]


def drop_duplicates(sources: list[Source]) -> tuple[list[Source], int]:
    """Drop copies and near-copies: files most of whose longer lines were seen in files already kept."""
    kept, seen_digests, seen_lines = [], set(), set()
    for source in sorted(sources, key=lambda s: s.digest):
        hashes = long_line_hashes(source.text)
        known = sum(h in seen_lines for h in hashes)
        if source.digest in seen_digests or known > NEAR_DUPLICATE * max(len(hashes), 1):
            continue
        seen_digests.add(source.digest)
        seen_lines.update(hashes)
        kept.append(source)
    return kept, len(sources) - len(kept)


def chat_document(source: Source, functions: list[tuple[str, str, str, str]], rng: np.random.Generator) -> Document:
    parts: list[int | str] = [BEGIN]
    prompt_parts = 0
    if rng.random() < 0.3:
        parts += [SYSTEM, "You are a helpful assistant that writes Python."]
    for name, header, summary, answer in functions:
        requests = [
            f"Write a Python function `{name}`: {summary}",
            f"Please write `{name}`. {summary}",
            f"How would you implement `{name}`? {summary}",
            f"{summary} Call the function `{name}`.",
            f"Complete this function:\n\n{header}" if header else f"Write `{name}` in Python.",
        ]
        parts += [USER, requests[rng.integers(len(requests))], ASSISTANT]
        prompt_parts = len(parts)
        parts += [answer, END]
    return Document(parts, source.package, True, prompt_parts)


def make_documents(sources: list[Source], seed: int) -> list[Document]:
    """Every file as a plain document, plus conversations about some of its functions, shuffled."""
    rng = np.random.default_rng(seed)
    plain = [Document([BEGIN, source.text, END], source.package, False) for source in sources]
    chats = []
    for source in sources:
        functions = [source.functions[i] for i in rng.permutation(len(source.functions))]
        for _ in range(3):
            turns = int(rng.integers(1, 4))
            if functions:
                chats.append(chat_document(source, functions[:turns], rng))
            functions = functions[turns:]
    budget = CHAT_SHARE / (1 - CHAT_SHARE) * sum(document.n_bytes for document in plain)
    chosen = []
    for index in rng.permutation(len(chats)):
        if budget <= 0:
            break
        chosen.append(chats[index])
        budget -= chats[index].n_bytes
    documents = plain + chosen
    return [documents[i] for i in rng.permutation(len(documents))]


def train_tokenizer(documents: list[Document], max_bytes: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    texts, size = [], 0
    for document in documents:
        texts += [part for part in document.parts if isinstance(part, str)]
        size += document.n_bytes
        if size > max_bytes:
            break
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCAB_SIZE}")
    # As the hub's DeepSeek-V3 tokenizer does: encoding a plain prompt puts the begin token first.
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", BEGIN)]
    )
    return tokenizer


def encode_documents(tokenizer: Tokenizer, documents: list[Document]) -> list[list[int]]:
    """Token ids per document. A special token's spelling inside a text stays ordinary text."""
    tokenizer.encode_special_tokens = True
    encoded = []
    for start in range(0, len(documents), 1000):
        slab = documents[start : start + 1000]
        texts = [part for document in slab for part in document.parts if isinstance(part, str)]
        ids = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        for document in slab:
            tokens: list[int] = []
            for part in document.parts:
                tokens += [part] if isinstance(part, int) else next(ids).ids
            encoded.append(tokens)
    tokenizer.encode_special_tokens = False
    return encoded


def concatenate(encoded: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    lengths = np.array([len(tokens) for tokens in encoded])
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return np.concatenate([np.asarray(tokens, np.int16) for tokens in encoded]), starts.astype(np.int64)


def acceptance_prompts(documents: list[Document], tokenizer: Tokenizer, count: int, length: int) -> list[list[int]]:
    """Held-out prefixes of one common length: three quarters the start of a file, the rest a chat up to its answer."""
    chats, files = [], []
    for document in documents:
        if document.is_chat:
            head = Document(document.parts[: document.prompt_parts], document.package, True)
            chats.append(encode_documents(tokenizer, [head])[0])
        else:
            files.append(encode_documents(tokenizer, [document])[0][:length])
    chats = sorted((chat for chat in chats if len(chat) <= length), key=len, reverse=True)[: count // 4]
    files = [tokens for tokens in files if len(tokens) == length][: count - len(chats)]
    return files + chats


def held_out_overlap(held_out: list[Source], train: list[Source]) -> float:
    """Share of the held-out files' longer lines that also stand in some training file."""
    train_lines = {h for source in train for h in long_line_hashes(source.text)}
    lines = [h for source in held_out for h in long_line_hashes(source.text)]
    return sum(h in train_lines for h in lines) / max(len(lines), 1)


def build_corpus(cache: Path, seed: int, smoke: bool, tokenizer: Tokenizer | None = None) -> tuple[Corpus, Tokenizer]:
    """Corpus and tokenizer, from `cache` if an earlier run with the same settings left them there.

    A given tokenizer is used instead of training one: drafts must read the tokens of the target as delivered.
    """
    cache.mkdir(parents=True, exist_ok=True)
    given = "" if tokenizer is None else "-" + hashlib.sha256(tokenizer.to_str().encode()).hexdigest()[:8]
    stem = cache / f"corpus-{'smoke' if smoke else 'full'}-{seed}{given}"
    arrays_file, tokenizer_file, report_file = (stem.with_suffix(s) for s in (".npz", ".tokenizer.json", ".json"))
    if not report_file.exists():
        files, licences = find_files(stdlib_only=smoke)
        files = sorted(set(files))[:400] if smoke else sorted(set(files))
        with multiprocessing.get_context("fork").Pool(2 if smoke else None) as pool:
            read = [source for source in pool.map(read_source, files, chunksize=64) if source is not None]
        sources, n_duplicates = drop_duplicates(read)
        train = [source for source in sources if not source.held_out]
        held_out = [source for source in sources if source.held_out]
        train_documents, held_out_documents = make_documents(train, seed), make_documents(held_out, seed)
        tokenizer = tokenizer or train_tokenizer(train_documents, 3_000_000 if smoke else 40_000_000)
        tokenizer.save(str(tokenizer_file))
        train_tokens, train_starts = concatenate(encode_documents(tokenizer, train_documents))
        held_out_tokens, held_out_starts = concatenate(encode_documents(tokenizer, held_out_documents))
        prompts = acceptance_prompts(held_out_documents, tokenizer, 4 if smoke else 128, 32 if smoke else 192)
        np.savez(arrays_file, train=train_tokens, train_starts=train_starts, held_out=held_out_tokens,
                 held_out_starts=held_out_starts)  # fmt: skip
        bytes_by_package: Counter[str] = Counter()
        files_by_package = Counter(source.package for source in sources)
        for source in sources:
            bytes_by_package[source.package] += len(source.text.encode())
        chat_bytes = sum(d.n_bytes for d in train_documents if d.is_chat)
        report = {
            "candidate_files": len(files),
            "files_passing_filters": len(read),
            "dropped_as_copies_or_near_copies": n_duplicates,
            "train": {
                "files": len(train),
                "documents": len(train_documents),
                "chat_documents": sum(d.is_chat for d in train_documents),
                "text_bytes": sum(d.n_bytes for d in train_documents),
                "chat_text_bytes": chat_bytes,
                "tokens": len(train_tokens),
            },
            "held_out": {
                "files": len(held_out),
                "documents": len(held_out_documents),
                "chat_documents": sum(d.is_chat for d in held_out_documents),
                "text_bytes": sum(d.n_bytes for d in held_out_documents),
                "tokens": len(held_out_tokens),
                "share_of_long_lines_also_in_training_files": round(held_out_overlap(held_out, train), 4),
            },
            "packages": {
                name: {"licence": licences[name], "files": files_by_package[name], "bytes": size}
                for name, size in bytes_by_package.most_common()
            },
        }
        report_file.write_text(json.dumps({"report": report, "prompts": prompts}))
    arrays = np.load(arrays_file)
    saved = json.loads(report_file.read_text())
    corpus = Corpus(**{name: arrays[name] for name in arrays.files}, prompts=saved["prompts"], report=saved["report"])
    return corpus, Tokenizer.from_file(str(tokenizer_file))
