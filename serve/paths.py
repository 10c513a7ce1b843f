"""Paths as they are routed."""

from starlette.types import Scope

_ANTHROPIC = "/v1/messages"


def route_path(scope: Scope) -> str:
    """The path that is routed: without --root-path, where the proxy has left it."""
    path, root = scope["path"], scope.get("root_path", "")
    return path.removeprefix(root) if root and path.startswith(f"{root}/") else path


def is_anthropic(path: str) -> bool:
    """Whether clients of Anthropic's API ask there, who want errors in its form."""
    return path == _ANTHROPIC or path.startswith(f"{_ANTHROPIC}/")
