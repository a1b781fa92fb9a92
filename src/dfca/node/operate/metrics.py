"""Prometheus metrics of a node on a separate port, computed from its status at every scrape."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dfca.base.errors import ConfigError
from dfca.node.operate.http import serve

FRESH_S = 0.5
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


def serve_metrics(port: int, status: Callable[[], Mapping[str, Any]], host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve metrics in a thread; returns a function that ends it. status: called in that thread.

    Raises ConfigError if the port cannot be used.
    """
    from prometheus_client import CollectorRegistry, make_wsgi_app

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(status))
    try:
        return serve(port, host, make_wsgi_app(registry))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"port {port} for metrics is in use on {host}; set another log.metrics_port in node.toml, or end the "
                "program that has it"
            ) from None
        raise ConfigError(f"cannot listen on {host} port {port} for metrics: {error.strerror}") from None


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
    for way, what in (("in", "received from"), ("out", "sent to")):
        family = CounterMetricFamily(f"dfca_bytes_{way}", f"Bytes {what} a neighbour.", labels=["neighbour"])
        for neighbour in neighbours:
            family.add_metric([neighbour["name"]], neighbour.get(f"bytes_{way}") or 0)
        yield family
    refused = CounterMetricFamily("dfca_refused", "What was refused, by reason.", labels=["reason"])
    for reason, count in sorted((status.get("refused") or {}).items()):
        refused.add_metric([reason], count)
    yield refused
    left_out = CounterMetricFamily("dfca_left_out", "Models that would have ruined this node's.", labels=["neighbour"])
    for name, count in sorted((status.get("left_out") or {}).items()):
        left_out.add_metric([name], count)
    yield left_out
    for name, help in (
        ("folds", "Models folded."),
        ("returns", "Times that it went back to its last good models."),
        ("drops", "Models that came too late or were of no use."),
    ):
        yield CounterMetricFamily(f"dfca_{name}", help, value=status.get(name) or 0)
    states = GaugeMetricFamily("dfca_neighbours", "Neighbours by the state of their link.", labels=["state"])
    seen = [str(neighbour.get("state")) for neighbour in neighbours]
    for state in dict.fromkeys((*STATES, *seen)):
        states.add_metric([state], seen.count(state))
    yield states
    round_trip = GaugeMetricFamily("dfca_round_trip_seconds", "To a neighbour and back.", labels=["neighbour"])
    for neighbour in neighbours:
        if neighbour.get("rtt_s") is not None:
            round_trip.add_metric([neighbour["name"]], neighbour["rtt_s"])
    yield round_trip
    saves = status.get("saves") or {}
    for name, help in (("count", "Saves."), ("bytes", "Bytes saved."), ("seconds", "Time that saves took.")):
        yield CounterMetricFamily(f"dfca_saves_{name}", help, value=saves.get(name) or 0)
