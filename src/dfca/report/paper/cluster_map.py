"""The graph of one seed with the true groups, and the clusters that each algorithm found on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import networkx as nx
import numpy as np
import torch
from scipy.optimize import linear_sum_assignment

from dfca import topology
from dfca.metrics import confusion
from dfca.report.rows import kind_of, models_of
from dfca.runs.store.reading import Run
from dfca.runs.store.rows import GraphNumbers, TrialRow


class Colouring(NamedTuple):
    """One way to colour the clients: a title, what came out, clusters (N,), and which clients are wrong (N,)."""

    title: str
    outcome: str
    clusters: list[int]
    wrong: list[bool] | None = None


class ClusterMap(NamedTuple):
    """The graph of one seed, where its clients are drawn (N, 2), and a colouring for the truth and each algorithm."""

    seed: int
    facts: GraphNumbers
    edges: list[list[int]]
    true: list[int] | None
    positions: np.ndarray
    colourings: list[Colouring]

    @property
    def found(self) -> list[Colouring]:
        """Return what the algorithms found, without the truth."""
        return self.colourings[1:] if self.true else self.colourings


def map_clusters(run: Run) -> ClusterMap | None:
    """Pair what each algorithm found on the first seed's graph with the true groups, or with the first algorithm's."""
    seed = next((seed for seed in [*map(str, run.seeds), *run.topology] if seed in run.topology), None)
    if seed is None:
        return None
    entry = run.topology[seed]
    true = entry.get("clusters") or None
    colourings = [Colouring("true groups", "unknown to the clients", true)] if true else []
    for name in run.algorithms:
        clusters = last_assignments(run, name, int(seed))
        trial = next((trial for trial in run.trials if trial.algorithm == name and trial.seed == int(seed)), None)
        if clusters is None or trial is None or models_of(trial) < 2 or kind_of(name).informed:
            continue
        # Without true clusters, the first algorithm gives the colours.
        renamed = match_clusters(clusters, colourings[0].clusters).tolist() if colourings else clusters
        wrong = [a != b for a, b in zip(renamed, true, strict=True)] if true else None
        colourings.append(Colouring(name, _outcome(trial, wrong), renamed, wrong))
    if not colourings:
        return None
    graph = nx.empty_graph(entry["facts"]["nodes"])
    graph.add_edges_from(entry["edges"])
    positions = topology.layout(graph, int(seed), (run.config.get("topology") or {}).get("name", ""))
    return ClusterMap(int(seed), entry["facts"], entry["edges"], true, positions, colourings)


def match_clusters(found: Sequence[int], true: Sequence[int]) -> np.ndarray:
    """Rename found clusters to the true ones they fit best, (N,): the pairing with the most clients in agreement.

    A found cluster that is left over, when there are more of them than true ones, becomes -1.
    """
    assignments, truth = torch.tensor(list(found)), torch.tensor(list(true))
    counts = confusion(assignments, truth).numpy()
    renamed: np.ndarray = np.full(len(counts), -1)
    rows, columns = linear_sum_assignment(counts, maximize=True)
    renamed[rows] = columns
    return np.asarray(renamed[assignments.numpy()])


def last_assignments(run: Run, algorithm: str, seed: int) -> list[int] | None:
    """Return the clusters in which a run's clients were when it was last evaluated, (N,)."""
    lines = (line for line in reversed(run.metrics) if line.algorithm == algorithm and line.seed == seed)
    return next((line.assignments for line in lines if line.assignments), None)


def confusions(run: Run, clusters: ClusterMap) -> dict[str, np.ndarray]:
    """Count by algorithm the clients of each found (row) and true (column) cluster.

    Row j is the found cluster that fits true cluster j best, empty where none does, so that a full diagonal is
    agreement; clusters that are left over come last.
    """
    counts = {}
    for name, _, matched, _ in clusters.found if clusters.true else ():
        assignments = torch.tensor(last_assignments(run, name, clusters.seed))
        matrix = confusion(assignments, torch.tensor(clusters.true)).numpy()
        fits = dict(zip(assignments.tolist(), matched, strict=True))
        ordered = np.zeros_like(matrix, shape=(matrix.shape[1], matrix.shape[1]))
        for cluster, true in fits.items():
            if true >= 0:
                ordered[true] = matrix[cluster]
        left_over = sorted(cluster for cluster, true in fits.items() if true < 0)
        counts[name] = np.concatenate([ordered, matrix[left_over]])
    return counts


def _outcome(trial: TrialRow, wrong: Sequence[bool] | None) -> str:
    """Write what came out: "23 of 24 right, 1 cluster lost"."""
    parts = [f"{len(wrong) - sum(wrong):,} of {len(wrong):,} right"] if wrong is not None else []
    lost = (trial.clusters or 0) - (trial.live_clusters or 0)
    if lost > 0:
        parts.append(f"{lost} cluster{'' if lost == 1 else 's'} lost")
    if not trial.finished:
        parts.append(f"at round {trial.rounds}")
    return ", ".join(parts)
