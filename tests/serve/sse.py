"""Reading streams whose events have names."""

import json
from typing import Any

import httpx


def named_events(base_url: str, path: str, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The data of all events, each checked for its framing and its name."""
    with httpx.stream("POST", base_url + path, json=body, timeout=120, headers=headers) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        text = response.read().decode("utf-8")
    assert text.endswith("\n\n")
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        if event.startswith(":"):
            continue
        name, data = event.split("\n")
        content = json.loads(data.removeprefix("data: "))
        assert name == f"event: {content['type']}"
        found.append(content)
    return found
