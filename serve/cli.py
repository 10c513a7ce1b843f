"""The command `jaxspec`. Heavy imports wait until a command runs, so that --help answers at once."""

import argparse
import functools
import importlib
import ipaddress
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jaxspec
from jaxspec.errors import ConfigError, JaxspecError, UsageError, shown
from jaxspec.grammar.thought import REASONING_NAMES, REASONING_PARSERS
from serve.flags import Parser, add_engine_flags, engine_config, json_object, names, parse
from serve.limits import LIMIT_FLAGS, check_limits, limit_settings
from serve.nodes import add_node_flags, nodes_given
from serve.parsers.registry import TOOL_NAMES, TOOL_PARSERS
from serve.peers import add_peer_flags
from serve.sources import Resolved, resolve

DEFAULT_PORT = 8000
DEFAULT_MAX_NUM_QUEUED_REQUESTS = 1024
_KEY_VARIABLE = "JAXSPEC_API_KEY"
_LEVELS = ("debug", "info", "warning", "error", "critical")
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

    def command(name: str, run: Callable[..., int], text: str) -> Parser:
        sub = subparsers.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        return sub

    serve = command("serve", _serve, "Serve a model over an OpenAI-compatible HTTP API.")
    serve.set_defaults(run=functools.partial(_serve, serve))
    _add_serve_flags(serve)
    add_engine_flags(serve)
    add_peer_flags(serve)
    serve.epilog = "Flags of vLLM and SGLang are understood where they have a meaning here: docs/flags.md."

    chat = command("chat", _chat, "Chat with a server or a model; accepted drafts have a colour.")
    if argv[:1] == ["chat"]:
        from serve.terminal.command import add_arguments as add_chat_arguments

        add_chat_arguments(chat)

    convert = command("convert", _convert, "Convert a Hugging Face checkpoint into a folder that loads fast.")
    convert.add_argument("source", metavar="SRC", help="a Hugging Face folder or a hub id")
    convert.add_argument("out", metavar="OUT", type=Path, help="the folder to make")
    convert.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    quantization = (
        "auto keeps quantised weights as the checkpoint has them, bf16 dequantises all; fp8 quantises MLPs and experts, int4 "
        "routed experts, that the checkpoint has unquantised (default: auto)"
    )
    convert.add_argument("--quantization", choices=("auto", "bf16", "fp8", "int4"), default="auto", help=quantization)

    compare = command("compare", _compare, "Compare a model with PyTorch: layers, logits, greedy text.")
    if argv[:1] == ["compare"]:  # the module of its flags imports NumPy
        from convert.compare_command import add_arguments, add_record_arguments

        (add_record_arguments if argv[1:2] == ["record"] else add_arguments)(compare)

    command("models", _models, "List the architectures of models and drafts that are supported.")
    command("demo", _demo, "Generate with the embedded demo model and check it against PyTorch's recorded output.")
    command("bench", _version, "Run a benchmark (needs a checkout of the repository).")
    command("version", _version, "Print the versions of jaxspec and of what it runs on.")
    return parser, dict(subparsers.choices)


def _add_serve_flags(parser: Parser) -> None:
    def flag(group: argparse._ActionsContainer, name: str, metavar: str | None, text: str, **options: Any) -> None:
        parser.declare(group, name, help=text, **({"metavar": metavar} if metavar else {}), **options)

    flag(parser, "model", "MODEL", f"{_MODEL_HELP} (default: demo)", nargs="?", default="demo")
    flag(parser, "--revision", "TEXT", "branch, tag or commit of a hub id")
    config = (
        "YAML file of flags and their values, which the environment ($JAXSPEC_PORT, ...) and the command line override"
    )
    flag(parser, "--config", "FILE", config, type=Path)
    defaults = (
        "where requests take the sampling parameters from that they leave out: auto (the model's generation_config.json, "
        "the default), none or vllm (nowhere), or a folder with such a file"
    )
    flag(parser, "--generation-config", "WHERE", defaults, default="auto")
    override = 'single values of these, as in {"temperature": 0.6}; null takes one away'
    flag(parser, "--override-generation-config", "JSON", override, type=json_object)
    server = parser.add_argument_group("server")
    flag(server, "--host", "ADDRESS", "address to listen on (default: 127.0.0.1)", default="127.0.0.1")
    flag(server, "--port", "N", f"port (default: {DEFAULT_PORT}; 0: any free)", type=int, default=DEFAULT_PORT)
    models = "names of the model for clients (default: the last part of MODEL)"
    flag(server, "--served-model-name", "NAME", models, nargs="+", default=[])
    key = f"key that clients must send; may be repeated. Process lists show it: prefer a file or ${_KEY_VARIABLE}"
    flag(server, "--api-key", "KEY", key, action="append", default=[])
    flag(server, "--api-key-file", "FILE", "file with one key per line", type=Path)
    root = "path under which a proxy has this server, such as /api (default: none)"
    flag(server, "--root-path", "PATH", root, default="")
    prefix = "prefix of the names at /metrics (default: jaxspec; vllm for vLLM's dashboards)"
    flag(server, "--metrics-prefix", "TEXT", prefix, default="jaxspec")
    template = "chat template: a file, or the Jinja text itself (default: the model's own)"
    flag(server, "--chat-template", "TEMPLATE", template)
    tools = f"format of the model's tool calls: {', '.join(TOOL_PARSERS)} or none (default: as its template has it)"
    flag(server, "--tool-call-parser", "NAME", tools, choices=TOOL_NAMES)
    thoughts = f"format of its reasoning: {', '.join(REASONING_PARSERS)} or none (default: as its template has it)"
    flag(server, "--reasoning-parser", "NAME", thoughts, choices=REASONING_NAMES)
    queued = (
        "most outputs that may wait for their first step; a request counts once for each prompt and choice. "
        f"Further requests get 429 with Retry-After (default: {DEFAULT_MAX_NUM_QUEUED_REQUESTS})"
    )
    flag(server, "--max-num-queued-requests", "N", queued, type=int, default=DEFAULT_MAX_NUM_QUEUED_REQUESTS)
    _add_limit_flags(server, flag)
    timeout = "how long SIGTERM waits for requests in flight (default: 60)"
    flag(server, "--shutdown-timeout", "SECONDS", timeout, type=float, default=60.0)
    add_node_flags(parser.add_argument_group("several processes"), flag)
    _add_log_flags(parser.add_argument_group("log"), flag)
    _add_tls_flags(parser.add_argument_group("TLS"), flag)
    _add_cors_flags(parser.add_argument_group("CORS (pages of other sites in a browser)"), flag)


