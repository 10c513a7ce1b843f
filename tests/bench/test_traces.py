"""`bench traces`: what its traces are, and that a request can only say its answer."""

import numpy as np

from bench.accuracy.traces import MOST_ANSWER, Follow, make_traces
from bench.harness.agent_traces import KINDS, traces_of_size
from jaxspec.loading.resolve import resolve_model
from jaxspec.text import Tokenizer


def test_answers_repeat_their_prompts_but_for_the_control():
    encode = Tokenizer.from_folder(resolve_model("demo")).encode
    traces = make_traces(encode, 3)
    assert [trace.kind for trace in traces] == [*KINDS] * 3
    repeated = {kind: [] for kind in KINDS}
    for trace in traces:
        assert 0 < len(trace.answer) <= MOST_ANSWER
        known = set(zip(*(trace.prompt[i:] for i in range(4)), strict=False))
        ends = list(zip(*(trace.answer[i:] for i in range(4)), strict=False))
        repeated[trace.kind].append(np.mean([end in known for end in ends]))
    assert all(share > 0.6 for kind in ("edit", "quote", "call") for share in repeated[kind])
    assert max(repeated["new"]) < 0.4


def test_traces_of_one_size_keep_what_their_answers_repeat():
    encode = Tokenizer.from_folder(resolve_model("demo")).encode
    for kind in KINDS:
        for trace in traces_of_size(encode, kind, 2, prompt=1024, answer=200):
            assert (len(trace.prompt), len(trace.answer)) == (1024, 200)
            known = set(zip(*(trace.prompt[i:] for i in range(4)), strict=False))
            ends = list(zip(*(trace.answer[i:] for i in range(4)), strict=False))
            assert (np.mean([end in known for end in ends]) > 0.5) == (kind != "new")


def test_only_the_answer_is_allowed():
    rule = Follow([3, 40, 64, 7])
    words = np.zeros((3, 3), np.int32)
    for fed, want in ((0, [3, 40, 64]), (1, [40, 64, 7]), (2, [64, 7, 7])):
        rule.fill_masks((), words)
        allowed = [[i for i in range(96) if row.view(np.uint32)[i // 32] >> (i % 32) & 1] for row in words]
        assert allowed == [[token] for token in want], fed
        rule.feed([0], None)
