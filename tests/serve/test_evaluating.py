"""What evaluators ask for: log-probabilities of prompts, no output tokens, many prompts a call, the tokenizer."""

import pytest

from tests.serve.client_checks import check_error, client, model_name
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

PROMPT = "def f(x): 日本"
IDS = byte_tokenizer().encode(PROMPT)


def ask(server, **body):
    answer = server.post("/v1/completions", {"prompt": PROMPT, "max_tokens": 0, "temperature": 0} | body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_echo_with_logprobs(mock_server):
    """As lm-eval asks: ids in, the prompt's tokens first, one token generated after them."""
    tokenizer = byte_tokenizer()
    plain = ask(mock_server, max_tokens=6, logprobs=2)["choices"][0]
    for prompt in (PROMPT, IDS, [IDS]):
        choice = ask(mock_server, prompt=prompt, max_tokens=6, logprobs=2, echo=True)["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"] == PROMPT + plain["text"]
        n = len(IDS)
        assert logprobs["tokens"][:n] == [tokenizer.token_text(i) for i in IDS]
        assert logprobs["tokens"][n:] == plain["logprobs"]["tokens"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:n] == [-i / 256 for i in IDS[1:]]
        assert logprobs["token_logprobs"][n:] == plain["logprobs"]["token_logprobs"]
        for token, value, top in zip(
            logprobs["tokens"][1:n], logprobs["token_logprobs"][1:n], logprobs["top_logprobs"][1:n], strict=True
        ):
            assert top[token] == value
            assert len(top) <= 3
        assert logprobs["text_offset"][n:] == [len(PROMPT) + o for o in plain["logprobs"]["text_offset"]]
        starts = logprobs["text_offset"][:n]
        assert starts == sorted(starts)
        assert [choice["text"][o] for o in starts[:9]] == list("def f(x):")


def test_a_stream_echoes_them_with_its_first_output(mock_server):
    whole = ask(mock_server, max_tokens=8, logprobs=1, echo=True, n=2)["choices"]
    streamed = client(mock_server.base_url).completions.create(
        model=model_name(mock_server.base_url), prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1, echo=True, n=2,
        stream=True,
    )  # fmt: skip
    texts, tokens, values, offsets = ({0: [], 1: []} for _ in range(4))
    for chunk in streamed:
        for choice in chunk.choices:
            texts[choice.index].append(choice.text)
            tokens[choice.index] += choice.logprobs.tokens
            values[choice.index] += choice.logprobs.token_logprobs
            offsets[choice.index] += choice.logprobs.text_offset
    for index, choice in enumerate(whole):
        assert "".join(texts[index]) == choice["text"]
        assert tokens[index] == choice["logprobs"]["tokens"]
        assert values[index] == choice["logprobs"]["token_logprobs"]
        assert offsets[index] == choice["logprobs"]["text_offset"]


@pytest.mark.parametrize("max_tokens", [0, 4])
def test_prompt_logprobs(mock_server, max_tokens):
    choice = ask(mock_server, prompt_logprobs=1, max_tokens=max_tokens)["choices"][0]
    assert bool(choice["text"]) == bool(max_tokens)
    assert choice["finish_reason"] in ("length", "stop")
    assert choice["logprobs"] is None
    told = choice["prompt_logprobs"]
    assert (told[0], len(told)) == (None, len(IDS))
    for token, entry in zip(IDS[1:], told[1:], strict=True):
        assert entry[str(token)]["logprob"] == -token / 256
        assert entry[str(token)].keys() == {"logprob", "rank", "decoded_token"}
        assert 1 <= len(entry) <= 2
    assert all(len(entry) == 1 for entry in ask(mock_server, prompt_logprobs=0)["choices"][0]["prompt_logprobs"][1:])


def test_prompt_logprobs_of_a_chat(mock_server):
    """Where vLLM has them: once, beside the choices."""
    chat = {"messages": [{"role": "user", "content": "日本"}], "max_tokens": 4, "n": 2, "temperature": 0}
    answer = mock_server.post("/v1/chat/completions", chat | {"prompt_logprobs": 2}).json()
    ids = mock_server.post("/tokenize", {"messages": chat["messages"]}).json()["tokens"]
    first, *told = answer["prompt_logprobs"]
    assert first is None
    assert [entry[str(token)]["logprob"] for token, entry in zip(ids[1:], told, strict=True)] == [
        -token / 256 for token in ids[1:]
    ]
    plain = mock_server.post("/v1/chat/completions", chat).json()
    assert "prompt_logprobs" not in plain
    assert answer["choices"] == plain["choices"]
    wrong = chat | {"prompt_logprobs": 1, "stream": True}
    check_error(mock_server.post("/v1/chat/completions", wrong), 400, "prompt_logprobs")


def test_nothing_but_the_prompt(mock_server):
    answer = ask(mock_server, n=2)
    assert [choice["text"] for choice in answer["choices"]] == ["", ""]
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["length", "length"]
    assert answer["usage"]["completion_tokens"] == 0
    assert ask(mock_server, echo=True)["choices"][0]["text"] == PROMPT


def test_many_prompts(mock_server):
    prompts = [[i % 200 + 1, 7] for i in range(256)]
    choices = ask(mock_server, prompt=prompts, max_tokens=1, logprobs=1, echo=True)["choices"]
    assert [choice["index"] for choice in choices] == list(range(256))
    assert all(choice["logprobs"]["token_logprobs"][1] == -7 / 256 for choice in choices)


def test_tokenizer_info(mock_server, start_server):
    info = mock_server.get("/tokenizer_info").json()
    assert info["model_max_length"] == 512
    assert "add_generation_prompt" in info["chat_template"]
    assert info.keys() >= {"bos_token", "eos_token", "pad_token", "unk_token", "tokenizer_class"}
    check_error(start_server(served(MockEngine(), None)).get("/tokenizer_info"), 400, "prompt")


def test_without_a_tokenizer(start_server):
    server = start_server(served(MockEngine(), None))
    choice = ask(server, prompt=[5, 6, 7], max_tokens=1, logprobs=0, echo=True)["choices"][0]
    assert choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
    assert choice["logprobs"]["token_logprobs"][:3] == [None, -6 / 256, -7 / 256]
