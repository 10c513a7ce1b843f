"""README, CONTRIBUTING and docs/: links lead somewhere, commands parse, and every benchmark's record is linked.

Each check is also tested on a small page with the fault that it is for.
"""

import dataclasses
import re
import subprocess
from collections.abc import Iterable

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import bench.__main__
from jaxspec import SamplingParams
from jaxspec.engine.acceptance import Acceptance
from jaxspec.engine.engine import EngineStats
from jaxspec.engine.expert_load import ExpertLoad
from serve.app import create_app
from serve.messages.body import MessagesBody
from serve.metrics import EngineSnapshot, Metrics
from serve.protocol import ChatBody, CompletionBody, Message, StreamOptions, TextPart, TokenizeBody
from serve.responses.body import ReasoningOptions, ResponsesBody, TextOptions
from serve.service import ServerSettings, Service
from tests.doc_checks import (
    ROOT,
    Page,
    broken_commands,
    broken_examples,
    broken_links,
    missing_paths,
    options_of,
    read,
    unknown_options,
    unlinked,
)

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Logs tell history: the files and flags that they name need not exist any more.
CURRENT = [page for page in PAGES if ROOT / "docs" / "kernels" not in page.parents]
README_WORDS = 700


def tracked(*patterns: str) -> list:
    command = ["git", "ls-files", "-z", *patterns]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if result.returncode:
        pytest.skip("not a checkout: what git tracks is not known")
    return [ROOT / name for name in result.stdout.split("\0") if name]


# --- the pages ---


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert not broken_links(read(path))


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_parse(path):
    assert not broken_commands(read(path))


@pytest.mark.parametrize("path", CURRENT, ids=lambda p: str(p.relative_to(ROOT)))
def test_what_the_text_names_exists(path):
    page = read(path)
    assert not unknown_options(page) + missing_paths(page) + broken_examples(page)


