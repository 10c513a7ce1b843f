"""Which of a process's threads give way to others."""

import os
import sys
import threading

# As `nice` counts, of threads that compile while steps run.
_LOW = 10


def give_way() -> None:
    """The calling thread runs when others do not need the core; on Linux priorities are of threads."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOW)
