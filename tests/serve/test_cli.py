"""The command line, without a model."""

import os
import subprocess
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path

import pytest

import jaxspec
from jaxspec.config import EngineConfig
from jaxspec.errors import ModelFormatError
from serve import cli
from serve.flags import Parser, add_engine_flags, engine_config, parse
from serve.model import with_chat_template, with_formats
from serve.template_flag import read_template
from tests.serve.mock_engine import MockEngine, byte_tokenizer, served

ROOT = Path(__file__).parents[2]


def run(capsys, *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.slow
@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["convert", "--help"], ["version"]])
def test_quick_commands_import_nothing_heavy(argv):
    code = (
        "import sys, time\nfrom serve.cli import main\n"
        "try: main()\nexcept SystemExit as e: assert not e.code\n"
        "heavy = {'jax', 'transformers', 'torch', 'fastapi', 'flax'} & set(sys.modules)\nassert not heavy, heavy\n"
        "print(time.process_time(), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    times = []  # of the processor: the machine may be busy with other tests
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code, *argv], capture_output=True, text=True, env=environment, check=False
        )
        assert done.returncode == 0, done.stderr
        times.append(float(done.stderr))
    assert min(times) < 0.5
    assert "jaxspec" in done.stdout


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            ["serve", "--max-model-length", "5"],
            "error: unknown flag --max-model-length (did you mean --max-model-len?)",
        ),
        (["serve", "--max_model_length=5"], "error: unknown flag --max-model-length (did you mean --max-model-len?)"),
        (["serve", "--zzz"], "error: unknown flag --zzz (see jaxspec serve --help)"),
        (["serve", "a", "b"], "error: unknown argument b (see jaxspec serve --help)"),
        (["convert", "a"], "error: the following arguments are required: OUT (see jaxspec convert --help)"),
        (["serve", "--port", "x"], "error: argument --port: invalid int value: 'x' (see jaxspec serve --help)"),
    ],
)
def test_usage_errors_are_one_line(capsys, argv, message):
    assert run(capsys, *argv) == (2, "", message + "\n")


def test_an_unknown_command(capsys):
    code, _, err = run(capsys, "serv")
    assert code == 2
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["serve", "--max-model-len", "0"], "max_model_len (--max-model-len) must be at least 1, got 0"),
        (["serve", "--port", "70000"], "--port must be between 0 and 65535, got 70000"),
        (["serve", "--api-key", ""], "an API key is empty (--api-key or JAXSPEC_API_KEY)"),
        (["serve", "--api-key-file", "/no/such/file"], None),
        (["serve", "--metrics-prefix", "a b"], "--metrics-prefix must be a plain name, got 'a b'"),
        (["serve", "--max-num-queued-requests", "0"], "--max-num-queued-requests must be at least 1, got 0"),
        (["serve", "--host", "256.1.1.1", "--port", "0"], None),
        # Before the others are waited for, or the model is looked for.
        (
            ["serve", "/no/such/model", "--nnodes", "2", "--node-rank", "1", "--coordinator", "127.0.0.1:1"],
            "tensor_parallel_size (--tensor-parallel-size) 1 must be a multiple of 2, the number of processes (--nnodes), "
            "because each brings as many devices",
        ),
    ],
)
def test_what_cannot_work_is_one_line(capsys, argv, message):
    code, out, err = run(capsys, *argv)
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message is None or err == f"error: {message}\n"


def test_an_empty_key_variable_does_not_open_the_server(capsys, monkeypatch):
    monkeypatch.setenv("JAXSPEC_API_KEY", "")
    assert run(capsys, "serve")[0] == 1


