"""The flags of vLLM and SGLang: every row of the table goes through the parser, and means what the table says."""

import argparse
import re
from pathlib import Path

import pytest

import jaxspec
from jaxspec.config import EngineConfig
from jaxspec.errors import UsageError
from jaxspec.speculative_config import SPECULATIVE_OPTIONS
from serve import cli
from serve.flags import engine_config, similar, size
from serve.peer_flags import PEER_FLAGS, Alias, Collected, Ignored, PeerFlag, Refused, Same, Switch, Variable, markdown
from serve.sources import Resolved

DOCS = Path(jaxspec.__file__).parents[1] / "docs"
ROWS = [(flag, name) for flag in PEER_FLAGS for name in flag.names]
# Flags that make no sense alone.
WITH = {
    "--ssl-keyfile": ["--ssl-certfile", "file"],
    "--tokenizer": ["demo"],
    "--tokenizer-path": ["demo"],
    "--config": ["--config", "file.yaml"],
    "--master-port": ["--master-addr", "10.0.0.1"],
    **{
        name: ["--speculative-method", "ngram"]
        for name in (
            "--ngram-prompt-lookup-max", "--ngram-prompt-lookup-min", "--speculative-ngram-max-match-window-size",
            "--speculative-ngram-min-match-window-size",
        )
    },
}  # fmt: skip
# What --speculative-config takes back of other sources.
NO_SPECULATION: dict[str, object] = dict.fromkeys(SPECULATIVE_OPTIONS)


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.yaml").touch()


def resolve(*argv: str) -> Resolved:
    resolved = cli.resolve_serve(list(argv))
    engine_config(resolved.arguments)
    return resolved


def given(*argv: str) -> dict[str, object]:
    resolved = resolve(*argv)
    return {name: getattr(resolved.arguments, name) for name in resolved.sources if name != "config"}


@pytest.mark.slow
@pytest.mark.parametrize(("flag", "name"), ROWS, ids=[name for _, name in ROWS])
def test_every_row_is_what_the_table_says(flag: PeerFlag, name: str):
    words = [*WITH.get(name, []), *([] if name == "--config" else [name, *flag.example])]
    if isinstance(flag.here, Refused):
        with pytest.raises(UsageError) as error:
            resolve(*words)
        message = str(error.value)
        assert message.startswith(flag.long_names)
        assert flag.here.instead in message
        assert "\n" not in message
        for value in flag.here.passes:
            assert not resolve(name, value).notes
            assert given(name, value) == {}
        return
    resolved = resolve(*words)
    noted = isinstance(flag.here, Ignored) or words[-1:] == ["flashinfer"]
    assert len(resolved.notes) == noted
    match flag.here:
        case Ignored(reason):
            assert resolved.notes[0].endswith(f" has no effect: {reason}")
            assert given(*words) == {}
        case Alias(to):
            assert given(*words) == given(*WITH.get(name, []), to, *flag.example) != {}
        case Switch(option, value, shown):
            assert given(*words) == {option: value}
            ours = resolve(*shown.split()).arguments
            assert getattr(ours, option) == value
        case Variable(variable):
            assert resolved.variables == {variable: flag.example[0]}
        case Same():
            assert given(*words) or name == "--config"
        case Collected():
            assert given(*words)


def test_a_same_flag_is_our_own():
    serve = cli.parsers(["serve"])[1]["serve"]
    own = {name for action in serve.own_options() for name in action.option_strings}
    for flag in PEER_FLAGS:
        for name in flag.long_names:
            assert (name in own) == isinstance(flag.here, Same), name


def test_no_flag_is_in_the_table_twice():
    names = [name for _, name in ROWS]
    assert len(names) == len(set(names)) >= 120


def test_the_docs_have_the_table():
    assert markdown() in (DOCS / "flags.md").read_text(encoding="utf-8")


