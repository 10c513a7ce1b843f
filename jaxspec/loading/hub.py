"""Fetches a model from the Hugging Face hub: weights and data files only, at one commit."""

from pathlib import Path

from jaxspec.errors import ModelFormatError
from jaxspec.loading.hf_folder import CONFIG, GENERATION_CONFIG, INDEX
from jaxspec.loading.tokenizer_files import TOKENIZER_FILES

# Nothing here can run: no Python, no pickles. Sub-folders hold other formats of the same weights.
ALLOWED = ("*.safetensors", INDEX, CONFIG, GENERATION_CONFIG, *TOKENIZER_FILES)


def download(model: str, revision: str | None) -> Path:
    """The snapshot folder of hub id `model` in the Hugging Face cache; its name is the commit that `revision` means.

    Raises:
        ModelFormatError: no such model or revision, no permission, or no network and no cached copy.
    """
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        snapshot = huggingface_hub.snapshot_download(
            model, revision=revision, allow_patterns=list(ALLOWED), ignore_patterns=["*/*"]
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as e:
        reason = str(e).strip().split("\n")[0]
        raise ModelFormatError(f"{model} is not a folder, and fetching it from the hub failed: {reason}") from e
    return Path(snapshot)
