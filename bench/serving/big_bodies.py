"""Bodies of about the greatest size that a server reads, of every kind that costs somebody something; most are not valid."""

import random
from collections.abc import Callable

from serve.body import MAX_BODY_BYTES

SIZE = MAX_BODY_BYTES - 1000
COMPLETION, CHAT, TOKENIZE, DETOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
TEMPERATURE, EXTRA = b'{"prompt": "x", "temperature": ', b'{"prompt": "x", "metadata": '


def later(make: Callable[[bytes], bytes], value: bytes) -> Callable[[], bytes]:
    return lambda: make(value)


def full_text(piece: bytes) -> bytes:
    return b'"%s"' % (piece * (SIZE // len(piece)))


def full_list(element: bytes) -> bytes:
    return b"[" + b",".join([element] * (SIZE // (len(element) + 1) - 1)) + b"]"


def distinct(count: int, form: str) -> bytes:
    return ",".join(form % i for i in range(count)).encode()


def prompt(value: bytes) -> bytes:
    return b'{"prompt": %s}' % value


def content(value: bytes, tail: bytes = b"") -> bytes:
    return b'{"messages": [{"role": "user", "content": %s}%s]}' % (value, tail)


# Each is repeated up to the limit.
TEXTS = {
    "letters": b"a",
    "words": b"word ",
    "spaces": b" ",
    "quotes": rb"\"",
    "backslashes": b"\\\\",
    "escapes": rb"\u00e9",
    "surrogate pairs": rb"\ud83d\ude00",
    "lone surrogates": rb"\ud800",
    "emoji": "😀".encode(),
    "private use": "\ue000\uf8ff".encode(),
    "special tokens": b"<|user|>",
    "brackets": b"[{",
    "no UTF-8": b"\xff",
}
ELEMENTS = {
    "empty texts": b'""',
    "texts": b'"abc"',
    "lists": b"[]",
    "objects": b"{}",
    "objects with a field": b'{"a":1}',
    "nested lists": b"[[[[]]]]",
    "nested objects": b'{"a":{"a":{}}}',
    "ones": b"1",
    "ids": b"123456",
    "booleans": b"true",
    "nulls": b"null",
    "fractions": b"0.12345678901234567",
    "long numbers": b"9" * 4200,
    "too long numbers": b"9" * 5000,
    "powers": b"1e400",
    "NaN": b"NaN",
    "parts": b'{"type":"text","text":"a"}',
    "images": b'{"type":"image_url","image_url":{"url":"x"}}',
    "messages": b'{"role":"user","content":"a"}',
}
A_MESSAGE = '{"role":"user","content":"%d"}'
# Made when they are needed: together they are hundreds of megabytes.
BODIES: dict[str, tuple[str, Callable[[], bytes]]] = {
    **{f"prompt: {n}": (COMPLETION, later(lambda t: prompt(full_text(t)), t)) for n, t in TEXTS.items()},
    **{f"content: {n}": (CHAT, later(lambda t: content(full_text(t)), t)) for n, t in TEXTS.items()},
    **{f"tokenize: {n}": (TOKENIZE, later(lambda t: prompt(full_text(t)), t)) for n, t in TEXTS.items()},
    **{f"prompt of {n}": (COMPLETION, later(lambda e: prompt(full_list(e)), e)) for n, e in ELEMENTS.items()},
    **{f"content of {n}": (CHAT, later(lambda e: content(full_list(e)), e)) for n, e in ELEMENTS.items()},
    **{f"messages of {n}": (CHAT, later(lambda e: b'{"messages": %s}' % full_list(e), e)) for n, e in ELEMENTS.items()},
    **{f"tokens of {n}": (DETOKENIZE, later(lambda e: b'{"tokens": %s}' % full_list(e), e)) for n, e in ELEMENTS.items()},
    **{f"temperature of {n}": (COMPLETION, later(lambda e: TEMPERATURE + full_list(e) + b"}", e)) for n, e in ELEMENTS.items()},
    **{f"extra field of {n}": (COMPLETION, later(lambda e: EXTRA + full_list(e) + b"}", e)) for n, e in ELEMENTS.items()},
    "prompts of ids": (COMPLETION, lambda: prompt(b"[" + b",".join([b"[" + b"7," * 60_000 + b"7]"] * 32) + b"]")),
    "the same ids for many choices": (COMPLETION, lambda: prompt(b"[" + b"7," * 500_000 + b"7]")[:-1] + b', "n": 16}'),
    "as many ids as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**19 - 9, "%d") + b"]")),
    "as many texts as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**17 - 9, '"%d"') + b"]")),
    "as many objects as are parsed": (CHAT, lambda: b'{"messages": [' + distinct(2**16 - 9, '{"%d":1}') + b"]}"),
    "as many lists as are parsed": (COMPLETION, lambda: prompt(b"[" + distinct(2**16 - 9, "[%d]") + b"]")),
    "as many fields as are parsed": (COMPLETION, lambda: b'{"prompt": "x", ' + distinct(2**16 - 9, '"f%d":1') + b"}"),
    "as many messages as are taken": (CHAT, lambda: b'{"messages": [' + distinct(4096, A_MESSAGE) + b"]}"),
    "too many fields": (COMPLETION, lambda: b'{"prompt": "x", ' + distinct(500_000, '"f%d":1') + b"}"),
    "a long name": (COMPLETION, lambda: b'{"prompt": "x", "%s": 1}' % (b"n" * SIZE)),
    "a long model": (COMPLETION, lambda: b'{"prompt": "x", "model": "%s"}' % (b"m" * SIZE)),
    "a long role": (CHAT, lambda: b'{"messages": [{"role": "%s", "content": "x"}]}' % (b"r" * SIZE)),
    "a long stop": (COMPLETION, lambda: b'{"prompt": "x", "stop": "%s"}' % (b"s" * SIZE)),
    "a long key": (COMPLETION, lambda: b'{"prompt": "x", "logit_bias": {"%s": 1}}' % (b"9" * SIZE)),
    "a long number": (COMPLETION, lambda: b'{"prompt": "x", "max_tokens": %s}' % (b"9" * SIZE)),
    "4300 digits": (COMPLETION, lambda: b'{"prompt": "x", "max_tokens": %s}' % (b"9" * 4300)),
    "4299 digits": (COMPLETION, lambda: b'{"prompt": "x", "seed": -%s}' % (b"9" * 4299)),
    "deep": (COMPLETION, lambda: b"[" * SIZE),
    "deep objects": (COMPLETION, lambda: b'{"a":' * (SIZE // 5)),
    "no end": (COMPLETION, lambda: prompt(b'"' + b"x" * SIZE)[:-2]),
    "zeros": (COMPLETION, lambda: b"\0" * SIZE),
    "white space": (COMPLETION, lambda: b" " * SIZE),
}  # fmt: skip


def made(name: str) -> tuple[str, bytes]:
    """The path and the body of a name."""
    path, make = BODIES[name]
    return path, make()


# What random bodies are made of.
_PIECES = (*ELEMENTS.values(), b"[", b"]", b"{", b"}", b'"', b",", b":", b'"prompt":', b'"messages":', b"\\", b"\xff")


def random_body(seed: int) -> tuple[str, bytes]:
    """Path and body: JSON of all kinds, mutated."""
    source = random.Random(seed)
    part = b"".join(source.choices(_PIECES, k=source.randint(1, 30)))
    body = b'{"prompt": [' + part * ((SIZE - 20) // len(part))
    body += source.choice([b"", b"]}", b'"]}'])
    return source.choice([COMPLETION, CHAT, TOKENIZE]), body