def test_the_docs_name_the_variables():
    text = (DOCS / "flags.md").read_text(encoding="utf-8")
    assert "JAXSPEC_" in text
    for name in ("JAXSPEC_CONFIG", "JAXSPEC_MODEL", "JAXSPEC_API_KEY", "JAXSPEC_SSL_KEYFILE_PASSWORD"):
        assert name in text


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["-tp", "1"], {"tensor_parallel_size": 1}),
        (["-tp=2"], {"tensor_parallel_size": 2}),
        (["--model-path", "m", "--context-length", "8192"], {"model": "m", "max_model_len": 8192}),
        (["--max_model_len=4k"], {"max_model_len": 4000}),
        (["--max-model-len", "4K", "--max-num-seqs", "1.5k"], {"max_model_len": 4096, "max_num_seqs": 1500}),
        (["--dtype", "float"], {"dtype": "float32"}),
        (["--kv-cache-dtype", "fp8_e4m3"], {"kv_cache_dtype": "fp8"}),
        (["m", "--tokenizer", "m"], {"model": "m"}),
        (["m", "--model", "m"], {"model": "m"}),
        (["--max-total-tokens", "6400"], {"num_gpu_blocks_override": 101}),
        (["--attention-backend", "FLASHMLA"], {"attention_backend": "auto"}),
        (["--attention-backend", "triton"], {"attention_backend": "triton"}),
        (["--allowed-origins", '["https://a"]'], {"allowed_origins": ("https://a",)}),
        (["--allowed-origins", "https://a, https://b"], {"allowed_origins": ("https://a", "https://b")}),
        (["--log-level", "WARNING"], {"log_level": "warning"}),
        (["--sampling-defaults", "model"], {"generation_config": "auto"}),
        (["--sampling-defaults", "openai"], {"generation_config": "none"}),
        (["--override-generation-config", '{"top_k": 5}'], {"override_generation_config": {"top_k": 5}}),
        (["--disable-radix-cache"], {"enable_prefix_caching": False}),
        (["--device", "cuda", "-q=x"], None),
        (["-O3", "--enable-chunked-prefill"], {}),
        (["-dp", "2", "-ep"], {"data_parallel_size": 2, "enable_expert_parallel": True}),
        (
            ["--speculative-config.method", "eagle3", "--speculative-config.model=d"],
            NO_SPECULATION | {"speculative_model": "d", "num_speculative_tokens": 3},
        ),
        (
            ["-sc", '{"method": "deepseek_mtp", "num_speculative_tokens": 1, "draft_tensor_parallel_size": 1}'],
            NO_SPECULATION | {"num_speculative_tokens": 1},
        ),
        (["-sc", '{"method": "mtp"}'], NO_SPECULATION | {"num_speculative_tokens": 3}),
        (
            ["-sc", '{"method":"ngram","num_speculative_tokens":3,"prompt_lookup_max":5,"prompt_lookup_min":2}'],
            {"speculative_model": None, "speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 5,
             "prompt_lookup_min": 2},
        ),
        (
            ["--speculative-algorithm", "NGRAM", "--speculative-ngram-max-match-window-size", "12"],
            {"speculative_method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 12},
        ),
        (
            ["--speculative-config.method=mtp", "--speculative-config.num_speculative_tokens", "2"],
            NO_SPECULATION | {"num_speculative_tokens": 2},
        ),
        (
            ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "d", "--speculative-num-steps", "5",
             "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "6"],
            {"speculative_model": "d", "num_speculative_tokens": 5},
        ),
        (["--speculative-algorithm", "NEXTN"], {"num_speculative_tokens": 3}),
        (["--speculative-algo", "NEXTN"], None),
        (["--speculative-num-draft-tokens", "4"], {"num_speculative_tokens": 3}),
    ],
)  # fmt: skip
def test_what_is_meant_is_done(words, options):
    if options is None:
        with pytest.raises(UsageError):
            resolve(*words)
    else:
        assert given(*words) == options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dtype", "half"], "half is not supported: use bfloat16, or auto"),
        (["--max-model-len", "auto"], "must be a whole number such as 4096, 4k (4000) or 4K (4096), got 'auto'"),
        (["--max-model-len", "0.5"], "must be a whole number"),
        (["--chunked-prefill-size", "-1"], "must be a whole number"),
        (["a", "--model", "b"], "the model is given twice: a and --model b"),
        (
            ["--master-addr", "10.0.0.1", "--coordinator", "10.0.0.2:7000"],
            "--master-addr and --coordinator name the same place: give one of them",
        ),
        (["a", "--tokenizer", "b"], "--tokenizer b is not supported: the tokenizer is the one in the model's folder"),
        (["--speculative-algorithm", "DFLASH"], "--speculative-algorithm DFLASH is not supported: use EAGLE3 with"),
        (["--speculative-algorithm", "EAGLE3"], "needs a draft: give --speculative-draft-model-path"),
        (["--speculative-num-steps", "3", "--speculative-num-draft-tokens", "16"], "drafts are chains, not trees"),
        (["--speculative-num-steps", "x"], "--speculative-num-steps must be a whole number, got 'x'"),
        (["--attention-backend", "fast"], "'fast' is none of auto, mosaic, triton, reference"),
        (["--sampling-defaults", "x"], "--sampling-defaults must be model or openai, got 'x'"),
        (["--override-generation-config", "["], "is not valid JSON"),
        (["--override-generation-config", "[]"], "must be a JSON object, got '[]'"),
        (["--kv-cache-dtype", "fp8_e5m2"], "invalid choice: 'fp8_e5m2'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--allowed-origins", "[1]"], "must be a list of texts"),
        (["--allowed-origins", "["], "is not valid JSON"),
    ],
)
def test_what_cannot_be_meant_is_one_line(capsys, words, message):
    assert cli.main(["serve", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("--tensor-paralell-size", "did you mean --tensor-parallel-size?"),
        ("--enforce-eagr", "did you mean --enforce-eager?"),
        ("--disable-prefix-caching", "did you mean --no-enable-prefix-caching?"),
        ("-tpp", None),
        ("-p", None),
        ("-t", None),
        ("--top-k", None),
        ("--dry", None),
    ],
)
def test_no_hint_misleads(capsys, word, hint):
    assert cli.main(["serve", word, "2"]) == 2
    error = capsys.readouterr().err
    assert error == f"error: unknown flag {word} ({hint or 'see jaxspec serve --help'})\n"


def test_a_hint_is_not_the_opposite():
    assert similar("--disable-mixed-batch", ["--enable-mixed-batch"]) is None
    assert (
        similar("--no-enable-mixed-bach", ["--enable-mixed-batch", "--no-enable-mixed-batch"])
        == "--no-enable-mixed-batch"
    )


def test_secrets_are_not_echoed():
    for words in (["--admin-api-key", "canary"], ["--hf-token", "canary"]):
        assert "canary" not in " ".join(resolve(*words).notes)


@pytest.mark.parametrize(
    ("text", "number"), [("4096", 4096), ("4k", 4000), ("4K", 4096), ("25.6k", 25_600), ("1M", 2**20)]
)
def test_sizes(text, number):
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "k", "-1", "1kk", "1.2", "٣", "1e3", "9" * 400])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match="whole number"):
        size(text)


def test_help_has_our_own_flags_only(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    assert "--context-length" not in text
    assert "--tensor-parallel-size" in text
    assert re.search(r"docs/flags\.md", text)


def test_defaults_are_those_of_the_engine():
    assert engine_config(resolve().arguments)[0] == EngineConfig()
