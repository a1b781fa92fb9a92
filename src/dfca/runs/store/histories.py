"""What figures need of a run beyond its summary, small enough to keep: curves by round, and facts of the graphs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import networkx as nx

from dfca.runs.store.metric import metric_key

CURVES = (
    "accuracy",
    "all_models_accuracy",
    "cluster_accuracy",
    "F_global",
    "F_before_assignment",
    "disagreement",
    "mixing_drift",
)
DIGITS = 6


def histories(metrics: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Turn the lines of metrics.jsonl into one record per trial: its rounds, and a list by round of each measure.

    A measure with a value per cluster is stored as its mean over clusters.
    """
    trials: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for line in metrics:
        trials.setdefault((line.get("digest"), line["algorithm"], line["seed"]), []).append(line)
    made = []
    for (digest, algorithm, seed), lines in trials.items():
        record: dict[str, Any] = {"algorithm": algorithm, "seed": seed} | ({"digest": digest} if digest else {})
        record["round"] = [line["round"] for line in lines]
        key = metric_key(lines[0])
        own = () if key == "accuracy" else (key, f"all_models_{key}")
        for measure in (*own, *CURVES):
            values = [_short(mean_of(line.get(measure))) for line in lines]
            if any(value is not None for value in values):
                record[measure] = values
        made.append(record)
    return made


def graphs(topology: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the facts of each point's and seed's graph, and how the true clusters lie on it (`cluster_facts`)."""
    made = []
    for name, entry in topology.items():
        facts = {key: value for key, value in entry["facts"].items() if value is not None}
        where = {"digest": entry["digest"]} if "digest" in entry else {}
        record = {"seed": int(name.rpartition("/")[2]), **where, **facts}
        if entry.get("clusters"):
            record |= cluster_facts(entry["facts"]["nodes"], entry["edges"], entry["clusters"])
        made.append(record)
    return made


def cluster_facts(nodes: int, edges: Iterable[Iterable[int]], clusters: list[int]) -> dict[str, int]:
    """Measure the subgraphs that the clients of one true cluster induce: over them alone a model can travel.

    clusters: how many there are; connected_clusters: whose induced graph is in one piece; alone: clients without a
    neighbour of their own cluster, which train by themselves; largest_part: clients in the largest piece of their
    cluster, summed over clusters.

    >>> cluster_facts(4, [(0, 1), (1, 2)], [0, 0, 1, 1])
    {'clusters': 2, 'connected_clusters': 1, 'alone': 2, 'largest_part': 3}
    """
    graph = nx.empty_graph(nodes)
    graph.add_edges_from((i, j) for i, j in edges if clusters[i] == clusters[j])
    parts: dict[int, list[int]] = {}
    for part in nx.connected_components(graph):
        parts.setdefault(clusters[next(iter(part))], []).append(len(part))
    return {
        "clusters": len(parts),
        "connected_clusters": sum(len(sizes) == 1 for sizes in parts.values()),
        "alone": sum(size == 1 for sizes in parts.values() for size in sizes),
        "largest_part": sum(max(sizes) for sizes in parts.values()),
    }


def mean_of(value: Any) -> float | None:
    """Return a measure as one number: of a list (one value per cluster) the mean of the known ones.

    >>> mean_of([1, None, 3]), mean_of(0.5), mean_of([None]), mean_of(None)
    (2.0, 0.5, None, None)
    """
    if isinstance(value, list):
        known = [float(each) for each in value if each is not None]
        return sum(known) / len(known) if known else None
    return None if value is None else float(value)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
