"""The tokenizer made from a rank file, against the tiktoken package with the same ranks and pattern."""

import base64
import json
import shutil
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from convert.convert import convert_checkpoint
from jaxspec.errors import ModelFormatError
from jaxspec.loading.tiktoken import PATTERN, build_tokenizer, byte_letters, read_ranks
from jaxspec.loading.tokenizer_files import load_tokenizer, read_vocabulary
from tests.convert.edits import edit_config

tiktoken = pytest.importorskip("tiktoken")

CORPUS = [
    "The quick brown fox doesn't jump over the lazy dog; it's 12345 or 67 metres, they'll say. HTTPServer camelCase",
    "深度求索的模型使用多头潜在注意力。中文English混合 你好，世界！北京大学 東京都は日本の首都です。안녕하세요 세계",
    "def main(argv):\n    for i in range(10):\n        print(f'{i}: {argv[i]!r}')\n\n\nif __name__ == 'x':\n\tmain()\r\n",
    "Ünïcödé naïve café Straße ΑΒΓ αβγ Привет мир 😀👍🏽👨‍👩‍👧 🇨🇳 été ¼ ½ x² ∑∫ ﬁ ǅ ʰ",
]
SPECIAL = {"[BOS]": 0, "[EOS]": 1, "<|im_end|>": 2, "<|im_user|>": 3, "<|tool_calls_section_begin|>": 11}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    """Ranks of a real BPE training, a few hundred merges over the corpus."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    byte_of = {letter: byte for byte, letter in enumerate(byte_letters())}
    return {bytes(byte_of[c] for c in token): i for token, i in tokenizer.get_vocab().items()}


def write_ranks(file: Path, ranks: dict[bytes, int]) -> Path:
    lines = [f"{base64.b64encode(token).decode()} {rank}" for token, rank in sorted(ranks.items(), key=lambda x: x[1])]
    file.write_text("\n".join(lines) + "\n")
    return file


def tokenizer_config(first: int) -> dict[str, Any]:
    """As Moonshot writes it."""
    added = {
        str(first + i): {"content": name, "special": not name.startswith("<|tool"), "lstrip": False, "rstrip": False}
        for name, i in SPECIAL.items()
    }
    return {
        "added_tokens_decoder": added,
        "additional_special_tokens": ["<|im_end|>", "<|im_user|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "bos_token": "[BOS]",
        "eos_token": "[EOS]",
        "chat_template": "{% for m in messages %}<|im_user|>{{ m['content'] }}<|im_end|>{% endfor %}",
        "tokenizer_class": "TikTokenTokenizer",
    }


@pytest.fixture(scope="module")
def oracle(ranks: dict[bytes, int]) -> "tiktoken.Encoding":
    first = len(ranks)
    names = {first + i: f"<|reserved_token_{first + i}|>" for i in range(256)}
    names |= {first + i: name for name, i in SPECIAL.items()}
    return tiktoken.Encoding(
        "oracle", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={n: i for i, n in names.items()}
    )


@pytest.fixture(scope="module")
def ours(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    file = write_ranks(tmp_path_factory.mktemp("tiktoken") / "tiktoken.model", ranks)
    return build_tokenizer(file, tokenizer_config(len(ranks)))


# Characters that Python's Unicode tables do not know may be letters to one of the two and not to the other.
characters = st.characters(codec="utf-8", exclude_categories=["Cs", "Cn", "Co"])
han = st.text(st.characters(min_codepoint=0x4E00, max_codepoint=0x9FA5), min_size=1, max_size=4)
pieces = st.one_of(
    st.text(characters, max_size=6),
    han,
    st.sampled_from([word for line in CORPUS for word in line.split(" ")]),
    st.sampled_from([" ", "  ", "\n", "\r\n", "\t", "'s", "'RE", "'ſ", "1", "12", "1234", "<|im_end|>", "[BOS]", "<|"]),
    st.text("😀👍🏽‍🇨e\u0301 ", max_size=5),
)
texts = st.lists(pieces, max_size=12).map("".join)


@pytest.mark.slow
@given(text=texts)
@example(text="".join(CORPUS))
@example(text="<|im_user|>你好<|im_end|><|reserved_token_705|>")
@example(text="aaaaaaaaaaaaaaa" * 20)
def test_same_ids_and_text_as_tiktoken(text: str, ours: Tokenizer, oracle: "tiktoken.Encoding"):
    expected = oracle.encode(text, allowed_special="all")
    assert ours.encode(text).ids == expected
    assert ours.decode(expected, skip_special_tokens=False) == text


@pytest.mark.slow
@pytest.mark.parametrize("stride", [11, pytest.param(1, marks=pytest.mark.full)])
def test_assigned_characters_are_split_alike(stride: int, tmp_path: Path):
    """Each, or every eleventh, among letters, digits and marks; tokens of two bytes show by their ids where pieces end."""
    pairs = [bytes([a, b]) for a in range(256) for b in range(256)]
    ranks = {token: i for i, token in enumerate([bytes([i]) for i in range(256)] + pairs)}
    ours = build_tokenizer(write_ranks(tmp_path / "tiktoken.model", ranks), {})
    oracle = tiktoken.Encoding("pairs", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assigned = [c for c in map(chr, range(0x110000)) if unicodedata.category(c) not in ("Cs", "Cn", "Co")][::stride]
    texts = [f"a{c}B {c}b'{c}'s{c}1{c}{c}!{c}\n" for c in assigned]
    expected = oracle.encode_batch(texts, num_threads=2)
    got = ours.encode_batch_fast(texts)
    assert [c for c, e, g in zip(assigned, expected, got, strict=True) if g.ids != e] == []


def test_tokens_that_no_merge_of_two_tokens_makes(tmp_path: Path):
    """tiktoken uses a whole token for a piece even where merging cannot reach it."""
    ranks = {bytes([i]): i for i in range(256)} | {b"hello": 256, b" wor": 257, b"ld": 258}
    file = write_ranks(tmp_path / "tiktoken.model", ranks)
    ours = build_tokenizer(file, {})
    oracle = tiktoken.Encoding("x", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in ("hello", "hello world", "hellos", " wor ld", " wor"):
        assert ours.encode(text).ids == oracle.encode(text), text


def test_special_tokens(ours: Tokenizer, ranks: dict[bytes, int]):
    first = len(ranks)
    assert ours.get_vocab_size() == first + 256
    assert ours.token_to_id("<|im_end|>") == first + 2
    assert ours.token_to_id(f"<|reserved_token_{first + 255}|>") == first + 255
    ids = ours.encode("a<|im_end|><|tool_calls_section_begin|>").ids
    assert ours.decode(ids) == "a<|tool_calls_section_begin|>"  # not marked special by its config


@pytest.fixture
def kimi(source: Callable[[str], Path], ranks: dict[bytes, int], tmp_path: Path) -> Path:
    """A model folder with a rank file and with code."""
    folder = shutil.copytree(source("moonlight"), tmp_path / "in")
    write_ranks(folder / "tiktoken.model", ranks)
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(len(ranks))))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit")
    edit_config(folder, model_type="kimi_k2", auto_map={"AutoConfig": "configuration_kimi.KimiConfig"})
    return folder


@pytest.mark.torch
def test_the_folder_itself_and_the_converted_one_give_the_same_tokenizer(
    kimi: Path, oracle: "tiktoken.Encoding", tmp_path: Path
):
    folders = kimi, convert_checkpoint(kimi, tmp_path / "out")
    assert read_vocabulary(folders[0]) == read_vocabulary(folders[1])
    for folder in folders:
        tokenizer = load_tokenizer(folder)
        assert tokenizer is not None
        assert tokenizer.encode("".join(CORPUS)) == oracle.encode("".join(CORPUS))
        chat = tokenizer.apply_chat_template([{"role": "user", "content": "你好"}])
        assert chat == oracle.encode("<|im_user|>你好<|im_end|>", allowed_special="all")


@pytest.mark.torch
def test_converted_folder_loads_without_remote_code(
    kimi: Path, ranks: dict[bytes, int], oracle: "tiktoken.Encoding", tmp_path: Path
):
    out = convert_checkpoint(kimi, tmp_path / "out")
    assert not list(out.rglob("*.py"))

    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=False)
    text = "你好, world! It's 2024.\n"
    assert tokenizer.encode(text, add_special_tokens=False) == oracle.encode(text)
    assert tokenizer.eos_token_id == len(ranks) + 1
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "你好"}], tokenize=True, return_dict=False)
    assert chat == oracle.encode("<|im_user|>你好<|im_end|>", allowed_special="all")


@pytest.mark.parametrize(
    "content",
    [b"not-base64! 0\n", b"YQ==\n", b"YQ== x\n", b"YQ== 0\n", b"YQ== 1\nYQ== 0\n", b"", b"\xff\xfe 0\n"],
)
def test_damaged_rank_file(tmp_path: Path, content: bytes):
    (tmp_path / "tiktoken.model").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"tiktoken\.model"):
        read_ranks(tmp_path / "tiktoken.model")


def test_tokenizers_of_other_families_are_not_guessed(tmp_path: Path, ranks: dict[bytes, int]):
    file = write_ranks(tmp_path / "tiktoken.model", ranks)
    with pytest.raises(ModelFormatError, match="tokenizer class XTokenizer is not supported"):
        build_tokenizer(file, {"tokenizer_class": "XTokenizer"})
    outside = {"added_tokens_decoder": {"5": {"content": "<x>"}}}
    with pytest.raises(ModelFormatError, match="special token '<x>' has id 5, outside"):
        build_tokenizer(file, outside)


def test_a_tokenizer_that_cannot_be_read_names_its_folder(tmp_path: Path):
    assert load_tokenizer(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFormatError, match=f"cannot read the tokenizer in {tmp_path}"):
        load_tokenizer(tmp_path)
