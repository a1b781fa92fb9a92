"""Who found whom: the graph of one seed with the true groups, and the clusters that each algorithm found on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch

from dfca import topology
from dfca.metrics import confusion
from dfca.report import tables
from dfca.runs.reading import Run


class Scene(NamedTuple):
    """The graph of one seed with the clusters that each algorithm found in the end: titles, outcomes, colourings."""

    seed: str
    entry: dict[str, Any]
    positions: np.ndarray
    said: list[tuple[str, str]]
    colourings: list[tuple[list[int], list[bool] | None]]


def scene_of(run: Run) -> Scene | None:
    """Pair what each algorithm found on the first seed's graph with the true groups, or with the first algorithm's."""
    seed = next((seed for seed in [*map(str, run.seeds), *run.topology] if seed in run.topology), None)
    if seed is None:
        return None
    entry = run.topology[seed]
    true, n = entry.get("clusters"), entry["facts"]["nodes"]
    graph = nx.empty_graph(n)
    graph.add_edges_from(entry["edges"])
    positions = topology.layout(graph, int(seed), (run.config.get("topology") or {}).get("name", ""))
    said: list[tuple[str, str]] = [("true groups", "what nobody is told")] if true else []
    colourings: list[tuple[list[int], list[bool] | None]] = [(true, None)] if true else []
    for name in run.algorithms:
        found = last_assignments(run, name, int(seed))
        row = next((row for row in run.summary["runs"] if row["algorithm"] == name and row["seed"] == int(seed)), None)
        if found is None or row is None or tables.models_of(row) < 2 or tables.kind_of(name).informed:
            continue
        # Where nobody knows the truth, the first algorithm gives the colours.
        renamed = match_clusters(found, colourings[0][0]).tolist() if colourings else found
        wrong = [a != b for a, b in zip(renamed, true, strict=True)] if true else None
        colourings.append((renamed, wrong))
        said.append((name, _outcome(row, wrong)))
    return Scene(seed, entry, positions, said, colourings) if said else None


def match_clusters(found: Sequence[int], true: Sequence[int]) -> np.ndarray:
    """Rename found clusters to the true ones they fit best, (N,): the pairing with the most clients in agreement.

    A found cluster that is left over, when there are more of them than true ones, becomes -1.
    """
    from scipy.optimize import linear_sum_assignment

    assignments, truth = torch.tensor(list(found)), torch.tensor(list(true))
    counts = confusion(assignments, truth).numpy()
    renamed: np.ndarray = np.full(len(counts), -1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    renamed[rows] = columns
    return np.asarray(renamed[assignments.numpy()])


def last_assignments(run: Run, algorithm: str, seed: int) -> list[int] | None:
    """Give the clusters in which a run's clients were when it was last evaluated, (N,)."""
    lines = (line for line in reversed(run.metrics) if line["algorithm"] == algorithm and line["seed"] == seed)
    return next((line["assignments"] for line in lines if line.get("assignments")), None)


def _outcome(row: Mapping[str, Any], wrong: Sequence[bool] | None) -> str:
    """Say below a graph what came out: "23 of 24 right, 1 cluster lost"."""
    said = [f"{len(wrong) - sum(wrong):,} of {len(wrong):,} right"] if wrong is not None else []
    lost = (row["clusters"] or 0) - (row["live_clusters"] or 0)
    if lost > 0:
        said.append(f"{lost} cluster{'' if lost == 1 else 's'} lost")
    if not row["finished"]:
        said.append(f"at round {row['rounds']}")
    return ", ".join(said)
