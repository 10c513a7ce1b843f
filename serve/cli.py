"""The command `jaxspec`. Heavy imports wait until a command runs, so that --help answers at once."""

import argparse
import importlib
import ipaddress
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.errors import ConfigError, JaxspecError
from serve.flags import Parser, UsageError, add_engine_flags, engine_config, parse

DEFAULT_PORT = 8000
DEFAULT_MAX_NUM_QUEUED_REQUESTS = 1024
_KEY_VARIABLE = "JAXSPEC_API_KEY"
_MODEL_HELP = "demo, a converted folder, a Hugging Face folder or a hub id"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 1 for an error, 2 for a command line that makes no sense."""
    try:
        return _run(list(sys.argv[1:] if argv is None else argv))
    except UsageError as e:
        return _fail(str(e), 2)
    except JaxspecError as e:
        return _fail(str(e), 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, code: int) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _run(argv: list[str]) -> int:
    if argv[:1] == ["bench"]:
        return _bench(argv[1:])
    parser, commands = parsers(argv)
    arguments = parse(parser, commands, argv)
    if arguments.command is None:
        parser.print_help()
        return 0
    return arguments.run(arguments)


def parsers(argv: Sequence[str]) -> tuple[Parser, dict[str, Parser]]:
    """The parser of everything but `bench`, and that of each command; with the flags of those that `argv` needs."""
    parser = Parser(prog="jaxspec", description="A JAX inference engine for MLA models with speculative decoding.")
    parser.add_argument("--version", action="version", version=jaxspec.__version__)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str) -> Parser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "Serve a model over an OpenAI-compatible HTTP API.")
    _add_serve_flags(serve)
    add_engine_flags(serve)

    convert = command("convert", _convert, "Convert a Hugging Face checkpoint into a folder that loads fast.")
    convert.add_argument("source", metavar="SRC", help="a Hugging Face folder or a hub id")
    convert.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    convert.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")

    compare = command("compare", _compare, "Compare a model with PyTorch: layers, logits, greedy text.")
    if argv[:1] == ["compare"]:  # the module of its flags imports NumPy
        from convert.compare_command import add_arguments, add_record_arguments

        (add_record_arguments if argv[1:2] == ["record"] else add_arguments)(compare)

    command("demo", _demo, "Generate with the embedded demo model and check it against PyTorch's recorded output.")
    command("bench", _version, "Run a benchmark (needs a checkout of the repository).")
    command("version", _version, "Print the versions of jaxspec and of what it runs on.")
    return parser, dict(subparsers.choices)


def _add_serve_flags(parser: Parser) -> None:
    def flag(group: argparse._ActionsContainer, name: str, metavar: str, text: str, **options: Any) -> None:
        group.add_argument(name, metavar=metavar, help=text, **options)

    flag(parser, "model", "MODEL", f"{_MODEL_HELP} (default: demo)", nargs="?", default="demo")
    flag(parser, "--revision", "TEXT", "branch, tag or commit of a hub id")
    server = parser.add_argument_group("server")
    flag(server, "--host", "ADDRESS", "address to listen on (default: 127.0.0.1)", default="127.0.0.1")
    flag(server, "--port", "N", f"port (default: {DEFAULT_PORT}; 0: any free)", type=int, default=DEFAULT_PORT)
    names = "names of the model for clients (default: the last part of MODEL)"
    flag(server, "--served-model-name", "NAME", names, nargs="+", default=[])
    key = f"key that clients must send; may be repeated. Process lists show it: prefer a file or ${_KEY_VARIABLE}"
    flag(server, "--api-key", "KEY", key, action="append", default=[])
    flag(server, "--api-key-file", "FILE", "file with one key per line", type=Path)
    prefix = "prefix of the names at /metrics (default: jaxspec; vllm for vLLM's dashboards)"
    flag(server, "--metrics-prefix", "TEXT", prefix, default="jaxspec")
    queued = (
        "most outputs that may wait for their first step; a request counts once for each prompt and choice. "
        f"Further requests get 429 with Retry-After (default: {DEFAULT_MAX_NUM_QUEUED_REQUESTS})"
    )
    flag(server, "--max-num-queued-requests", "N", queued, type=int, default=DEFAULT_MAX_NUM_QUEUED_REQUESTS)
    timeout = "how long SIGTERM waits for requests in flight (default: 60)"
    flag(server, "--shutdown-timeout", "SECONDS", timeout, type=float, default=60.0)
    level = "debug, info (the default), warning or error; prompts and outputs are never logged"
    flag(server, "--log-level", "LEVEL", level, choices=["debug", "info", "warning", "error"], default="info")


def _serve(arguments: argparse.Namespace) -> int:
    config, given = engine_config(arguments)
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535, got {arguments.port}")
    if not arguments.metrics_prefix.isidentifier():
        raise ConfigError(f"--metrics-prefix must be a plain name, got {arguments.metrics_prefix!r}")
    if arguments.max_num_queued_requests < 1:
        # Every request waits for its first step, if only for a moment: 0 would refuse all.
        raise ConfigError(f"--max-num-queued-requests must be at least 1, got {arguments.max_num_queued_requests}")
    keys = api_keys(arguments)
    from serve import startup
    from serve.model import ServedModel, load_model
    from serve.server import bind, run_server
    from serve.service import ServerSettings

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jaxspec").setLevel(arguments.log_level.upper())
    settings = ServerSettings(
        arguments.model,
        tuple(arguments.served_model_name),
        keys,
        arguments.metrics_prefix,
        arguments.max_num_queued_requests,
    )
    sock = bind(arguments.host, arguments.port)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"http://{host}:{sock.getsockname()[1]}"
    startup.announce_start(jaxspec.__version__, given)
    if not keys and not _is_loopback(arguments.host):
        logging.getLogger("jaxspec.serve").warning(
            "listening on %s without --api-key: anybody may use it", arguments.host
        )
    if config.synthetic_acceptance_length is not None:
        logging.getLogger("jaxspec.serve").warning(
            "--synthetic-acceptance-length %g: drafts are accepted at random, so every text is worthless",
            config.synthetic_acceptance_length,
        )
    startup.say(f"Listening on {url}")
    startup.say(f"Loading {arguments.model}")

    def on_ready(model: ServedModel) -> None:
        startup.announce_ready(model, settings.names[0], url, with_key=bool(keys))

    progress = startup.console_progress()
    return run_server(
        settings,
        lambda report: load_model(arguments.model, config, arguments.revision, startup.both(report, progress)),
        sock,
        shutdown_timeout=arguments.shutdown_timeout,
        on_ready=on_ready,
    )


def api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The keys that the flags, the environment and the key file give.

    Raises:
        ConfigError: a key is empty, or the file cannot be read or has none.
    """
    keys = [*arguments.api_key]
    if _KEY_VARIABLE in os.environ:
        keys.append(os.environ[_KEY_VARIABLE])
    if arguments.api_key_file is not None:
        try:
            lines = arguments.api_key_file.read_text(encoding="utf-8").split()
        except (OSError, ValueError) as e:
            raise ConfigError(f"cannot read --api-key-file {arguments.api_key_file}: {e}") from e
        if not lines:
            raise ConfigError(f"--api-key-file {arguments.api_key_file} holds no key")
        keys += lines
    if not all(key.strip() for key in keys):
        # A variable that should hold a key but is empty must not leave the server open.
        raise ConfigError(f"an API key is empty (--api-key or {_KEY_VARIABLE})")
    return tuple(keys)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _convert(arguments: argparse.Namespace) -> int:
    # Orbax starts jax's backend, which on a GPU would reserve most of its memory for nothing.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from convert.convert import convert_checkpoint
    from convert.progress import console
    from jaxspec.loading.draft import is_draft

    out = convert_checkpoint(arguments.source, arguments.out, revision=arguments.revision, progress=console())
    use = f"jaxspec serve MODEL --speculative-model {out}" if is_draft(out) else f"jaxspec serve {out}"
    print(f"Converted {arguments.source} into {out}. Try: {use}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    from convert.compare_command import run, run_record

    return run_record(arguments) if hasattr(arguments, "record") else run(arguments)


def _demo(arguments: argparse.Namespace) -> int:
    from serve.demo import run

    return run(arguments)


def _bench(argv: list[str]) -> int:
    root = Path(jaxspec.__file__).parents[1]
    if not (root / "bench" / "__main__.py").is_file():
        raise ConfigError("benchmarks live in the repository: run this command from a checkout (pip install -e .)")
    sys.path.insert(0, str(root))
    return importlib.import_module("bench.__main__").main(argv) or 0


def _version(_arguments: argparse.Namespace) -> int:
    from serve.version import version

    for name, number in version().items():
        print(f"{name} {number}")
    return 0