@pytest.mark.parametrize("path", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_merges_are_finished(path):
    assert not re.search(r"^(<{7}|>{7}) ", read(path).text, re.MULTILINE)


def test_the_readme_is_short():
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= README_WORDS


def test_every_record_is_linked():
    assert not unlinked(tracked("bench/results"), [read(path) for path in tracked("*.md")])


# --- nothing is left out ---


def unnamed(names: Iterable[str], *pages: str) -> list[str]:
    """Which of `names` no code span of these pages holds as a word."""
    spans = " ".join(span for page in pages for span in read(ROOT / page).code_spans)
    return [name for name in names if not re.search(rf"(?<![\w-]){re.escape(name)}(?![\w-])", spans)]


def test_every_option_of_serve_is_described():
    names = (name for name in options_of(("serve",)) or () if name != "--help")
    positive = {name.replace("--no-", "--") for name in names}
    left_out = unnamed(sorted(positive), "docs/deploying.md", "docs/speculation.md")
    assert not unnamed((name.replace("--", "--no-", 1) for name in left_out), "docs/deploying.md")


def test_every_parameter_of_a_request_is_described():
    names = {field.name for field in dataclasses.fields(SamplingParams)}
    for kind in (CompletionBody, ChatBody, TokenizeBody, StreamOptions, Message, TextPart):
        names |= {*kind.model_fields, *kind.known.neutral, *kind.known.ignored}
    assert not unnamed(sorted(names), "docs/sampling-and-api.md", "docs/tools-and-agents.md")
    names = set()
    for other in (MessagesBody, ResponsesBody, ReasoningOptions, TextOptions):
        names |= {*other.model_fields, *other.known.neutral, *other.known.ignored}
    assert not unnamed(sorted(names), "docs/tools-and-agents.md")


def test_every_endpoint_is_described():
    app = create_app(Service(ServerSettings("model"), load=lambda _report: pytest.fail("nothing is loaded")))
    names = [f"{method.upper()} {path}" for path, methods in app.openapi()["paths"].items() for method in methods]
    assert len(names) >= 9
    assert not unnamed(names, "docs/sampling-and-api.md")


def test_every_metric_is_described():
    metrics = Metrics("model", "jaxspec")
    load = ExpertLoad(np.ones((1, 2, 1, 4), int), (1,), 2)
    stats = EngineStats(0, 0, 0.0, 0, 0, 0, acceptance=Acceptance((1, 0), 1), steps_by_drafts={0: 1}, expert_load=load)
    metrics.snapshot = EngineSnapshot(stats, compiles=0, compiles_after_warmup=0, synthetic_acceptance_length=1.0)
    families = [f for f in text_string_to_metric_families(metrics.render().decode()) if not f.name.endswith("_created")]
    names = [f.name.removeprefix("jaxspec:") + ("_total" if f.type == "counter" else "") for f in families]
    assert len(names) > 20
    assert not unnamed(names, "docs/deploying.md", "docs/speculation.md")


def test_every_benchmark_is_described():
    names = [name for room in bench.__main__.ROOMS.values() for name in room]
    assert not unnamed(names, "docs/performance.md")


# --- the checks ---


def page_of(text: str) -> Page:
    return Page(ROOT / "docs" / "planted.md", text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[a](../README.md) [b](../README.md#jaxspec) [c](https://example.org/#x) `[d](e)`", 0),
        ("[a](README.md)", 1),
        ("[a](../README.md#no-such-heading)", 1),
        ("# One `two` three\n## Same\n## Same\n[a](#one-two-three) [b](#same-1)", 0),
        ("# One\n```\n# two\n```\n[a](#two)", 1),
    ],
)
def test_a_broken_link_is_found(text, found):
    assert len(broken_links(page_of(text))) == found


@pytest.mark.parametrize(
    ("command", "found"),
    [
        ("jaxspec serve FOLDER --num-speculative-tokens 3   # a comment", 0),
        ("pip install -e . && jaxspec demo", 0),
        ("jaxspec sevre", 1),
        ("jaxspec serve --num-drafts 3", 1),
        ("jaxspec serve --port many", 1),
        ("jaxspec bench step --model demo && jaxspec bench steps", 1),
        ("jaxspec bench serve -- --max-num-seqs 16", 0),
        ("jaxspec bench serve -- --max-num-sequences 16", 1),
        ("python -m bench kernel mla_decode", 0),
        ("python -m bench kernel mla_encode", 1),
        ("python -m bench.demo_training --out DIR", 0),
        ("python -m bench.demo_training --into DIR", 1),
        ("python -m bench.no_such_module", 1),
        ("JAXSPEC_TEST_GPU=1 pytest -m gpu -n 8 tests/test_docs.py", 0),
        ("pytest -m 'not gpus'", 1),
        ("pytest tests/test_no_such.py", 1),
        ("pytest --destroy", 1),
        ("pip install -e '.[no-such-extra]'", 1),
        ("bash .ci/no-such-script", 1),
        ("no-such-program", 1),
    ],
)
def test_a_broken_command_is_found(command, found):
    assert len(broken_commands(page_of(f"```\n{command}\n```"))) == found


@pytest.mark.parametrize(
    ("span", "found"),
    [
        ("`jaxspec bench step --peer` `--log-steps FILE` `jaxspec compare` `tests/test_docs.py` `jaxspec/engine`", 0),
        ("`jaxspec bench no_such`", 1),
        ("`jaxspec no-such`", 1),
        ("`jaxspec bench step --peers`", 1),
        ("`python -m bench step --peers`", 1),
        ("`--no-such-flag`", 1),
        ("`tests/test_no_such.py`", 1),
        ("```python\nfrom jaxspec import NoSuchThing\n```", 1),
        ("```python\ndef\n```", 1),
        ("```json\n{\n```", 1),
    ],
)
def test_what_does_not_exist_is_found(span, found):
    page = page_of(span)
    assert len(unknown_options(page) + missing_paths(page) + broken_examples(page)) == found


def test_an_unlinked_record_is_found():
    files = [ROOT / "bench" / "results" / name for name in ("a.json", "b.json")]
    assert unlinked(files, [page_of("[record](../bench/results/a.json)")]) == ["b.json"]


def test_a_name_that_is_left_out_is_found():
    assert unnamed(["temperature", "temper", "no_such_parameter"], "docs/sampling-and-api.md") == [
        "temper",
        "no_such_parameter",
    ]
