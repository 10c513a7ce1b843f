"""Options from the command line, the environment and a file: who wins, what is said, and what is wrong."""

import pytest

from jaxspec.config import EngineConfig
from jaxspec.errors import ConfigError, UsageError
from serve import cli
from serve.flags import engine_config
from serve.sources import COMMAND_LINE, Resolved, variable_of


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> list[str]:
        (tmp_path / "serve.yaml").write_text(text, encoding="utf-8")
        return ["--config", "serve.yaml"]

    return write


def shown(resolved: Resolved) -> dict[str, dict[str, str]]:
    return resolved.shown(cli.parsers(["serve"])[1]["serve"].fallbacks)


def test_the_command_line_wins_over_the_environment_over_the_file_over_the_default(write, monkeypatch):
    config = write("port: 1\nhost: 0.0.0.0\nmax-model-len: 1k\nmetrics_prefix: vllm\n")
    monkeypatch.setenv("JAXSPEC_PORT", "2")
    monkeypatch.setenv("JAXSPEC_MAX_MODEL_LEN", "2k")
    monkeypatch.setenv("JAXSPEC_ENABLE_PREFIX_CACHING", "false")
    resolved = cli.resolve_serve(["--port", "3", *config])
    arguments = resolved.arguments
    assert (arguments.port, arguments.host, arguments.metrics_prefix) == (3, "0.0.0.0", "vllm")
    assert arguments.shutdown_timeout == 60
    assert engine_config(arguments)[0] == EngineConfig(max_model_len=2000, enable_prefix_caching=False)
    assert shown(resolved) == {
        "serve.yaml": {"host": "0.0.0.0", "metrics_prefix": "vllm"},
        "$JAXSPEC_MAX_MODEL_LEN": {"max_model_len": "2000"},
        "$JAXSPEC_ENABLE_PREFIX_CACHING": {"enable_prefix_caching": "False"},
        COMMAND_LINE: {"port": "3"},
    }
    assert not resolved.notes


def test_every_option_has_a_variable(write, monkeypatch):
    """Each is set to something that is not its default, one at a time."""
    examples = {
        "host": "::1", "port": "1", "dtype": "float32", "attention_backend": "reference", "moe_backend": "reference",
        "kv_cache_dtype": "fp8",
        "config": "serve.yaml", "model": "org/name", "served_model_name": "a,b", "metrics_prefix": "vllm",
        "log_level": "error", "uvicorn_log_level": "error", "shutdown_timeout": "1.5", "ssl_cert_reqs": "1",
        "speculative_config": '{"method": "mtp"}', "allowed_origins": "*", "speculative_capture_layers": "1,2",
        "override_generation_config": '{"top_k": 5}',
        "enable_mixed_batch": "0", "gpu_memory_utilization": "0.5", "synthetic_acceptance_length": "2",
        "synthetic_acceptance_pattern": "each",
        "tool_call_parser": "hermes", "reasoning_parser": "qwen3", "speculative_method": "ngram",
    }  # fmt: skip
    write("")
    options = cli.parsers(["serve"])[1]["serve"].own_options()
    assert len(options) > 35
    for action in options:
        example = examples.get(action.dest, "1" if action.type is not None or action.nargs == 0 else "text")
        with monkeypatch.context() as patch:
            patch.setenv(variable_of(action), example)
            resolved = cli.resolve_serve([])
            expected = {"speculative_config": "num_speculative_tokens"}.get(action.dest, action.dest)
            assert expected in resolved.sources, action.dest
            assert str(getattr(resolved.arguments, expected)) != str(action.default)


def test_a_file_as_vllm_has_it(write):
    config = write(
        """
        # as for vllm serve
        model: org/model
        served-model-name: [one, two]
        tensor-parallel-size: 1
        speculative-config: {method: eagle3, model: draft, num_speculative_tokens: 2}
        allowed_origins: ["https://a"]
        enable-prefix-caching: true
        enable_mixed_batch: false
        disable-log-stats: false
        enforce-eager: true
        api-key: [first, second]
        uvicorn-log-level: "info"
        seed:
        """
    )
    resolved = cli.resolve_serve(config)
    arguments = resolved.arguments
    assert (arguments.model, arguments.served_model_name) == ("org/model", ["one", "two"])
    assert (arguments.speculative_model, arguments.num_speculative_tokens) == ("draft", 2)
    assert arguments.allowed_origins == ("https://a",)
    assert (arguments.enable_prefix_caching, arguments.enable_mixed_batch) == (True, False)
    assert not arguments.disable_log_stats
    assert cli.api_keys(arguments) == ("first", "second")
    assert [note.split(" has")[0] for note in resolved.notes] == ["--enforce-eager"]
    assert "seed" not in resolved.sources
    assert shown(resolved)["serve.yaml"]["api_key"] == "***"


def test_keys_of_all_sources_open_the_server(write, monkeypatch):
    config = write("api_key: three\n")
    monkeypatch.setenv("JAXSPEC_API_KEY", "two")
    resolved = cli.resolve_serve(["--api-key", "one", *config])
    assert cli.api_keys(resolved.arguments) == ("one", "two", "three")
    assert "two" not in str(shown(resolved))