def _add_limit_flags(group: argparse._ActionsContainer, flag: Callable[..., None]) -> None:
    for limit in LIMIT_FLAGS:
        flag(group, limit.name, limit.metavar, limit.help, type=limit.kind, default=limit.default)


def _add_log_flags(group: argparse._ActionsContainer, flag: Callable[..., None]) -> None:
    level = "debug, info (the default), warning, error or critical; prompts and outputs are never logged"
    flag(group, "--log-level", "LEVEL", level, type=str.lower, choices=_LEVELS, default="info")
    http = "level of the lines about HTTP requests (default: as --log-level)"
    flag(group, "--uvicorn-log-level", "LEVEL", http, type=str.lower, choices=_LEVELS)
    stats = "leave out the lines about throughput and speculation that come every 10 s under load"
    flag(group, "--disable-log-stats", None, stats, action="store_true", default=False)


def _add_tls_flags(group: argparse._ActionsContainer, flag: Callable[..., None]) -> None:
    flag(group, "--ssl-certfile", "FILE", "certificate, and its chain (default: no TLS)", type=Path)
    flag(group, "--ssl-keyfile", "FILE", "private key (default: in the certificate's file)", type=Path)
    flag(group, "--ssl-keyfile-password", "TEXT", "password of the key; prefer $JAXSPEC_SSL_KEYFILE_PASSWORD")
    flag(group, "--ssl-ca-certs", "FILE", "authorities that sign the certificates of clients", type=Path)
    required = "certificates of clients: 0 none (the default), 1 optional, 2 required"
    flag(group, "--ssl-cert-reqs", "N", required, type=int, choices=(0, 1, 2), default=0)


def _add_cors_flags(group: argparse._ActionsContainer, flag: Callable[..., None]) -> None:
    origins = "origins of pages that may call the server, as https://a.example,https://b.example or * (default: none)"
    flag(group, "--allowed-origins", "ORIGINS", origins, type=names, default=())
    flag(
        group,
        "--allowed-methods",
        "METHODS",
        "methods that they may use (default: GET,POST)",
        type=names,
        default=("GET", "POST"),
    )
    flag(group, "--allowed-headers", "HEADERS", "headers that they may send (default: *)", type=names, default=("*",))
    cookies = "let pages send cookies, which the server itself has none of"
    flag(group, "--allow-credentials", None, cookies, action="store_true", default=False)


def _serve(parser: Parser, given: argparse.Namespace) -> int:
    resolved = resolve(parser, given, os.environ)
    try:
        return _serve_resolved(resolved, parser.fallbacks)
    except ConfigError as e:
        raise ConfigError(resolved.blame(str(e))) from e


