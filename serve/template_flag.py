"""`--chat-template`: a file, or the template itself."""

from pathlib import Path

from jaxspec.errors import ConfigError, JaxspecError, shown

_INLINE = "{}\n"
_MAX_BYTES = 2**20


def read_template(value: str) -> str:
    """The Jinja text that the flag gives. As in vLLM, what has a brace or a line end in it and is no file is the text.

    Raises:
        ConfigError: there is no such file, or it holds no template.
    """
    from jaxspec.chat_template.template import ChatTemplate

    try:
        path = Path(value)
        if path.is_file():
            if path.stat().st_size > _MAX_BYTES:
                raise ConfigError(f"--chat-template {shown(value)} is over {_MAX_BYTES} bytes")
            source = path.read_text(encoding="utf-8")
        elif any(c in value for c in _INLINE):
            source = value
        else:
            raise ConfigError(f"--chat-template: there is no file {shown(value)}")
    except (OSError, ValueError) as e:
        if not any(c in value for c in _INLINE):
            raise ConfigError(f"cannot read --chat-template {shown(value)}: {e}") from e
        source = value  # too long for the name of a file
    if not source.strip():
        raise ConfigError("--chat-template is empty")
    try:
        ChatTemplate(source, {})
    except JaxspecError as e:
        raise ConfigError(f"--chat-template: {e}") from e
    return source
