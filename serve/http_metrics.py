"""Prometheus metrics of HTTP requests, by the names and labels that vLLM's dashboards read; they have no prefix."""

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
# Methods and paths are labels: what clients make up must not become one.
_METHODS = frozenset(("GET", "HEAD", "POST", "OPTIONS"))
OTHER = "none"


class HttpMetrics:
    def __init__(self, registry: CollectorRegistry):
        self._requests = Counter(
            "http_requests", "HTTP requests, but for health checks and scrapes", ["handler", "method", "status"],
            registry=registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "http_request_duration_seconds", "Time to the end of an answer", ["handler", "method"],
            buckets=_SECONDS, registry=registry,
        )  # fmt: skip

    def record(self, method: str, route: str | None, status: int, seconds: float) -> None:
        """
        Args:
            route: the path as it is declared; None where there is no such path.
            status: 0 where the client left before the answer began.
        """
        method, handler = method if method in _METHODS else OTHER, route or OTHER
        self._requests.labels(handler, method, f"{status // 100}xx" if status else OTHER).inc()
        self._seconds.labels(handler, method).observe(seconds)
