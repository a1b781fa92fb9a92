"""Prometheus metrics of a node on a separate port, computed from its status at every scrape."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from dfca.base.errors import ConfigError

FRESH_S = 0.5
HOST = "127.0.0.1"
MOST_CONNECTIONS = 16  # one more ends the oldest: a scrape takes milliseconds, so the oldest is not one
PATIENCE_S = 10.0
STATES = ("up", "down", "dead")
GAUGES = (  # name, help, key of the status
    ("round", "The round that the node trains or will train next.", "round"),
    ("clusters", "How many models it keeps.", "clusters"),
    ("assignment", "The cluster that it trained last.", "cluster"),
    ("loss", "Of the chosen model on its samples, before training.", "loss"),
    ("accuracy", "Of its cluster's model on held-out samples, 0 to 1.", "accuracy"),
    ("rmse", "Of its cluster's model on held-out samples, of a regression or forecast.", "rmse"),
    ("f1", "Of its cluster's model on held-out samples, of several labels, 0 to 1.", "f1"),
    ("epsilon", "Of the updates that it has sent, with privacy.", "epsilon"),
    ("staleness_updates", "Mean age of the last folded models.", "staleness"),
    ("round_seconds", "How long its last training took.", "round_s"),
    ("since_round_seconds", "Time since it ended a round.", "since_round_s"),
    ("rest_seconds", "How long it rests between two rounds, as nothing is learned.", "rest_s"),
    ("members", "Members of the swarm.", "members"),
    ("problems", "Problems that last: disk, data, certificate.", "problems"),
    ("incarnation", "How often it has been started, less one.", "incarnation"),
)


def serve_metrics(port: int, status: Callable[[], Mapping[str, Any]]) -> Callable[[], None]:
    """Serve metrics in threads; returns a function that ends it. status: called in one of them.

    Raises ConfigError if the port cannot be used.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    try:
        server = make_server(HOST, port, make_wsgi_app(registry), _Server, handler_class=_QuietHandler)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} for metrics is in use on {HOST}; set another log.metrics_port in node.toml, or end the "
                "program that has it"
            ) from None
        raise ConfigError(f"cannot listen on {HOST} port {port} for metrics: {error.strerror}") from None
    thread = threading.Thread(target=server.serve_forever, name="metrics", daemon=True)
    thread.start()

    def close() -> None:
        server.shutdown()
        server.server_close()
        thread.join(1.0)

    return close


class _Collector:
    """Turns a status into metrics; asks for it at most every FRESH_S."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status
        self._lock = threading.Lock()
        self._last: Mapping[str, Any] = {}
        self._until = 0.0

    def collect(self) -> Iterator[Any]:
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._status()
                self._until = time.monotonic() + FRESH_S
            return metrics_of(self._last)


def metrics_of(status: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the metrics of a status; unknown values are left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("dfca_node", "Who this node is.")
    info.add_metric([], {key: str(status.get(key, "")) for key in ("name", "id", "swarm", "version")})
    yield info
    for name, help, key in GAUGES:
        value = len(status.get(key) or ()) if key == "problems" else status.get(key)
        if value is not None:
            yield GaugeMetricFamily(f"dfca_{name}", help, value=value)
    neighbours = status.get("neighbours") or ()
    refused, left_out = (sorted((status.get(key) or {}).items()) for key in ("refused", "left_out"))
    states = [str(neighbour.get("state")) for neighbour in neighbours]
    received, sent = ([(link["name"], link.get(key) or 0) for link in neighbours] for key in ("bytes_in", "bytes_out"))
    trips = [(link["name"], link["rtt_s"]) for link in neighbours if link.get("rtt_s") is not None]
    by_state = [(state, states.count(state)) for state in dict.fromkeys((*STATES, *states))]
    for kind, name, help, label, values in (
        (CounterMetricFamily, "bytes_in", "Bytes received from a neighbour.", "neighbour", received),
        (CounterMetricFamily, "bytes_out", "Bytes sent to a neighbour.", "neighbour", sent),
        (CounterMetricFamily, "refused", "What was refused, by reason.", "reason", refused),
        (CounterMetricFamily, "left_out", "Models that would have ruined this node's.", "neighbour", left_out),
        (GaugeMetricFamily, "neighbours", "Neighbours by the state of their link.", "state", by_state),
        (GaugeMetricFamily, "round_trip_seconds", "To a neighbour and back.", "neighbour", trips),
    ):
        family = kind(f"dfca_{name}", help, labels=[label])
        for key, value in values:
            family.add_metric([key], value)
        yield family
    saves = status.get("saves") or {}
    for name, help, value in (
        ("folds", "Models folded.", status.get("folds")),
        ("returns", "Times that it went back to its last good models.", status.get("returns")),
        ("drops", "Models that came too late or were of no use.", status.get("drops")),
        ("saves_count", "Saves.", saves.get("count")),
        ("saves_bytes", "Bytes saved.", saves.get("bytes")),
        ("saves_seconds", "Time that saves took.", saves.get("seconds")),
    ):
        yield CounterMetricFamily(f"dfca_{name}", help, value=value or 0)


class _QuietHandler(WSGIRequestHandler):
    timeout = PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingMixIn, WSGIServer):
    """Survives a flood of connections: few at once, each for a short time."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, *args: Any) -> None:
        self._open: dict[Any, None] = {}
        self._lock = threading.Lock()
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open[request] = None
            oldest = next(iter(self._open)) if len(self._open) > MOST_CONNECTIONS else None
            if oldest is not None:
                del self._open[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread reads the end, and closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: the client is gone, too slow, or sent no HTTP."""