def _serve_resolved(resolved: Resolved, fallbacks: Mapping[str, Any]) -> int:
    arguments = resolved.arguments
    config, _ = engine_config(arguments)
    _check_serve(arguments)
    if arguments.override_generation_config is not None:
        from jaxspec.loading.generation_config import check_override

        check_override(arguments.override_generation_config)
    keys = api_keys(arguments)
    nodes = nodes_given(arguments, config)
    # Before anything is imported that reads them.
    os.environ.update(resolved.variables)
    from jaxspec.engine.leader import Leader
    from serve import startup
    from serve.cors import Cors
    from serve.model import Progress, ServedModel, load_model, with_chat_template, with_formats
    from serve.nodes import follow, lead
    from serve.server import bind, run_server
    from serve.service import ServerSettings
    from serve.template_flag import read_template
    from serve.tls import tls_of

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("jaxspec").setLevel(arguments.log_level.upper())
    if arguments.uvicorn_log_level is not None:
        for name in ("jaxspec.access", "uvicorn"):
            logging.getLogger(name).setLevel(arguments.uvicorn_log_level.upper())
    logger = logging.getLogger("jaxspec.serve")
    if nodes is not None and nodes.rank:
        startup.announce_start(jaxspec.__version__, resolved.shown(fallbacks))
        follow(nodes, arguments.model, config, arguments.revision)
    tls = tls_of(arguments)
    template = None if arguments.chat_template is None else read_template(arguments.chat_template)
    settings = ServerSettings(
        arguments.model,
        tuple(arguments.served_model_name),
        keys,
        arguments.metrics_prefix,
        arguments.max_num_queued_requests,
        root_path=arguments.root_path.rstrip("/"),
        log_stats=not arguments.disable_log_stats,
        tls=tls,
        cors=Cors(
            arguments.allowed_origins,
            arguments.allowed_methods,
            arguments.allowed_headers,
            credentials=arguments.allow_credentials,
        ),
        tool_call_parser=arguments.tool_call_parser,
        reasoning_parser=arguments.reasoning_parser,
        **limit_settings(arguments),
    )
    sock = bind(arguments.host, arguments.port)
    group = None if nodes is None else Leader(nodes)
    host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
    url = f"{'https' if tls else 'http'}://{host}:{sock.getsockname()[1]}"
    startup.announce_start(jaxspec.__version__, resolved.shown(fallbacks))
    for line in resolved.notes:
        logger.warning("%s", line)
    if not keys and not _is_loopback(arguments.host):
        logger.warning("listening on %s without --api-key: anybody may use it", arguments.host)
    if config.synthetic_acceptance_length is not None:
        logger.warning(
            "--synthetic-acceptance-length %g: drafts are accepted at random, so every text is worthless",
            config.synthetic_acceptance_length,
        )
    startup.say(f"Listening on {url}")
    startup.say(f"Loading {arguments.model}")

    def on_ready(model: ServedModel) -> None:
        startup.announce_ready(model, settings.names[0], url, with_key=bool(keys))

    progress = startup.console_progress()

    def load(report: Progress) -> ServedModel:
        loaded = load_model(
            arguments.model,
            config,
            arguments.revision,
            startup.both(report, progress),
            generation_config=arguments.generation_config,
            override_generation_config=arguments.override_generation_config,
            **({} if group is None else {"group": group}),
        )
        model = with_chat_template(loaded, template)
        return with_formats(model, settings.tool_call_parser, settings.reasoning_parser)

    def run() -> int:
        timeout = arguments.shutdown_timeout
        return run_server(settings, load, sock, shutdown_timeout=timeout, on_ready=on_ready, group=group)

    return run() if group is None else lead(group, run)


def _check_serve(arguments: argparse.Namespace) -> None:
    """
    Raises:
        ConfigError: an option of the server that cannot work.
    """
    if not 0 <= arguments.port < 65536:
        raise ConfigError(f"--port must be between 0 and 65535, got {arguments.port}")
    if not arguments.metrics_prefix.isidentifier():
        raise ConfigError(f"--metrics-prefix must be a plain name, got {arguments.metrics_prefix!r}")
    if arguments.max_num_queued_requests < 1:
        # Every request waits for its first step, if only for a moment: 0 would refuse all.
        raise ConfigError(f"--max-num-queued-requests must be at least 1, got {arguments.max_num_queued_requests}")
    check_limits(arguments)
    if arguments.root_path and not re.fullmatch(r"(/[\w.~-]+)+/?", arguments.root_path, re.ASCII):
        raise ConfigError(f"--root-path must be a path such as /api, got {shown(arguments.root_path)}")


def resolve_serve(argv: Sequence[str]) -> Resolved:
    """The options of a command line of `jaxspec serve`, with those of the environment and of --config."""
    parser, commands = parsers(["serve"])
    return resolve(commands["serve"], parse(parser, commands, ["serve", *argv]), os.environ)


def api_keys(arguments: argparse.Namespace) -> tuple[str, ...]:
    """The keys that the flags, the environment and the key file give.

    Raises:
        ConfigError: a key is empty, or the file cannot be read or has none.
    """
    keys = [*arguments.api_key]
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


def _models(_arguments: argparse.Namespace) -> int:
    from jaxspec.loading.supported import listing

    print(listing())
    return 0


def _chat(arguments: argparse.Namespace) -> int:
    from serve.terminal.command import run

    return run(arguments)


def _convert(arguments: argparse.Namespace) -> int:
    # Orbax starts jax's backend, which on a GPU would reserve most of its memory for nothing.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from convert.convert import convert_checkpoint
    from convert.progress import console
    from jaxspec.loading.draft import is_draft

    out = convert_checkpoint(
        arguments.source,
        arguments.out,
        revision=arguments.revision,
        quantization=arguments.quantization,
        progress=console(),
    )
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