def test_keys_come_from_flags_file_and_variable(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text("two\nthree\n")
    monkeypatch.setenv("JAXSPEC_API_KEY", "four")
    resolved = cli.resolve_serve(["--api-key", "one", "--api-key-file", str(tmp_path / "keys")])
    assert cli.api_keys(resolved.arguments) == ("one", "four", "two", "three")


def test_jaxspec_errors_have_no_traceback(capsys, monkeypatch):
    def broken(*_arguments, **_options):
        raise ModelFormatError("no config.json\n  in there")

    monkeypatch.setattr("convert.convert.convert_checkpoint", broken)
    assert run(capsys, "convert", "a", "b") == (1, "", "error: no config.json in there\n")


def test_control_c(capsys, monkeypatch):
    def interrupted(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("convert.convert.convert_checkpoint", interrupted)
    assert run(capsys, "convert", "a", "b") == (130, "", "error: interrupted\n")


def test_engine_flags_are_the_fields_of_the_config():
    argv = ["serve", "--max-model-len", "100", "--max_num_seqs=3", "--gpu-memory-utilization", "0.5"]
    config, given = engine_config(parse(*cli.parsers([]), [*argv, "--dtype", "float32"]))
    assert config == EngineConfig(max_model_len=100, max_num_seqs=3, gpu_memory_utilization=0.5, dtype="float32")
    assert given == {"max_model_len": 100, "max_num_seqs": 3, "gpu_memory_utilization": 0.5, "dtype": "float32"}
    parser = Parser(prog="x")
    add_engine_flags(parser)
    flags = {flag[2:].replace("-", "_") for flag in parser.flags()}
    switches = {f.name for f in fields(EngineConfig) if f.type in (bool, bool | None)}
    assert switches == {
        "adaptive_speculation",
        "enable_expert_parallel",
        "enable_mixed_batch",
        "enable_prefix_caching",
        "expert_load_metrics",
    }
    options = {f.name for f in fields(EngineConfig)} | {f"no_{name}" for name in switches}
    assert flags - {"help", "speculative_config"} == options
    off, _ = engine_config(parse(*cli.parsers([]), ["serve", "--no-enable-mixed-batch", "--readout-depth", "2"]))
    assert off == EngineConfig(enable_mixed_batch=False, readout_depth=2)


@pytest.mark.parametrize(("flags", "value"), [(["--switch"], True), (["--no-switch"], False), ([], None)])
def test_a_switch_may_be_left_to_the_engine(monkeypatch, flags, value):
    @dataclass(frozen=True)
    class Options:
        switch: bool | None = field(default=None, metadata={"help": "on or off (default: as the model allows)"})

    monkeypatch.setattr("serve.flags.EngineConfig", Options)
    parser = Parser(prog="x")
    add_engine_flags(parser)
    assert engine_config(parser.parse_args(flags))[0] == Options(value)


@pytest.mark.parametrize(
    ("flags", "config"),
    [
        (
            ["--speculative-model", "d", "--num_speculative_tokens", "2"],
            {"speculative_model": "d", "num_speculative_tokens": 2},
        ),
        (["--speculative-capture-layers", "1,2,3"], {"speculative_capture_layers": (1, 2, 3)}),
        (["--synthetic-acceptance-length", "2.5"], {"synthetic_acceptance_length": 2.5}),
        (["--speculative-config", '{"method": "mtp"}'], {"num_speculative_tokens": 3}),
        (
            ["--speculative_config", '{"method": "eagle3", "model": "d"}', "--num-speculative-tokens", "5"],
            {"speculative_model": "d", "num_speculative_tokens": 5},
        ),
    ],
)
def test_speculation_flags(flags, config):
    assert engine_config(parse(*cli.parsers([]), ["serve", *flags]))[0] == EngineConfig(**config)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--speculative-config", "{"], "--speculative-config is not valid JSON"),
        (["--speculative-config", "[1]"], "--speculative-config: speculative_config must be an object"),
        (
            ["--speculative-config", '{"modle": "x"}'],
            "unknown key 'modle' in speculative_config (did you mean 'model'?)",
        ),
        (
            ["--speculative-config", '{"num_speculative_tokens": 2}', "--num-speculative-tokens", "2"],
            "num_speculative_tokens (--num-speculative-tokens) is given twice",
        ),
        (["--speculative-capture-layers", "1,x"], "must be whole numbers with commas between them, got '1,x'"),
    ],
)
def test_speculation_flags_that_make_no_sense(capsys, flags, message):
    code, out, err = run(capsys, "serve", *flags)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_convert_passes_its_arguments(capsys, monkeypatch, tmp_path):
    import convert.convert

    seen = {}

    def fake(source, out, **options):
        seen.update(source=source, out=out, **options)
        out.mkdir()
        (out / "config.json").write_text('{"architectures": ["DeepseekV3ForCausalLM"]}')
        return out

    monkeypatch.setattr(convert.convert, "convert_checkpoint", fake)
    code, out, _ = run(capsys, "convert", "org/model", str(tmp_path / "out"), "--revision", "main")
    assert code == 0
    assert (seen["source"], seen["out"], seen["revision"]) == ("org/model", tmp_path / "out", "main")
    assert "jaxspec serve" in out


def test_benchmarks_need_the_repository(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(jaxspec, "__file__", str(tmp_path / "jaxspec" / "__init__.py"))
    code, _, err = run(capsys, "bench", "step", "--anything")
    assert code == 1
    assert "benchmarks live in the repository" in err


def test_the_benchmarks_get_the_rest_of_the_line(capsys, monkeypatch, tmp_path):
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    (tmp_path / "bench" / "__main__.py").write_text("def main(argv):\n    print(argv)\n    return 3\n")
    monkeypatch.setattr(jaxspec, "__file__", str(tmp_path / "jaxspec" / "__init__.py"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        monkeypatch.delitem(sys.modules, name)
    code, out, _ = run(capsys, "bench", "step", "--help")
    for name in [name for name in sys.modules if name.partition(".")[0] == "bench"]:
        monkeypatch.delitem(sys.modules, name)
    assert (code, out) == (3, "['step', '--help']\n")


def test_no_command_prints_help(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert "serve" in out


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("missing.jinja", "--chat-template: there is no file 'missing.jinja'"),
        ("{{ oops", "--chat-template: the chat template is wrong in line 1"),
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "time or memory"),
        ("\n", "--chat-template is empty"),
    ],
)
def test_a_template_that_cannot_be_used_is_an_error_at_once(capsys, monkeypatch, tmp_path, value, message):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["serve", "--chat-template", value]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_a_template_may_be_a_file_or_a_text(tmp_path):
    source = "{{ messages[0].content }}!"
    (tmp_path / "template.jinja").write_text(source)
    for value in (str(tmp_path / "template.jinja"), source):
        assert read_template(value) == source
    tokenizer = byte_tokenizer(chat=False)
    model = with_chat_template(served(MockEngine(), tokenizer), source)
    assert model.tokenizer.decode(model.tokenizer.apply_chat_template([{"role": "user", "content": "hi"}])) == "hi!"
    assert with_chat_template(served(MockEngine(), tokenizer), None).tokenizer is tokenizer
    described = with_formats(model, "hermes", None).description
    assert described["Tool calls"] == "hermes"
    assert "Reasoning" not in described
