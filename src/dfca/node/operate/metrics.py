"""Prometheus metrics of a node, on a port of their own: computed from its status when somebody asks."""

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


def serve_metrics(port: int, status: Callable[[], Mapping[str, Any]], host: str = "127.0.0.1") -> Callable[[], None]:
    """Serve metrics in a thread; returns what ends it. status: called in that thread.

    Raises ConfigError where the port is taken.
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
    """Turns a status into metrics; asks for it at most every FRESH_S, however many ask here."""

    def __init__(self, status: Callable[[], Mapping[str, Any]]) -> None:
        self._status = status
        self._lock = threading.Lock()
        self._last: Mapping[str, Any] = {}
        self._until = 0.0

    def collect(self) -> Iterator[Any]:
        """Yield the metrics of this moment."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._last = self._status()
                self._until = time.monotonic() + FRESH_S
            return metrics_of(self._last)


def metrics_of(status: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the metrics of a status; what is not known yet is left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    def gauge(name: str, help: str, value: float | None) -> Iterator[Any]:
        if value is not None:
            yield GaugeMetricFamily(f"dfca_{name}", help, value=value)

    info = InfoMetricFamily("dfca_node", "Who this node is.")
    info.add_metric([], {key: str(status.get(key, "")) for key in ("name", "id", "swarm", "version")})
    yield info
    yield from gauge("round", "The round that the node trains or will train next.", status.get("round"))
    yield from gauge("clusters", "How many models it keeps.", status.get("clusters"))
    yield from gauge("assignment", "The cluster that it trained last.", status.get("cluster"))
    yield from gauge("loss", "Of the chosen model on its samples, before training.", status.get("loss"))
    yield from gauge("accuracy", "Of its cluster's model on held-out samples, 0 to 1.", status.get("accuracy"))
    yield from gauge("rmse", "Of its cluster's model on held-out samples, of a regression.", status.get("rmse"))
    yield from gauge("staleness_updates", "Mean age of the last folded models.", status.get("staleness"))
    yield from gauge("round_seconds", "How long its last training took.", status.get("round_s"))
    yield from gauge("since_round_seconds", "Time since it ended a round.", status.get("since_round_s"))
    yield from gauge("members", "Members of the swarm.", status.get("members"))
    yield from gauge("problems", "Problems that last: disk, data, certificate.", len(status.get("problems") or ()))
    yield from gauge("incarnation", "How often it has been started, less one.", status.get("incarnation"))
    for way in ("in", "out"):
        what = "received from" if way == "in" else "sent to"
        family = CounterMetricFamily(f"dfca_bytes_{way}", f"Bytes {what} a neighbour.", labels=["neighbour"])
        for each in status.get("neighbours") or ():
            family.add_metric([each["name"]], each.get(f"bytes_{way}") or 0)
        yield family
    refused = CounterMetricFamily("dfca_refused", "What was refused, by reason.", labels=["reason"])
    for reason, count in sorted((status.get("refused") or {}).items()):
        refused.add_metric([reason], count)
    yield refused
    for name, help in (("folds", "Models folded."), ("drops", "Models that came too late or were of no use.")):
        yield CounterMetricFamily(f"dfca_{name}", help, value=status.get(name) or 0)
    states = GaugeMetricFamily("dfca_neighbours", "Neighbours by the state of their link.", labels=["state"])
    found = [str(each.get("state")) for each in status.get("neighbours") or ()]
    for state in dict.fromkeys((*STATES, *found)):
        states.add_metric([state], found.count(state))
    yield states
    round_trip = GaugeMetricFamily("dfca_round_trip_seconds", "To a neighbour and back.", labels=["neighbour"])
    for each in status.get("neighbours") or ():
        if each.get("rtt_s") is not None:
            round_trip.add_metric([each["name"]], each["rtt_s"])
    yield round_trip
    saves = status.get("saves") or {}
    for name, help in (("count", "Saves."), ("bytes", "Bytes saved."), ("seconds", "Time that saves took.")):
        yield CounterMetricFamily(f"dfca_saves_{name}", help, value=saves.get(name) or 0)
