"""The page at /: in a real browser, with and without a key; and what it and its figures may say."""

import json
import re
import shutil

import pytest

from serve.drafts import DraftRuns
from tests.serve.client_checks import check_error, sse
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

K = 3
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30, "temperature": 0, "ignore_eos": True}


@pytest.fixture
def server(start_server):
    return start_server(served(MockEngine(k=K), byte_tokenizer()), api_keys=("secret",))


AUTH = {"authorization": "Bearer secret"}


def test_the_page_needs_no_key_and_loads_nothing(server):
    answer = server.get("/")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src 'self'" in policy
    assert not re.search(r"https?://|src=|@import|url\(|innerHTML", answer.text)
    assert "mock" not in answer.text
    check_error(server.post("/"), 405, None, "method_not_allowed")


def test_the_page_is_found_behind_a_path(start_server):
    server = start_server(served(MockEngine(), byte_tokenizer()), root_path="/api", api_keys=("secret",))
    for path in ("/", "/api/"):
        assert server.get(path).text.startswith("<!doctype html>")


def test_server_info(server):
    check_error(server.get("/server_info"), 401, None, "invalid_api_key")
    before = server.get("/server_info", headers=AUTH).json()
    assert before["models"] == ["mock"]
    assert before["max_model_len"] == 512
    assert "Model" not in before["description"]
    assert server.post("/v1/chat/completions", CHAT, headers=AUTH).status_code == 200
    server.wait_until(lambda: server.get("/server_info", headers=AUTH).json()["engine"]["generation_tokens"] == 30)
    after = server.get("/server_info", headers=AUTH).json()
    assert len(after["engine"]["acceptance_histogram"]) == K + 1
    assert sum(after["engine"]["acceptance_histogram"]) > 0
    assert after["time"] > before["time"]


@pytest.mark.parametrize("stop", [None, "stop"])
def test_runs_are_the_text_and_the_accepted_drafts(start_server, stop):
    """The mock's ids are bytes: a run of whole characters ends where the last of their tokens does."""
    server = start_server(served(MockEngine(k=K), byte_tokenizer()))
    body = CHAT | {"return_draft_runs": True, "stop": stop}
    (whole,) = server.post("/v1/chat/completions", body).json()["choices"]
    assert "".join(run["text"] for run in whole["draft_runs"]) == whole["message"]["content"]
    assert {run["accepted"] for run in whole["draft_runs"]} == {True, False}
    _, chunks = sse(server.base_url, "/v1/chat/completions", body | {"stream": True})
    runs = [run for c in map(json.loads, chunks[:-1]) for run in c["choices"][0]["draft_runs"]]
    merged: list[dict] = []
    for run in runs:
        if merged and merged[-1]["accepted"] == run["accepted"]:
            merged[-1] = {"text": merged[-1]["text"] + run["text"], "accepted": run["accepted"]}
        else:
            merged.append(run)
    assert merged == whole["draft_runs"]
    assert "draft_runs" not in server.post("/v1/chat/completions", CHAT).json()["choices"][0]
    assert server.post("/v1/chat/completions", CHAT | {"return_draft_runs": 1}).status_code == 400


def test_runs_of_text_that_comes_late():
    runs = DraftRuns()
    assert runs.add("a", [0, 1], [False, True]) == [{"text": "a", "accepted": False}]
    assert runs.add("", [3], [False]) == []
    assert runs.add("bcd", [], []) == [{"text": "bc", "accepted": True}, {"text": "d", "accepted": False}]
    assert runs.add("ef", [5], [True]) == [{"text": "e", "accepted": False}, {"text": "f", "accepted": True}]


@pytest.fixture
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="needs a browser: pip install playwright")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("needs a browser: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.mark.slow
def test_a_chat_in_a_browser(server, browser):
    page = browser.new_page()
    asked, complaints = [], []
    page.on("request", lambda r: asked.append(r.url))
    page.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    page.on("pageerror", lambda e: complaints.append(str(e)))
    page.goto(server.base_url + "/")
    page.wait_for_selector("#key:not([hidden])")
    page.fill("#key-text", "secret")
    page.press("#key-text", "Enter")
    page.wait_for_selector("#model:text-is('mock')")
    complaints = [text for text in complaints if "401" not in text]
    page.fill("#text", "hello <b>")
    page.press("#text", "Enter")
    page.wait_for_selector(".assistant .note")
    assert page.text_content(".user") == "hello <b>"
    assert page.locator(".assistant .draft").count() > 0
    assert re.search(r"\d+ tokens, [\d.]+ tokens/s, 1\.\d+ tokens a step", page.text_content(".assistant .note"))
    page.wait_for_selector("#positions .bar")
    assert page.locator("#positions .bar").count() == K
    page.fill("#text", "again")
    page.click("#send")
    page.wait_for_selector(":nth-match(.assistant .note, 2)")
    page.click("#reset")
    assert page.text_content("#log") == ""
    assert complaints == []
    assert all(url.startswith((server.base_url, "data:")) for url in asked)
