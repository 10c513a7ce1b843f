"""`LLM` on the embedded demo model: parity with PyTorch's recorded run, and what its API promises."""

import contextlib
import json
from dataclasses import replace

import numpy as np
import pytest

from convert.reference import read_record
from jaxspec import EngineConfig, SamplingParams
from jaxspec.compat import compiles
from jaxspec.engine.step_log import StepLog
from jaxspec.errors import ConfigError, InvalidRequestError, ModelFormatError
from jaxspec.llm import LLM
from jaxspec.sampling.structured import StructuredOutputsParams
from serve.demo import RECORD
from tests.serve.mock_engine import taken

PROMPT = "def fibonacci(n):"
GREEDY = SamplingParams(max_tokens=24, temperature=0, logprobs=0)


@pytest.mark.slow
def test_greedy_text_is_pytorchs(demo_llm):
    """16 prompts of 64 tokens, recorded with `jaxspec compare record`."""
    reference = read_record(RECORD)
    assert len(reference) == 16
    params = [SamplingParams(max_tokens=64, temperature=0, ignore_eos=True, logprobs=0)] * 16
    for completion, run in zip(demo_llm.generate([r.prompt_ids for r in reference], params), reference, strict=True):
        assert completion.ids == run.new_ids
        np.testing.assert_allclose(completion.logprobs, run.logprobs, atol=2e-4)


def test_completion_fields(demo_llm):
    (completion,) = demo_llm.generate(PROMPT, GREEDY)
    assert completion.prompt_ids == tuple(demo_llm.tokenizer.encode(PROMPT))
    assert len(completion.ids) == len(completion.logprobs) == 24
    assert completion.text == demo_llm.tokenizer.decode(completion.ids)
    assert completion.finish_reason == "length"
    assert completion.error is None
    assert all(p <= 0 for p in completion.logprobs)
    (without,) = demo_llm.generate([PROMPT], SamplingParams(max_tokens=2, temperature=0))
    assert without.logprobs is None


LATE = [
    (prompt, SamplingParams(max_tokens=40, temperature=temperature, seed=i, logprobs=2, stop=stop))
    for i, (prompt, temperature, stop) in enumerate(
        [
            (PROMPT, 0, ()),
            (PROMPT + "\n    ", 1, ("return",)),
            ("import os\n" * 20, 0, ("\n\n",)),
            ("import os\n" * 20 + PROMPT, 1, ()),
            ("class Tree:\n    def", 0, ("self.",)),
        ]
    )
]


@pytest.fixture(scope="module")
def alone(demo_llm):
    """What each prompt of `LATE` gives by itself, without a prefix cache."""
    outputs = []
    for prompt, params in LATE:
        demo_llm.engine.reset_prefix_cache()
        outputs += demo_llm.generate(prompt, params)
    return outputs


@pytest.mark.long
@pytest.mark.parametrize("depth", [pytest.param(1, marks=pytest.mark.full), 2])
def test_steps_read_late_change_no_text(demo_llm, alone, monkeypatch, depth):
    """Text, stop strings and log-probabilities of prompts that begin alike, together, are those of each alone."""
    prompts, params = zip(*LATE, strict=True)
    monkeypatch.setattr(demo_llm.engine, "settings", replace(demo_llm.engine.settings, readout_depth=depth))
    demo_llm.engine.reset_prefix_cache()
    before = demo_llm.engine.stats().prefix_cache_hits
    for _ in range(2):
        for got, want in zip(demo_llm.generate(list(prompts), list(params)), alone, strict=True):
            assert (got.ids, got.text, got.finish_reason) == (want.ids, want.text, want.finish_reason)
            np.testing.assert_allclose(got.logprobs, want.logprobs, atol=1e-4)
    assert demo_llm.engine.stats().prefix_cache_hits > before
    assert {c.finish_reason for c in alone} == {"length", "stop"}


