"""Steps compiled for a GPU, kept from one start to the next: compiling is most of what a start takes."""

import os
from pathlib import Path

from jaxspec.errors import ConfigError

OFF = "off"
# Small executables compile as fast as they load.
_MIN_COMPILE_SECONDS = 0.3


def enable(folder: str | None) -> None:
    """Makes jax keep compiled executables in a folder of this user.

    Args:
        folder: None for `xla` in $JAXSPEC_CACHE or ~/.cache/jaxspec; "off" for no cache.

    Raises:
        ConfigError: others may write there. What is loaded from a cache is run.
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
            f"the compilation cache {path} must be yours alone (chmod 700), because what it holds is run; or name another "
            f"compilation_cache_dir, or {OFF!r}"
        )
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_COMPILE_SECONDS)
