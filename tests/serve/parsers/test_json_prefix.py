"""Arguments that are being written: what can still become an object, compared with the parsers of clients."""

import json
import random

import jiter
import pytest

from serve.parsers.json_prefix import JsonPrefix

PIECES = [
    "{", "}", "[", "]", ",", ":", '"', '"a"', '"b": ', " ", "\n", "1", "-", "0", ".5", "e+9", "true", "nu", "ll", "x", "\\",
    "u", "\\u00e9", "\\ud83d\\ude00", "\\ud83d", "\\udc00", "\\n", "\\x", "\x01", "\x7f", "é", "NaN", "Infinity", '"',
    "}", "]", "{", ": ",
]  # fmt: skip
VALUE = {"a": [1, -0.5e9, True, None, 'é😀\n"\\ \x7f'], "b": {"c": {}, "d": [], "": [[{}]]}, "e": "", "f": 0}


def reads(text: str, pieces: int) -> tuple[int, bool]:
    """How many characters were taken before it said no (all, if never), and whether the object is complete."""
    prefix = JsonPrefix()
    for at in range(0, len(text), pieces):
        if not prefix.feed(text[at : at + pieces]):
            return at, False
    return len(text), prefix.complete


def is_object(text: str) -> bool:
    def refuse(name):
        raise ValueError(name)

    try:
        value = json.loads(text, parse_constant=refuse)
        text.encode(), json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict)


def mutated(rng: random.Random) -> str:
    text = json.dumps(VALUE, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
    if rng.random() < 0.3:
        return "{" + "".join(rng.choices(PIECES, k=rng.randrange(12)))
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(text))
        text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(2) :]
    return text


@pytest.mark.parametrize("seed", range(2))
def test_it_agrees_with_parsers(seed):
    rng = random.Random(seed)
    seen = set()
    for _ in range(1000):
        text = mutated(rng)
        taken, complete = reads(text, rng.choice([1, 3, 1000]))
        assert complete == is_object(text), text
        assert reads(text, 1)[1] == complete
        jiter.from_json(text[:taken].encode(), partial_mode=True) if taken else None  # what has gone out is no error
        seen.add((complete, taken == len(text)))
    assert seen == {(True, True), (False, True), (False, False)}


def test_what_clients_do_not_parse():
    for text in ('{"a":' + "9" * 5000 + "}", '{"a":' * 200 + "1" + "}" * 200, "[1]", '"a"', "1", "{} {}"):
        assert not reads(text, 7)[1]
    assert reads('{"a":' * 100 + "1" + "}" * 100, 7)[1]
    assert reads('{"a": ' + '"' + "x" * 10_000 + '"}', 7)[1]