def test_step_log(tmp_path, demo_llm, monkeypatch):
    """Every step is a line, whose tokens add up to the outputs."""
    with contextlib.closing(StepLog(str(tmp_path / "steps.jsonl"))) as log:
        monkeypatch.setattr(demo_llm.engine, "step_log", log)
        completions = demo_llm.generate([PROMPT, "class"], SamplingParams(max_tokens=9, temperature=0, ignore_eos=True))
    rows = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert all(row["end"] > row["start"] and row["device_ms"] > 0 and row["host_ms"] > 0 for row in rows)
    assert sum(chunk["tokens"] for row in rows for chunk in row["prefill"]) <= sum(
        len(c.prompt_ids) for c in completions
    )
    emitted = sum(each["emitted"] for row in rows for each in row["prefill"] + row["decode"])
    assert emitted == sum(len(c.ids) for c in completions)
    with pytest.raises(ConfigError, match="log_steps: cannot write"):
        StepLog(str(tmp_path / "no" / "steps.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize(("option", "kernels", "known"), [
    ("attention_backend", ("mosaic", "triton"), "auto, mosaic, triton or reference"),
    ("moe_backend", ("mosaic",), "auto, mosaic, reference or reference_w8a8"),
])  # fmt: skip
def test_a_kernel_that_cannot_run_here_is_an_error(option, kernels, known):
    for name in kernels:
        with pytest.raises(ConfigError, match=rf"cannot run on the backend '{name}'.*'auto' or 'reference'"):
            LLM("demo", **{option: name})
    with pytest.raises(ConfigError, match=rf"{option} \(--.*\) must be {known}, got 'fast'"):
        EngineConfig(**{option: "fast"})


def test_the_description_names_the_kernels_that_run(demo_llm):
    kernels = demo_llm.describe()["Kernels"]
    operations = (
        "cutoffs", "gumbel_argmax", "kv_write", "likeliest", "logit_rules", "logits_stats", "mla_decode", "mla_prefill",
        "mla_query", "moe", "moe_route", "norm_linear", "row_write",
    )  # fmt: skip
    assert kernels == ", ".join(f"{operation} reference" for operation in operations)


def test_speculation_statistics(demo_llm):
    """The demo model speculates by default; the statistics of each completion tell its tokens apart."""
    before = demo_llm.engine.stats().acceptance
    completions = demo_llm.generate([PROMPT, PROMPT + "\n"], GREEDY)
    for completion in completions:
        acceptance = completion.acceptance
        assert acceptance.k == 3
        assert len(completion.accepted) == len(completion.ids)
        assert not completion.accepted[0]  # the prompt's own step chose it
        # All but a last window that was cut: each yields its accepted drafts and one token of the target's.
        assert acceptance.num_steps <= completion.accepted.count(False) <= acceptance.num_steps + 1
        assert acceptance.num_accepted - 3 <= completion.accepted.count(True) <= acceptance.num_accepted
        assert completion.synthetic_acceptance_length is None
    total = demo_llm.engine.stats().acceptance.since(before).histogram
    assert total == tuple(map(sum, zip(*(c.acceptance.histogram for c in completions), strict=True)))


@pytest.mark.long
def test_synthetic_acceptance_is_named(demo_llm, monkeypatch):
    monkeypatch.setattr("jaxspec.engine.runner.Runner.warm_up", lambda *_, **__: None)
    folder = str(demo_llm.folder)
    llm = LLM(folder, speculative_config={"num_speculative_tokens": 3}, synthetic_acceptance_length=2.5)
    assert "2.5 tokens a window" in llm.describe()["Synthetic acceptance"]
    assert "Synthetic acceptance" not in demo_llm.describe()
    with pytest.raises(ConfigError, match="needs speculation"):
        LLM(folder, synthetic_acceptance_length=2.5)
    settings = replace(demo_llm.engine.settings, synthetic_acceptance_length=2.5)
    monkeypatch.setattr(demo_llm.engine, "settings", settings)
    assert demo_llm.generate(PROMPT, GREEDY)[0].synthetic_acceptance_length == 2.5


@pytest.mark.slow
def test_texts_ids_and_lists_are_the_same_prompt(demo_llm):
    ids = demo_llm.tokenizer.encode(PROMPT)
    texts = [
        demo_llm.generate(prompt, GREEDY)[0].text
        for prompt in (PROMPT, ids, tuple(ids), [PROMPT], [ids], [PROMPT, ids])
    ]
    assert len(set(texts)) == 1
    assert demo_llm.generate([], GREEDY) == []


def test_alternatives(demo_llm):
    """A greedy text takes the likeliest each time; three alternatives are the first of twenty."""
    asked = [SamplingParams(max_tokens=24, temperature=0, logprobs=count) for count in (0, 3, 20)]
    none, three, twenty = demo_llm.generate([PROMPT] * 3, asked)
    assert none.top_logprobs is None
    assert none.ids == three.ids == twenty.ids
    for position, (token, logprob) in enumerate(zip(three.ids, three.logprobs, strict=True)):
        alternatives = twenty.top_logprobs[position]
        assert alternatives[0] == (token, pytest.approx(logprob, abs=1e-5))
        assert [t for t, _ in three.top_logprobs[position]] == [t for t, _ in alternatives[:3]]
        assert sum(np.exp(p) for _, p in alternatives) <= 1 + 1e-3


