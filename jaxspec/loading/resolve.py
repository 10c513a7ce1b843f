"""From the name of a model or draft to its folder."""

import re
from pathlib import Path

from jaxspec.errors import ModelFormatError
from jaxspec.loading import hub

DEMO = "demo"
# The embedded model and its EAGLE3 drafts: name -> folder in jaxspec/demo.
EMBEDDED = {DEMO: "target", f"{DEMO}/eagle3-llama": "eagle3-llama", f"{DEMO}/eagle3-mla": "eagle3-mla"}
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def resolve_model(model: str | Path, *, revision: str | None = None) -> Path:
    """The folder of one of `EMBEDDED`, a converted or Hugging Face folder as it is, or the download of a hub id.

    Args:
        revision: branch, tag or commit of a hub id.

    Raises:
        ModelFormatError: there is no such model.
    """
    name = str(model)
    folder = _embedded(name) if name in EMBEDDED else Path(name).expanduser()
    if folder.exists():
        if revision is not None:
            raise ModelFormatError(f"{name} is a local folder: a revision can only be chosen for a hub id")
        return folder
    if not _HUB_ID.fullmatch(name):
        raise ModelFormatError(
            f"{name} does not exist; a model is a folder, a Hugging Face id (organisation/name) or {DEMO!r}"
        )
    return hub.download(name, revision)


def _embedded(name: str) -> Path:
    import jaxspec.demo

    folder = Path(jaxspec.demo.__path__[0]) / EMBEDDED[name]
    if not folder.is_dir():
        raise ModelFormatError(f"the embedded model {name} is missing from this installation ({folder})")
    return folder
