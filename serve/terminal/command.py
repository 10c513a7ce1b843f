"""The flags of `jaxspec chat`, and what it starts."""

import argparse
import dataclasses
import os
import sys
from typing import Any

from jaxspec.errors import UsageError
from serve.flags import Parser, add_engine_flags, engine_config
from serve.terminal.talkers import ModelTalker, ServerTalker, Talker

_SCHEMES = ("http://", "https://")


def add_arguments(parser: Parser) -> None:
    parser.add_argument(
        "target",
        metavar="URL|MODEL",
        nargs="?",
        default="demo",
        help="a running server, as http://127.0.0.1:8000, or a model to load: demo (the default), a converted folder, a "
        "Hugging Face folder or a hub id",
    )
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    parser.add_argument("--max-tokens", metavar="N", type=int, help="most tokens of an answer (default: no limit)")
    parser.add_argument("--temperature", metavar="X", type=float, help="0 is greedy (default: the model's own)")
    key = "key of the server at URL (default: $JAXSPEC_API_KEY)"
    parser.add_argument("--api-key", metavar="KEY", default=os.environ.get("JAXSPEC_API_KEY"), help=key)
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a hub id")
    add_engine_flags(parser)


def run(arguments: argparse.Namespace) -> int:
    """
    Raises:
        JaxspecError: there is no such server or model, or the flags make no sense.
    """
    from serve.terminal.conversation import Conversation
    from serve.terminal.screen import Screen

    screen = Screen(sys.stdin, sys.stdout)
    talker = _talker(arguments)
    screen.note(f"{talker.name}. /help shows what there is beside asking.")
    return Conversation(talker, screen, arguments.system).run()


def _talker(arguments: argparse.Namespace) -> Talker:
    config, given = engine_config(arguments)
    given_parameters = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
    parameters: dict[str, Any] = {name: value for name, value in given_parameters.items() if value is not None}
    if arguments.target.startswith(_SCHEMES):
        if given or arguments.revision:
            name = (*given, "revision")[0].replace("_", "-")
            raise UsageError(f"--{name} is for a model: the server at {arguments.target} has its own options")
        return ServerTalker(arguments.target, arguments.api_key, parameters)
    from jaxspec.llm import LLM

    if "max_num_seqs" not in given:
        config = dataclasses.replace(config, max_num_seqs=1)  # one person, and few buckets to compile
    llm = LLM(arguments.target, config, revision=arguments.revision)
    defaults = llm.get_default_sampling_params()
    return ModelTalker(llm, dataclasses.replace(defaults, **{"max_tokens": None} | parameters))