def test_a_stop_string_cuts_text_ids_and_logprobs_alike(demo_llm):
    (whole,) = demo_llm.generate(PROMPT, SamplingParams(max_tokens=48, temperature=0, logprobs=0))
    stop = whole.text[20:25]
    params = SamplingParams(max_tokens=48, temperature=0, logprobs=2, stop=(stop,))
    (cut,) = demo_llm.generate(PROMPT, params)
    assert cut.finish_reason == "stop"
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.ids == whole.ids[: len(cut.ids)]
    assert len(cut.ids) == len(cut.logprobs) == len(cut.top_logprobs) < 48
    assert stop in demo_llm.tokenizer.decode(cut.ids)


@pytest.mark.slow
def test_completions_are_made_of_outputs_alone(demo_llm, monkeypatch):
    """Text and figures are those of before although a request that was handed over cannot be read any more."""
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=2, stop=("return",))
    before = demo_llm.generate([PROMPT, PROMPT + "\n"], params)
    add = demo_llm.engine.add
    monkeypatch.setattr(demo_llm.engine, "add", lambda *requests: add(*map(taken, requests)))
    again = demo_llm.generate([PROMPT, PROMPT + "\n"], params)
    for one, other in zip(before, again, strict=True):
        assert (one.ids, one.text, one.text_offsets, one.finish_reason) == (
            other.ids, other.text, other.text_offsets, other.finish_reason,
        )  # fmt: skip
        assert len(one.text_offsets) == len(one.ids) == len(one.accepted)


def test_without_parameters_the_models_own_apply(demo_llm, monkeypatch):
    assert demo_llm.get_default_sampling_params() == SamplingParams(temperature=0.8, top_p=0.95)
    assert demo_llm.describe()["Sampling defaults"] == "temperature 0.8, top_p 0.95 (from generation_config.json)"
    asked = []
    add = demo_llm.engine.add
    monkeypatch.setattr(demo_llm.engine, "add", lambda *r: (asked.extend(each.params for each in r), add(*r)))
    demo_llm.generate(PROMPT)
    demo_llm.generate(PROMPT, SamplingParams(max_tokens=2))
    assert asked == [demo_llm.get_default_sampling_params(), SamplingParams(max_tokens=2)]


@pytest.mark.slow
def test_several_outputs_of_a_prompt_have_seeds_of_their_own(demo_llm):
    """Outputs of one prompt lie side by side; each is what its own seed gives alone, and the first what n = 1 gives."""
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=7)
    several = demo_llm.generate([PROMPT, "class"], replace(params, n=3))
    assert [c.prompt_ids for c in several] == [
        tuple(demo_llm.tokenizer.encode(prompt)) for prompt in (PROMPT, "class") for _ in range(3)
    ]
    alone = demo_llm.generate([PROMPT] * 3, [replace(params, seed=seed) for seed in (7, 8, 9)])
    assert [c.ids for c in several[:3]] == [c.ids for c in alone]
    assert len({c.ids for c in several[:3]}) == 3
    assert len({c.ids for c in demo_llm.generate(PROMPT, replace(params, n=3, seed=None))}) == 3
    for wrong in (0, 1025, 1.5, True):
        with pytest.raises(InvalidRequestError, match="n must be a whole number from 1 to 1024"):
            SamplingParams(n=wrong)
    with pytest.raises(InvalidRequestError, match="one output"):
        demo_llm.run([demo_llm.make_request(PROMPT, replace(params, n=2))])


@pytest.mark.slow
def test_chat_goes_through_the_template(demo_llm):
    messages = [{"role": "user", "content": "Write a loop."}]
    ids = demo_llm.tokenizer.apply_chat_template(messages)
    (answer,) = demo_llm.chat(messages, GREEDY)
    assert answer.prompt_ids == tuple(ids)
    assert answer == demo_llm.generate([ids], GREEDY)[0]
    other = [*messages, {"role": "assistant", "content": "x"}, {"role": "user", "content": "Again."}]
    first, second = demo_llm.chat([messages, other], GREEDY)
    assert (first.ids, second.prompt_ids) == (answer.ids, tuple(demo_llm.tokenizer.apply_chat_template(other)))
    for wrong, name in (([{"role": "user"}], "content"), ([{"content": "x", "role": 1}], "role")):
        with pytest.raises(InvalidRequestError, match=rf"messages\[0\]\.{name} must be a text"):
            demo_llm.chat(wrong, GREEDY)


