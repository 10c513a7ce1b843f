"""Keeps steps that were compiled for a GPU from one start to the next: compiling is most of a start."""

import os
from pathlib import Path

from jaxspec.errors import ConfigError

OFF = "off"
# Smaller executables compile as fast as they load.
_MIN_COMPILE_SECONDS = 0.3


def enable(folder: str | None) -> None:
    """Makes jax keep compiled executables in a folder that belongs to this user alone.

    Args:
        folder: None for `xla` in $JAXSPEC_CACHE or ~/.cache/jaxspec; "off" for no cache.

    Raises:
        ConfigError: others have access to it. What is loaded from a cache is executed.
    """
    if folder == OFF:
        return
    import jax

    home = os.environ.get("JAXSPEC_CACHE") or Path.home() / ".cache" / "jaxspec"
    path = Path(folder).expanduser() if folder else Path(home).expanduser() / "xla"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"the compilation cache {path} must be yours alone (chmod 700), because its files are executed; or set "
            f"compilation_cache_dir to another folder or to {OFF!r}"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
