"""What any client may expect of any jaxspec server, whatever its model: functions of a base URL.

The official `openai` client checks the shapes of answers (its types are strict about `finish_reason`), so most checks
go through it.
"""

import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

PROMPTS = ["def add(a, b):", "import os", "class Point:\n    ", "héllo 日本語 😀", "x = [1, 2"]


def client(base_url: str, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(
        **{"base_url": f"{base_url}/v1", "api_key": "none", "max_retries": 0, "timeout": 120, **options}
    )


def model_name(base_url: str) -> str:
    return client(base_url).models.list().data[0].id


def sse(base_url: str, path: str, body: dict[str, Any]) -> tuple[httpx.Headers, list[str]]:
    """The raw events of a stream, each checked for its framing; comments are left out."""
    with httpx.stream("POST", base_url + path, json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        text = response.read().decode("utf-8")
    assert text.endswith("\n\n")
    events = [event for event in text.removesuffix("\n\n").split("\n\n") if not event.startswith(":")]
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return response.headers, [event.removeprefix("data: ") for event in events]


def send(base_url: str, body: dict[str, Any], path: str = "/v1/completions") -> socket.socket:
    """Sends a request, to be the last of its connection, and leaves the connection open."""
    request = httpx.Request("POST", base_url + path, json=body, headers={"connection": "close"})
    head = "".join(f"{k}: {v}\r\n" for k, v in request.headers.items())
    url = httpx.URL(base_url)
    connection = socket.create_connection((url.host, url.port))
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
    return connection


def stream_texts(base_url: str, *, chat: bool = False, **options: Any) -> dict[int, str]:
    """The joined text of each choice of a stream."""
    texts: dict[int, str] = {}
    if chat:
        for chunk in client(base_url).chat.completions.create(stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
    else:
        for chunk in client(base_url).completions.create(stream=True, **options):
            for choice in chunk.choices:
                texts[choice.index] = texts.get(choice.index, "") + choice.text
    return texts


def check_models(base_url: str) -> None:
    models = client(base_url).models
    name = models.list().data[0].id
    assert models.retrieve(name).id == name
    assert models.retrieve(name).max_model_len > 0
    with pytest.raises(openai.NotFoundError) as caught:
        models.retrieve("no/such-model")
    assert caught.value.code == "model_not_found"


def check_completions(base_url: str) -> None:
    name = model_name(base_url)
    whole = client(base_url).completions.create(model=name, prompt=PROMPTS[0], max_tokens=12, temperature=0)
    assert whole.object == "text_completion"
    assert whole.model == name
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage.completion_tokens <= 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    # A text, its ids, and lists of either are the same request.
    ids = httpx.post(f"{base_url}/tokenize", json={"prompt": PROMPTS[0]}).json()["tokens"]
    assert len(ids) == whole.usage.prompt_tokens
    for prompt in (ids, [PROMPTS[0]], [ids]):
        again = client(base_url).completions.create(model=name, prompt=prompt, max_tokens=12, temperature=0)
        assert again.choices[0].text == whole.choices[0].text
    batch = client(base_url).completions.create(model=name, prompt=PROMPTS, max_tokens=8, temperature=0)
    alone = [client(base_url).completions.create(model=name, prompt=p, max_tokens=8, temperature=0) for p in PROMPTS]
    assert [c.text for c in batch.choices] == [a.choices[0].text for a in alone]
    assert batch.usage.prompt_tokens == sum(a.usage.prompt_tokens for a in alone)
    echoed = client(base_url).completions.create(model=name, prompt=PROMPTS[0], max_tokens=12, temperature=0, echo=True)
    assert echoed.choices[0].text == PROMPTS[0] + whole.choices[0].text


def check_chat(base_url: str) -> None:
    name = model_name(base_url)
    parts = [{"type": "text", "text": "Write"}, {"type": "text", "text": "code."}]
    answers = [
        client(base_url).chat.completions.create(
            model=name, messages=[{"role": "user", "content": content}], max_completion_tokens=12, temperature=0
        )
        for content in ("Write\ncode.", parts)
    ]
    assert answers[0].object == "chat.completion"
    assert answers[0].choices[0].message.role == "assistant"
    assert answers[0].choices[0].message.content == answers[1].choices[0].message.content
    assert answers[0].usage.completion_tokens <= 12


def check_streams_equal_whole(base_url: str, max_tokens: int = 16) -> None:
    """S8: streamed text is the whole text, byte for byte, multi-byte characters and stop strings included."""
    name = model_name(base_url)
    for prompt in PROMPTS:
        for stop in (None, ["\n\n"], ["\n", "(x"]):
            options: dict[str, Any] = {"model": name, "max_tokens": max_tokens, "temperature": 0, "stop": stop}
            whole = client(base_url).completions.create(prompt=prompt, **options)
            assert stream_texts(base_url, prompt=prompt, **options)[0] == whole.choices[0].text
            assert not any(s in whole.choices[0].text for s in stop or ())
        messages = [{"role": "user", "content": prompt}]
        options = {"model": name, "messages": messages, "max_tokens": max_tokens, "temperature": 0}
        answer = client(base_url).chat.completions.create(**options)
        assert stream_texts(base_url, chat=True, **options)[0] == answer.choices[0].message.content


def check_concurrent_streams(base_url: str, streams: int = 12, max_tokens: int = 16) -> None:
    """Each of many streams at once equals its solo run, greedy and sampled."""
    requests = [
        {
            "model": model_name(base_url),
            "prompt": f"{PROMPTS[i % len(PROMPTS)]} {i}",
            "max_tokens": max_tokens - i % 5,
            "temperature": i % 2,
            "seed": i,
        }
        for i in range(streams)
    ]
    alone = [stream_texts(base_url, **r) for r in requests]
    with ThreadPoolExecutor(streams) as pool:
        together = list(pool.map(lambda r: stream_texts(base_url, **r), requests))
    assert together == alone


def check_choices(base_url: str) -> None:
    """n > 1 with a seed: reproducible, choice 0 is the n = 1 run, streaming or not."""
    options: dict[str, Any] = {"model": model_name(base_url), "prompt": PROMPTS[0], "max_tokens": 20, "seed": 5}
    one = client(base_url).completions.create(**options)
    three = client(base_url).completions.create(n=3, **options)
    assert [c.index for c in three.choices] == [0, 1, 2]
    assert three.choices[0].text == one.choices[0].text
    assert len({c.text for c in three.choices}) > 1
    assert three.usage.prompt_tokens == one.usage.prompt_tokens
    assert stream_texts(base_url, n=3, **options) == {c.index: c.text for c in three.choices}


def check_stream_contract(base_url: str) -> None:
    """S1-S5, S7, S15 of the streaming contract, on the raw bytes."""
    name = model_name(base_url)
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    for path, extra, kind in (
        ("/v1/completions", {"prompt": "hi"}, "text_completion"),
        ("/v1/chat/completions", chat, "chat.completion.chunk"),
    ):
        body = {"model": name, "max_tokens": 20, "n": 3, "seed": 1, **extra}
        whole = httpx.post(base_url + path, json=body, timeout=120).json()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        headers, events = sse(base_url, path, {**body, **options})
        assert headers["content-type"].startswith("text/event-stream")  # S1
        assert headers["cache-control"] == "no-cache"  # S15
        assert headers["x-accel-buffering"] == "no"
        assert headers["x-request-id"]
        assert events[-1] == "[DONE]"
        chunks = [json.loads(event) for event in events[:-1]]
        assert len({(c["id"], c["created"], c["model"], c["object"]) for c in chunks}) == 1  # S3
        assert chunks[0]["object"] == kind
        *chunks, last = chunks
        assert last["choices"] == []  # S5
        # How much of the prompt was in the prefix cache is not the request's own.
        assert last["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
        assert whole["usage"].pop("prompt_tokens_details")["cached_tokens"] >= 0
        assert last["usage"] == whole["usage"]
        assert all(c["usage"] is None for c in chunks)
        for index in range(3):
            mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
            assert [c["finish_reason"] is not None for c in mine] == [False] * (len(mine) - 1) + [True]  # S4
            if path == "/v1/chat/completions":
                assert mine[0]["delta"] == {"role": "assistant", "content": ""}  # S2
                assert all("role" not in c["delta"] for c in mine[1:])
        refused = httpx.post(base_url + path, json={**body, "stream_options": {"include_usage": True}})  # S7
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream_options"


def check_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> str:
    """The one shape of errors; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    message = body["error"]["message"]
    assert isinstance(message, str)
    assert message
    assert "Traceback" not in message
    assert "\n" not in message
    assert (body["error"]["param"], body["error"]["code"]) == (param, code)
    return message


def check_anthropic_error(response: httpx.Response, status: int, kind: str) -> str:
    """Anthropic's form of errors; returns the message."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert set(body["error"]) == {"type", "message"}
    assert body["error"]["type"] == kind
    assert "\n" not in body["error"]["message"]
    return body["error"]["message"]


def check_bad_requests(base_url: str) -> None:
    """Every bad input is a 4xx in OpenAI's shape, and the server still works afterwards."""
    name = model_name(base_url)
    limit = client(base_url).models.retrieve(name).max_model_len

    def completion(status: int, param: str | None, code: str | None = None, **fields: Any) -> str:
        body = {"model": name, "prompt": "hi", "max_tokens": 4, **fields}
        for stream in ({}, {"stream": True}):  # S11: refused before a stream's 200
            content = json.dumps({**body, **stream})  # unlike httpx, the standard library can write NaN
            headers = {"content-type": "application/json"}
            message = check_error(
                httpx.post(f"{base_url}/v1/completions", content=content, headers=headers), status, param, code
            )
        return message

    message = completion(400, "max_tokens", "context_length_exceeded", max_tokens=limit)
    numbers = {int(n) for n in re.findall(r"\d+", message)}
    assert {limit, len(httpx.post(f"{base_url}/tokenize", json={"prompt": "hi"}).json()["tokens"])} <= numbers
    completion(400, "prompt", "context_length_exceeded", prompt="x" * 7_000_000)
    completion(404, "model", "model_not_found", model="gpt-nope")
    for prompt in ("", [], [[]], [""], [10**9], [-1], 5, None, {}, ["a", 1], [1, "a"], [True]):
        completion(400, "prompt", prompt=prompt)
    for value in (float("nan"), float("inf"), -1, "0.5", True, []):
        completion(400, "temperature", temperature=value)
    for param, value in {
        "max_tokens": -1, "top_p": 0, "top_k": -2, "seed": 2**70, "n": 17, "stop": [""], "logprobs": 21, "best_of": 3,
        "stop_token_ids": ["a"], "stream": "yes", "presence_penalty": 2.5, "frequency_penalty": -3, "logit_bias": {"5": 101},
        "min_p": 1.1, "min_tokens": 5, "repetition_penalty": 0, "num_speculative_tokens": -1, "priority": 2**63,
        "suffix": "x", "response_format": {"type": "xml"},
        "tools": [{}], "guided_json": {}, "temprature": 1, "prompt_logprobs": 21, "chat_template": "x",
    }.items():  # fmt: skip
        if param != "stream":
            completion(400, param, **{param: value})
    for bias in ({"a": 1}, {"-1": 1}, {"1.5": 1}, {"999999999": 1}, {"9" * 30: 1}, {"5": "1"}, {"5": None}, {"5": True}, [5],
                 {str(i): 0 for i in range(301)}):  # fmt: skip
        completion(400, "logit_bias", logit_bias=bias)
    for param in ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_p", "min_tokens"):
        for value in (float("nan"), "0.5"):
            completion(400, param, **{param: value})
    for value in (1.5, "1", True, float("nan"), -(2**63) - 1, 10**400):
        completion(400, "priority", priority=value)
    completion(400, "stop", stop=["x" * 257])
    completion(400, "stop", stop=["x"] * 17)
    completion(400, "prompt", prompt=["x"] * 257)
    completion(400, "prompt", prompt=["x"] * 129, n=2)
    completion(400, "prompt_logprobs", prompt_logprobs=1, stream=True)
    assert "did you mean 'temperature'" in completion(400, "temprature", temprature=1)

    for content in (
        b"{",
        b"",
        b"[1]",
        b"nonsense",
        b'{"prompt": "\\ud800"}',
        b"[" * 100_000,
        b'{"prompt": 1' + b"0" * 5000,
    ):
        response = httpx.post(
            f"{base_url}/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"
    check_error(httpx.post(f"{base_url}/v1/completions", content=b"a=1"), 415, None, "unsupported_media_type")
    check_error(httpx.get(f"{base_url}/v1/completions"), 405, None, "method_not_allowed")
    check_error(httpx.get(f"{base_url}/v1/nothing"), 404, None, "not_found")
    big = b'{"prompt": "' + b"x" * (9 * 2**20) + b'"}'
    headers = {"content-type": "application/json"}
    for content in (big, iter([big])):  # with a length, and chunked
        response = httpx.post(f"{base_url}/v1/completions", content=content, headers=headers)
        check_error(response, 413, None, "request_too_large")

    def chat(status: int, param: str | None, **fields: Any) -> str:
        body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **fields}
        return check_error(httpx.post(f"{base_url}/v1/chat/completions", json=body), status, param)

    chat(400, "messages", messages=[])
    chat(400, "messages", messages="hi")
    chat(400, "messages", messages=[{"role": "wizard", "content": "hi"}])
    chat(400, "messages", messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])
    chat(400, "messages", messages=[{"role": "assistant", "content": "", "tool_calls": [{}]}])
    chat(400, "priority", priority="high")
    chat(400, "top_logprobs", logprobs=True, top_logprobs=21)
    chat(400, "top_logprobs", logprobs=True, top_logprobs=-1)
    chat(400, "top_logprobs", logprobs=False, top_logprobs=2)
    chat(400, "top_logprobs", top_logprobs=2)
    chat(400, "logprobs", logprobs=1)
    chat(400, "max_completion_tokens", max_completion_tokens=5)
    chat(400, "response_format", response_format={"type": "xml"})
    check_completions(base_url)


def check_neutral_values_pass(base_url: str) -> None:
    neutral = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "repetition_penalty": 1.0, "min_p": 0,
        "min_tokens": 0, "num_speculative_tokens": None,
        "best_of": 1, "suffix": None, "user": "someone", "response_format": {"type": "text"}, "top_k": -1,
    }  # fmt: skip
    body = {"model": model_name(base_url), "prompt": "hi", "max_tokens": 4, "temperature": 0}
    plain, with_neutral = (
        httpx.post(f"{base_url}/v1/completions", json=body | extra).json() for extra in ({}, neutral)
    )
    assert with_neutral["choices"] == plain["choices"]


def check_logprobs(base_url: str) -> None:
    name = model_name(base_url)
    options: dict[str, Any] = {"model": name, "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "logprobs": 0}
    whole = client(base_url).completions.create(**options)
    logprobs = whole.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert len(logprobs.tokens) == whole.usage.completion_tokens
    assert all(p <= 0 for p in logprobs.token_logprobs)
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    streamed = [c.choices[0].logprobs for c in client(base_url).completions.create(stream=True, **options)]
    assert [t for part in streamed for t in part.tokens] == logprobs.tokens
    assert [o for part in streamed for o in part.text_offset] == logprobs.text_offset
    answer = client(base_url).chat.completions.create(
        model=name, messages=[{"role": "user", "content": "hi"}], max_tokens=20, logprobs=True, stop=["\n"]
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    spelled = b"".join(bytes(token.bytes) for token in content).decode("utf-8", "replace")
    assert spelled.startswith(answer.choices[0].message.content)
    assert all(token.top_logprobs == [] for token in content)


def check_top_logprobs(base_url: str) -> None:
    """N alternatives at each position; the completions form also holds the chosen token. Streamed as whole."""
    name = model_name(base_url)
    options: dict[str, Any] = {"model": name, "prompt": PROMPTS[0], "max_tokens": 20, "temperature": 0, "logprobs": 5}
    options["extra_body"] = {"return_token_ids": True}
    whole = client(base_url).completions.create(**options).choices[0]
    tops, chosen = whole.logprobs.top_logprobs, whole.logprobs.tokens
    assert len(tops) == len(chosen) == len(whole.token_ids)
    for top, token, value in zip(tops, chosen, whole.logprobs.token_logprobs, strict=True):
        assert top[token] == value
        assert 1 <= len(top) <= 6  # parts of characters are spelt alike
        assert all(p <= 0 for p in top.values())
    streamed = [c.choices[0].logprobs for c in client(base_url).completions.create(stream=True, **options)]
    assert [top for part in streamed for top in part.top_logprobs] == tops

    chat: dict[str, Any] = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 20}
    chat |= {"logprobs": True, "top_logprobs": 20, "temperature": 0}
    content = client(base_url).chat.completions.create(**chat).choices[0].logprobs.content
    for token in content:
        assert len(token.top_logprobs) == 20
        values = [top.logprob for top in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert all(bytes(top.bytes).decode("utf-8", "replace") == top.token for top in token.top_logprobs)
    parts = [c.choices[0].logprobs for c in client(base_url).chat.completions.create(stream=True, **chat) if c.choices]
    assert [token for part in parts if part for token in part.content] == content


def check_penalties_and_bias(base_url: str) -> None:
    """Every parameter of the sampler is taken, whole and streamed, and gives legal answers."""
    extra = {
        "min_p": 0.1, "repetition_penalty": 1.2, "min_tokens": 3, "num_speculative_tokens": 1, "top_k": 50,
        "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"5": -100, "6": 1.5},
    }  # fmt: skip
    body = {"model": model_name(base_url), "prompt": "hi", "max_tokens": 12, "seed": 4, **extra}
    whole = httpx.post(f"{base_url}/v1/completions", json=body, timeout=120)
    assert whole.status_code == 200, whole.text
    assert 3 < whole.json()["usage"]["completion_tokens"] <= 12
    _, events = sse(base_url, "/v1/completions", {**body, "stream": True})
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    assert text == whole.json()["choices"][0]["text"]


ALL = [
    check_models,
    check_completions,
    check_chat,
    check_streams_equal_whole,
    check_concurrent_streams,
    check_choices,
    check_stream_contract,
    check_bad_requests,
    check_neutral_values_pass,
    check_logprobs,
    check_top_logprobs,
    check_penalties_and_bias,
]