@pytest.mark.long
def test_a_chat_may_think_before_a_grammar(demo_llm, monkeypatch):
    """A thought that the prompt opens, or the model; a raw prompt has none, and a chat may turn it off."""
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    switch = "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    messages = [{"role": "user", "content": "Yes?"}]
    (opening,) = demo_llm.tokenizer.encode("<", add_special_tokens=False)
    asked = StructuredOutputsParams(choice=["yes", "no"])
    params = replace(GREEDY, structured_outputs=asked, logit_bias={opening: 60.0}, max_tokens=12)
    for before, start in (("", "<think>"), ("<think>", "<")):
        shown = switch if not before else switch.replace("{% endif %}", f"{{% else %}}{before}{{% endif %}}")
        template = "{% for m in messages %}{{ m.content }}{% endfor %}" + shown
        monkeypatch.setattr(demo_llm, "tokenizer", demo_llm.tokenizer.with_chat_template(template))
        (free,), (held,) = demo_llm.chat(messages, params), demo_llm.chat(messages, params, **off)
        assert free.text.startswith(start)
        assert free.finish_reason == "length"
        assert held.text in ("yes", "no")
        prompt = demo_llm.chat_prompt(messages)
        streamed = demo_llm.stream(prompt, params, demo_llm.chat_preface(prompt))
        assert "".join(output.new_text for output in streamed) == free.text
        assert demo_llm.generate([prompt], params)[0].text in ("yes", "no")


def test_a_stream_is_the_text_in_parts(demo_llm):
    (whole,) = demo_llm.generate(PROMPT, GREEDY)
    outputs = list(demo_llm.stream(PROMPT, GREEDY))
    assert "".join(o.new_text for o in outputs) == whole.text
    assert tuple(i for o in outputs for i in o.new_ids) == whole.ids
    assert outputs[-1].finish_reason == "length"
    with contextlib.closing(demo_llm.stream(PROMPT, GREEDY)) as stream:
        next(stream)
    assert not any(o.finish_reason != "abort" for o in demo_llm.engine.step())
    assert not demo_llm.engine.has_work


@pytest.mark.long
def test_seeds(demo_llm):
    def texts(*seeds):
        params = [SamplingParams(max_tokens=24, temperature=1.0, top_p=0.95, seed=s) for s in seeds]
        return [completion.text for completion in demo_llm.generate([PROMPT] * len(params), params)]

    (alone,), (again,), together = texts(1), texts(1), texts(1, 2, 3, 4)
    assert alone == again == together[0]
    assert len(set(together)) == 4


def test_one_bad_prompt_starts_nothing(demo_llm):
    with pytest.raises(InvalidRequestError, match="empty"):
        demo_llm.generate([PROMPT, []], GREEDY)
    with pytest.raises(InvalidRequestError, match="empty"):
        demo_llm.generate([PROMPT, ""], GREEDY)
    with pytest.raises(InvalidRequestError, match="maximum context length is 1024"):
        demo_llm.generate([PROMPT, [5] * 1020], GREEDY)
    with pytest.raises(InvalidRequestError, match="2 prompts but 1"):
        demo_llm.generate([PROMPT, PROMPT], [GREEDY])
    assert not demo_llm.engine.has_work
    assert demo_llm.engine.stats().kv_cache_usage == 0


def test_serving_compiles_nothing(demo_llm):
    before = compiles.total
    demo_llm.generate([PROMPT] * 9, SamplingParams(max_tokens=4, top_k=5))
    assert compiles.total == before


def test_an_interrupted_batch_leaves_nothing_behind(demo_llm, monkeypatch):
    engine = demo_llm.engine
    step, calls = engine.step, iter(range(10))

    def interrupted():
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        demo_llm.generate([PROMPT] * 3, GREEDY)
    monkeypatch.undo()
    engine.step()
    assert not engine.has_work
    assert engine.stats().kv_cache_usage == 0


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        ("no/such/folder", {}, ModelFormatError, "no/such/folder"),
        ("demo", {"max_model_len": 100_000}, ConfigError, "over the model's own limit of 4096"),
        ("demo", {"num_gpu_blocks_override": 3}, ConfigError, "cannot hold one request"),
        (
            "demo",
            {"tensor_parallel_size": 999},
            ConfigError,
            r"\(--tensor-parallel-size\) 999 needs 999 devices",
        ),
        ("demo", {"tensor_parallel_size": 3}, ConfigError, "4096, the vocab axis of embed.weight; use 1, 2 or 4"),
        ("demo", {"num_speculative_tokens": 3, "max_num_batched_tokens": 16}, ConfigError, "could not hold 4 tokens"),
    ],
)
def test_what_cannot_work_is_refused_before_loading(model, options, error, message, tmp_path, monkeypatch):
    monkeypatch.setenv("JAXSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr("jaxspec.loading.engine.load_params", lambda *_a, **_k: pytest.fail("the weights were read"))
    with pytest.raises(error, match=message):
        LLM(model, EngineConfig(**options))