def test_one_source_says_what_speculation_is(write):
    """A draft of the file must not stay where the command line asks for the model's own layer."""
    config = write("speculative-model: draft\nnum-speculative-tokens: 5\n")
    arguments = cli.resolve_serve([*config, "--speculative-config", '{"method": "mtp"}']).arguments
    assert (arguments.speculative_model, arguments.num_speculative_tokens) == (None, 3)
    arguments = cli.resolve_serve([*config, "--speculative-num-steps", "2"]).arguments
    assert (arguments.speculative_model, arguments.num_speculative_tokens) == ("draft", 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot: 1", "serve.yaml: unknown option 'prot' (did you mean port?)"),
        ("port: x", "serve.yaml: argument --port: invalid int value: 'x'"),
        ("enable-prefix-caching: maybe", "serve.yaml: --enable-prefix-caching must be true or false, got 'maybe'"),
        ("config: other.yaml", "serve.yaml: a file cannot name another with config"),
        ("tool-call-parser: x", "serve.yaml: argument --tool-call-parser: invalid choice: 'x' (choose from"),
        ("enable-lora: true", "serve.yaml: --enable-lora is not supported: merge the adapter"),
        (
            "speculative-config: {method: medusa}",
            "serve.yaml: --speculative-config: speculative_method (--speculative-method) must be",
        ),
        ("1: 2", "serve.yaml: 1 is not the name of an option"),
        ("- port", "serve.yaml must map names of flags to values, as in `port: 8000`"),
        ("port: 1\nport: 2", "serve.yaml is not valid YAML: port is given twice"),
        ("port: [", "serve.yaml is not valid YAML: while parsing"),
        (
            "port: !!python/object/apply:os.system [ls]",
            "serve.yaml is not valid YAML: could not determine a constructor",
        ),
        ("max-model-len: 0", "max_model_len (--max-model-len) must be at least 1, got 0 (from serve.yaml)"),
        ("port: 70000", "--port must be between 0 and 65535, got 70000 (from serve.yaml)"),
    ],
)
def test_errors_name_the_file(write, capsys, text, message):
    assert cli.main(["serve", *write(text)]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert captured.err.count("\n") == 1


def test_a_file_that_cannot_be_read(capsys, tmp_path):
    assert cli.main(["serve", "--config", str(tmp_path / "no.yaml")]) == 1
    assert "no.yaml: No such file or directory" in capsys.readouterr().err
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not valid YAML"):
        cli.resolve_serve(["--config", str(tmp_path / "binary")])


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("JAXSPEC_PORT", "x", "$JAXSPEC_PORT: argument --port: invalid int value: 'x'"),
        ("JAXSPEC_ENABLE_MIXED_BATCH", "maybe", "--enable-mixed-batch must be true or false, got 'maybe'"),
        ("JAXSPEC_DTYPE", "int8", "$JAXSPEC_DTYPE: argument --dtype: invalid choice: 'int8'"),
    ],
)
def test_errors_name_the_variable(monkeypatch, name, value, message):
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error:
        cli.resolve_serve([])
    assert message in str(error.value)


def test_a_variable_that_nobody_reads_is_warned_about(monkeypatch):
    monkeypatch.setenv("JAXSPEC_MAX_MODEL_LENGTH", "5")
    monkeypatch.setenv("JAXSPEC_CACHE", "/tmp/cache")
    monkeypatch.setenv("JAXSPEC_REVISION", "")  # as from a compose file: not set
    resolved = cli.resolve_serve([])
    assert resolved.notes == (
        "$JAXSPEC_MAX_MODEL_LENGTH is no variable of jaxspec: did you mean $JAXSPEC_MAX_MODEL_LEN?",
    )
    assert not resolved.sources


def test_a_service_of_kubernetes_does_not_set_the_port(monkeypatch):
    for name, value in (
        ("JAXSPEC_PORT", "tcp://10.0.0.1:8000"),
        ("JAXSPEC_SERVICE_HOST", "10.0.0.1"),
        ("JAXSPEC_PORT_8000_TCP_ADDR", "10.0.0.1"),
    ):
        monkeypatch.setenv(name, value)
    resolved = cli.resolve_serve([])
    assert resolved.arguments.port == cli.DEFAULT_PORT
    assert len(resolved.notes) == 1
    assert "Service called jaxspec" in resolved.notes[0]


def test_what_a_library_reads_is_overridden_by_the_command_line_only(write, monkeypatch):
    config = write("download-dir: /from-file\n")
    assert cli.resolve_serve(config).variables == {"HF_HUB_CACHE": "/from-file"}
    monkeypatch.setenv("HF_HUB_CACHE", "/from-environment")
    assert cli.resolve_serve(config).variables == {}
    assert cli.resolve_serve([*config, "--download-dir", "/given"]).variables == {"HF_HUB_CACHE": "/given"}
