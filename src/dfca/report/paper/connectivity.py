"""Where the graphs of the clusters fall apart: facts of the graphs against the key that makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from dfca.report.tables import TableCell, TextTable


class Fact(NamedTuple):
    """A share of a graph, 0..1, with a short name for figures and words for tables.

    Shares are of graphs (in one piece), of clusters (whose induced graph is), of clients (in the largest part of their
    cluster; with nobody of their cluster beside them), and of pairs of a client and a model that nobody beside it
    trains.
    """

    name: str
    title: str
    share: Callable[[Mapping[str, Any]], float]


FACTS = (
    Fact("whole", "graphs in\none piece %", lambda graph: float(graph["components"] == 1)),
    Fact(
        "connected",
        "clusters connected\namong themselves %",
        lambda graph: graph["connected_clusters"] / graph["clusters"],
    ),
    Fact(
        "together",
        "in the largest\npart of theirs %",
        lambda graph: graph["largest_part"] / graph["nodes"],
    ),
    Fact("alone", "without one of\ntheirs beside %", lambda graph: graph["alone"] / graph["nodes"]),
    Fact(
        "no trainer",
        "without a\ntrainer beside %",
        lambda graph: graph["pairs_without_trainer"] / graph["pairs"],
    ),
)


def graph_key(summary: Mapping[str, Any]) -> str | None:
    """Return the one key that varies in a sweep if it makes the graphs (topology.p), else None."""
    keys = {key for point in summary.get("points", ()) for key in point["point"]}
    return next(iter(keys)) if len(keys) == 1 and next(iter(keys)).startswith("topology.") else None


def shares(summary: Mapping[str, Any], fact: Fact) -> dict[Any, float]:
    """Return the mean over seeds of a fact at each value of the key; only where the true clusters are known."""
    key, found = graph_key(summary), {}
    for point in summary.get("points", ()) if key else ():
        graphs = _graphs_of(summary, point["digest"])
        if graphs:
            found[point["point"][key]] = fmean(fact.share(graph) for graph in graphs)
    return found


def connectivity_tables(summary: Mapping[str, Any]) -> list[TextTable]:
    """Make the table of a sweep over graphs: what each does to the clusters; none for other experiments."""
    key = graph_key(summary)
    by_fact = [shares(summary, fact) for fact in FACTS]
    if key is None or not by_fact[0]:
        return []
    body = [
        [TableCell(f"{value:g}"), *(TableCell(f"{100 * fact[value]:.0f}") for fact in by_fact)] for value in by_fact[0]
    ]
    columns = [key, *(fact.title for fact in FACTS)]
    title = "what the graphs do to clusters, their clients, and pairs of a client and a model (means over seeds)"
    return [TextTable(title, columns, [True, *[False] * len(FACTS)], body)]


def _graphs_of(summary: Mapping[str, Any], digest: str) -> list[Mapping[str, Any]]:
    return [g for g in summary.get("graphs", ()) if g.get("digest") == digest and "connected_clusters" in g]
