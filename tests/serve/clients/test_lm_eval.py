"""lm-eval against a server of the demo model: the scores, and what is behind them, that transformers gets."""

import json
from pathlib import Path

import pytest

import jaxspec
from serve.model import ServedModel
from tests.serve.clients.conftest import MARKS
from tests.serve.conftest import serve_in_thread

pytestmark = [*MARKS, pytest.mark.slow]
TARGET = str(Path(jaxspec.__file__).parent / "demo" / "target")
CONTINUE = [
    ("def add(a, b):\n    return", [" a + b", " import", " )"]),
    ("import", [" os", " ===", " return"]),
    ("for i in range(10):\n    print(", ["i)", "def", "\n\n\n"]),
    ("class Point:\n    def __init__(self, x, y):\n        self.x =", [" x", " y", " self"]),
    ("x = [1, 2, 3]\nprint(len(", ["x))", "y))", "import))"]),
    ("if x is None:\n    raise", [" ValueError", " 7", " for"]),
    ("with open(path) as", [" f:", " x + 1", " return"]),
    ("try:\n    f()\nexcept", [" Exception", " return", " 5"]),
]


@pytest.fixture(scope="module")
def server(demo_llm):
    stops = []
    model = ServedModel(demo_llm.engine, demo_llm.tokenizer, demo_llm.describe())
    yield serve_in_thread(lambda _progress: model, stops, model="demo")
    for stop in stops:
        stop()


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")

    def task(name, documents, **config):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(document) + "\n" for document in documents))
        return {
            "task": name, "dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(path)}},
            "test_split": "test", "doc_to_text": "{{prompt}}", "num_fewshot": 0, **config,
        }  # fmt: skip

    choose = task(
        "choose",
        [{"prompt": p, "choices": c, "gold": i % 3} for i, (p, c) in enumerate(CONTINUE)],
        output_type="multiple_choice", doc_to_choice="{{choices}}", doc_to_target="gold", target_delimiter="",
        metric_list=[{"metric": "acc"}],
    )  # fmt: skip
    write = task(
        "write",
        [{"prompt": p, "answer": choices[0]} for p, choices in CONTINUE],
        output_type="generate_until", doc_to_target="{{answer}}",
        generation_kwargs={"until": ["\n"], "max_gen_toks": 12, "do_sample": False},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    return {"choose": choose, "write": write}


def evaluate(task, backend, *, chat=False, **arguments):
    """Metrics, and of each document what the model answered."""
    from lm_eval import simple_evaluate

    results = simple_evaluate(
        model=backend, model_args=arguments, tasks=[task], batch_size=4, apply_chat_template=chat, bootstrap_iters=0
    )
    metrics = {name: value for name, value in results["results"][task["task"]].items() if isinstance(value, float)}
    samples = sorted(results["samples"][task["task"]], key=lambda sample: sample["doc_id"])
    return metrics, [sample["filtered_resps"] for sample in samples]


def transformers(task, **options):
    return evaluate(task, "hf", pretrained=TARGET, dtype="float32", device="cpu", **options)


def local_completions(server, task, **options):
    """Token ids are what it sends. By itself it takes the server's tokenizer (/tokenizer_info, /tokenize)."""
    return evaluate(task, "local-completions", base_url=f"{server.base_url}/v1/completions", model="demo", **options)


@pytest.mark.parametrize("bos", [False, True])
def test_a_multiple_choice_task(server, tasks, bos):
    """With the server's tokenizer lm-eval leaves out the begin token, which its hf backend does not by itself."""
    options = {"tokenizer_backend": "huggingface", "tokenizer": TARGET, "add_bos_token": True} if bos else {}
    metrics, answers = transformers(tasks["choose"], add_bos_token=bos)
    ours, our_answers = local_completions(server, tasks["choose"], **options)
    assert ours == metrics
    assert 0 < metrics["acc,none"] < 1
    for mine, theirs in zip(our_answers, answers, strict=True):
        assert [greedy for _, greedy in mine] == [greedy for _, greedy in theirs]
        assert [value for value, _ in mine] == pytest.approx([value for value, _ in theirs], abs=1e-3)


def test_a_generation_task(server, tasks):
    metrics, answers = transformers(tasks["write"], add_bos_token=False)
    assert 0 < metrics["exact_match,none"] < 1
    assert local_completions(server, tasks["write"]) == (metrics, answers)
    assert len({answer for (answer,) in answers}) > 4


def test_a_generation_task_as_chats(server, tasks):
    metrics, answers = transformers(tasks["write"], chat=True)
    url = f"{server.base_url}/v1/chat/completions"
    ours = evaluate(tasks["write"], "local-chat-completions", base_url=url, model="demo", chat=True)
    assert ours == (metrics, answers)
