"""Timing in turns: what is compared takes turns, each turn has a warm-up, and medians count."""

import statistics
from collections.abc import Callable, Mapping

REPEATS = 5


def ms(seconds: float) -> float:
    """Milliseconds, rounded as records hold them."""
    return round(1e3 * seconds, 4)


def turn_seconds(gpu: bool) -> float:
    """Length of one measurement, and of the launches before it.

    Our measurements end with a wait for the device, which must not show. And full batches draw all the power there is:
    each kernel has to be timed at the clock that it causes itself.
    """
    return 0.1 if gpu else 0.01


def launches_for(time_once: Callable[[int], float], calls: int, seconds: float) -> int:
    """How many launches of `calls` calls take `seconds`, so that the wait for the last one does not show."""
    return min(max(round(seconds / (calls * time_once(2))), 2), 500)


def rounds(timers: Mapping[str, tuple[Callable[[int], float], int]], repeats: int = REPEATS) -> dict[str, float]:
    """The median time of a call of each, in seconds. They take turns, so that a change of the machine meets all of them.

    A turn begins with as many launches that are not counted. In 25 milliseconds without them, a call of 306 microseconds
    seemed to take 320 to 370, and its neighbours ran at the clock that its power had left them.

    Args:
        timers: by name, a function from a number of launches to the time of one call, and that number.
    """
    times: dict[str, list[float]] = {name: [] for name in timers}
    for _ in range(repeats):
        for name, (time_once, launches) in timers.items():
            time_once(launches)
            times[name].append(time_once(launches))
    return {name: statistics.median(each) for name, each in times.items()}
