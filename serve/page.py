"""GET /: the page. One file with its own style and script; the policy lets a browser run and load nothing else."""

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi.responses import HTMLResponse

_FILE = Path(__file__).with_name("page.html")


@functools.cache
def _page() -> tuple[str, str]:
    """The text, and its content security policy."""
    text = _FILE.read_text(encoding="utf-8")

    def digest(tag: str) -> str:
        (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
        return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"

    policy = (
        f"default-src 'none'; script-src {digest('script')}; style-src {digest('style')}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return text, policy


def page_response() -> HTMLResponse:
    text, policy = _page()
    headers = {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
