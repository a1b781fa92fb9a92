"""Where the graphs of the clusters fall apart: facts of the graphs against the key that makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import fmean
from typing import Any, NamedTuple

from dfca.report.tables import TableCell, TextTable
from dfca.runs.store.reading import Run


class Fact(NamedTuple):
    """A share of a graph, 0..1, with a short name for figures and words for tables.

    Shares are of graphs (in one piece), of clusters (whose induced graph is), of clients (in the largest part of their
    cluster; with nobody of their cluster beside them), and of pairs of a client and a model that nobody beside it
    trains.
    """

    name: str
    title: str
    share: Callable[[Mapping[str, float]], float]


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


def graph_key(run: Run) -> str | None:
    """Return the one key that varies in a sweep if it makes the graphs (topology.p), else None."""
    keys = run.varying
    return keys[0] if len(keys) == 1 and keys[0].startswith("topology.") else None


def shares(run: Run, fact: Fact) -> dict[Any, float]:
    """Return the mean over seeds of a fact at each value of the key; only where the true clusters are known."""
    key, means = graph_key(run), {}
    if key is None:
        return {}
    for point in run.points:
        graphs = [graph.facts for graph in run.graphs if graph.digest == point.digest]
        known = [facts for facts in graphs if "connected_clusters" in facts]
        if known:
            means[point.at[key]] = fmean(map(fact.share, known))
    return means


def connectivity_tables(run: Run) -> list[TextTable]:
    """Make the table of a sweep over graphs: what each does to the clusters; none for other experiments."""
    key = graph_key(run)
    by_fact = [shares(run, fact) for fact in FACTS]
    if key is None or not by_fact[0]:
        return []
    body = [
        [TableCell(f"{value:g}"), *(TableCell(f"{100 * fact[value]:.0f}") for fact in by_fact)] for value in by_fact[0]
    ]
    columns = [key, *(fact.title for fact in FACTS)]
    title = "what the graphs do to clusters, their clients, and pairs of a client and a model (means over seeds)"
    return [TextTable(title, columns, [True, *[False] * len(FACTS)], body)]
