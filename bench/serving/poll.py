"""Asking a server for /health again and again, in a process of its own: it imports nothing that takes long."""

import http.client
import time
from contextlib import closing
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event

TIMEOUT = 120.0
_PAUSE = 0.01


def poll_health(address: tuple[str, int], done: Event, results: Connection) -> None:
    """Sends a word once it has begun, and when `done` is set how many seconds each answer took.

    Sends nothing more where the server is not healthy.
    """
    seconds: list[float] = []
    with closing(http.client.HTTPConnection(*address, timeout=TIMEOUT)) as connection:
        while not done.is_set() or not seconds:
            start = time.monotonic()
            connection.request("GET", "/health")
            response = connection.getresponse()
            response.read()
            if response.status != 200:
                return
            if not seconds:
                results.send("begun")
            seconds.append(time.monotonic() - start)
            time.sleep(_PAUSE)
    results.send(seconds[1:] or seconds)  # the first one connects
