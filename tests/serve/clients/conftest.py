"""What other projects' clients talk to: a model that calls a tool where it has no result yet, and then answers."""

from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict

from tests.serve.chats import CALL, chat_engine
from tests.serve.conftest import RunningServer, StartServer

# Of every module here: what these packages warn of is not ours to fix.
_WARNINGS = pytest.mark.filterwarnings("default")
MARKS = [pytest.mark.clients, _WARNINGS]
NEWER = [pytest.mark.newer_clients, _WARNINGS]
KEY = "key"
ANSWER = "It is sunny in Köln."
THOUGHT = "Rain?"


class Sky(BaseModel):
    """What structured answers have to be; the model itself would say something else."""

    model_config = ConfigDict(extra="forbid")

    color: Literal["blue", "grey"]
    windy: bool


def _says(prompt: str) -> str:
    """By what the prompt's last turn is."""
    if "<tool_response>" in prompt:
        return ANSWER
    if '"name": "get_weather"' in prompt:
        return f"<think>\n{THOUGHT}\n</think>\n\n{CALL}"
    return ANSWER


@pytest.fixture
def agent_server(start_server: StartServer) -> RunningServer:
    """`engine.prompts` has what it was asked."""
    engine, model = chat_engine(_says, max_model_len=16_384)
    server = start_server(model, api_keys=(KEY,))
    server.engine = engine
    return server
