"""What the page draws with: places of a graph's clients, computed once per graph, and colours; both as in reports."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from dfca.report.drawing import palette
from dfca.watch.trials import MOST_CLUSTERS

MOST_NODES = 2000  # beyond, a graph is drawn as a circle without asking springs (8 s for 2,000)
MOST_DRAWN_NODES = 10_000
MOST_EDGES = 12_000  # beyond, only every n-th edge is drawn: a page of 28,000 lines is one dark disc


def drawn(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Return a graph as the page draws it: positions in -1..1, as thousandths, and edges as one flat list."""
    nodes = min(max(graph["nodes"], 0), MOST_DRAWN_NODES)
    edges = tuple(
        (edge[0], edge[1])
        for edge in graph["edges"]
        if isinstance(edge, Sequence) and len(edge) == 2 and all(type(i) is int and 0 <= i < nodes for i in edge)
    )
    step = -(-len(edges) // MOST_EDGES) or 1
    return {
        "nodes": nodes,
        "positions": _positions(nodes, edges, int(graph["seed"]), graph["topology"]),
        "edges": [i for edge in edges[::step] for i in edge],
        "all_edges": len(edges),
        "clusters": graph["clusters"],
        "names": graph.get("names"),
        "problem": "" if nodes == graph["nodes"] else f"only the first {nodes:,} clients are drawn",
    }


@lru_cache(maxsize=64)
def _positions(nodes: int, edges: tuple[tuple[int, int], ...], seed: int, topology: str) -> list[int]:
    """Place the clients: [x0, y0, x1, ...] in thousandths."""
    if nodes == 0:
        return []
    import networkx as nx  # late, with all below: a page shows its numbers before a graph is laid out

    from dfca.topology import layout

    graph = nx.empty_graph(nodes)
    graph.add_edges_from(edges)
    places = layout(graph, seed, topology if nodes <= MOST_NODES else "ring")
    return [round(1000 * value) for value in places.ravel().tolist()]


def colours_of(algorithms: Iterable[str]) -> dict[str, Any]:
    """Return the colour and the dashes of every algorithm, and the colours of the clusters.

    The registry knows whom an algorithm talks to, but loads torch: until `load_registry` was called, lines are solid.
    """
    known = "dfca.report.rows" in sys.modules
    return {
        "algorithms": {
            name: {"colour": colour, "dash": _dash(name) if known else ""}
            for name, colour in palette.algorithm_colours(algorithms).items()
        },
        "clusters": [palette.cluster_colour(cluster) for cluster in range(MOST_CLUSTERS)],
        "complete": known,
    }


def load_registry() -> None:
    """Load what lines and graphs need; it takes seconds on a busy machine."""
    import dfca.report.rows
    import dfca.topology  # noqa: F401


def _dash(name: str) -> str:
    """Return the dashes of a line as SVG writes them, by the rule of `report.drawing.plots.styles`."""
    from dfca.report.rows import kind_of

    kind = kind_of(name)
    if kind.informed:
        return "7 3 2 3"
    return {"nobody": "2 3", "server": "6 4"}.get(kind.via, "")
