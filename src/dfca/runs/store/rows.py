"""What a run folder, or a file of results, holds, as typed records: trials, points, graphs, curves.

Files are parsed here, once; nothing above reads their keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NotRequired, Self, TypedDict

import networkx as nx

from dfca.runs.store.metric import ShownMetric, metric_of
from dfca.sim.metrics_table import ALL_MODELS, EvaluationRow, JsonObject, PointValues, StoredRow

CURVES = (
    *("accuracy", "all_models_accuracy", "cluster_accuracy"),
    *("F_global", "F_before_assignment", "disagreement", "mixing_drift"),
)
DIGITS = 6


GraphNumbers = dict[str, float | None]
"""Facts of a graph, as `topology.describe` returns them."""


class GraphTable(TypedDict):
    """The graph of a point and seed, as topology.json holds it."""

    facts: GraphNumbers
    edges: list[list[int]]
    clusters: list[int] | None  # the true ones of the clients at the end, None where they are not known
    digest: NotRequired[str]  # of the point of a sweep


@dataclass(frozen=True, eq=False)
class TrialRow(StoredRow):
    """One algorithm with one seed, at one point of a sweep: a row of summary.json.

    What the file does not say is None. A trial that is not finished has the numbers of its last evaluated round.
    """

    metric: ShownMetric
    score: float | None  # of what clients deploy
    score_before_personal: float | None  # the same without the personal last step
    all_models_score: float | None
    cluster_accuracy: float | None
    live_clusters: int | None
    models: int | None  # that a client keeps
    clusters: int | None  # the true ones
    rounds: int | None
    seconds: float | None
    momentum: float | None
    diverged_clients: int | None
    train_loss: float | None
    bytes_sent: float | None  # by clients
    start_bytes: float | None  # by elections
    server_bytes_sent: float | None
    epsilon: float | None  # of [privacy]
    lines: int | None  # of metrics, in its file
    finished: bool
    error: str  # "" where it did not fail
    # In virtual time:
    time_s: float | None
    target: float | None
    time_to_target_s: float | None
    bytes_to_target: float | None
    idle_share: float | None
    compute_s: float | None
    staleness: Mapping[str, int]  # how many folds had which age
    staleness_mean: float | None
    client_rounds: Mapping[str, float]  # min, mean, max
    caught_up_s: Mapping[str, float | None]  # by late joiner

    @classmethod
    def of(cls, values: JsonObject) -> Self:
        """Parse a row of summary.json. Raises KeyError, TypeError or ValueError if it is not a row of a trial."""
        metric = metric_of(values)
        renamed = {
            "score": metric.key,
            "score_before_personal": f"{metric.key}_before_personal",
            "all_models_score": metric.all_models,
            "target": "target_accuracy" if "target_accuracy" in values else "target",
        }
        numbers: JsonObject = {name: number_of(values, renamed.get(name, name)) for name in NUMBERS}
        tables: JsonObject = {
            name: values.get(name) or {} for name in ("staleness", "client_rounds", "caught_up_s", "point")
        }
        return cls(
            stored=dict(values),
            algorithm=values["algorithm"],
            seed=int(values["seed"]),
            digest=values.get("digest") or "",
            metric=metric,
            lines=values["lines"] if isinstance(values.get("lines"), int) else None,
            finished=bool(values.get("finished")),
            error=str(values.get("error") or ""),
            **numbers,
            **tables,
        )

    def changed(self, **values: Any) -> Self:
        """Return the row with some of the file's keys set."""
        return type(self).of({**self.stored, **values})


NUMBERS = tuple(name for name, kind in TrialRow.__annotations__.items() if kind.endswith("| None") and name != "lines")


def number_of(values: JsonObject, key: str) -> Any:
    """Return a number of a row, None where it has none. Raises TypeError if it is something else."""
    value = values.get(key)
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{key} must be a number, got {value!r}")
    return value


def contradiction(row: TrialRow, line: StoredRow | JsonObject) -> str | None:
    """Return the key in which a row and the trial's last line of metrics differ, None where they agree."""
    keys = (row.metric.key, "cluster_accuracy")
    return next((key for key in keys if key in row and key in line and row[key] != line[key]), None)


@dataclass(frozen=True)
class PointRow:
    """One point of a sweep, or a run without one: what tables need of its config."""

    stored: JsonObject  # as summary.json holds it
    at: PointValues = field(default_factory=dict)
    label: str = ""
    digest: str = ""
    algorithms: tuple[str, ...] = ()
    seeds: tuple[int, ...] = ()
    clients: int | None = None
    clusters: int | None = None  # the true ones
    rounds: int | None = None
    auto: bool = False  # clients find k
    world: JsonObject | None = None  # None by rounds
    clock: JsonObject = field(default_factory=dict)

    @classmethod
    def of(cls, values: JsonObject) -> Self:
        """Parse a point of summary.json, or the head of the summary of a run without a sweep."""
        names = ("label", "digest", "clients", "clusters", "rounds", "auto", "world", "clock")
        known: JsonObject = {name: values[name] for name in names if name in values}
        known |= {name: tuple(values.get(name, ())) for name in ("algorithms", "seeds")}
        return cls(stored=values, at=values.get("point") or {}, **known)

    @property
    def point(self) -> PointValues:
        """The keys that vary, as trials call them."""
        return self.at


@dataclass(frozen=True)
class History:
    """The curves of one trial by round; a measure with a value per cluster is its mean over clusters."""

    algorithm: str
    seed: int
    digest: str
    rounds: Sequence[int]
    measures: Mapping[str, Sequence[float | None]]

    @classmethod
    def of(cls, values: JsonObject) -> Self:
        head = ("algorithm", "seed", "digest", "round")
        measures = {key: value for key, value in values.items() if key not in head}
        return cls(values["algorithm"], values["seed"], values.get("digest", ""), values["round"], measures)

    def curve(self, measure: str) -> list[float]:
        """Return a measure by round, NaN where it is not known; empty where it was not measured."""
        return [math.nan if value is None else value for value in self.measures.get(measure, ())]

    def stored(self) -> JsonObject:
        digest = {"digest": self.digest} if self.digest else {}
        return {"algorithm": self.algorithm, "seed": self.seed, **digest, "round": self.rounds, **self.measures}

    def evaluations(self) -> list[EvaluationRow]:
        """Return its rounds as far as a file of results knows them."""
        digest = {"digest": self.digest} if self.digest else {}
        head = {"algorithm": self.algorithm, "seed": self.seed, **digest}
        return [
            EvaluationRow.of({**head, "round": round, **{key: values[i] for key, values in self.measures.items()}})
            for i, round in enumerate(self.rounds)
        ]


@dataclass(frozen=True)
class GraphFacts:
    """Facts of the graph of one seed, and how the true clusters lie on it (`cluster_facts`) where they are known."""

    seed: int
    digest: str
    facts: Mapping[str, float]

    @classmethod
    def of(cls, values: JsonObject) -> Self:
        facts = {key: value for key, value in values.items() if key not in ("seed", "digest")}
        return cls(values["seed"], values.get("digest", ""), facts)

    def stored(self) -> JsonObject:
        return {"seed": self.seed, **({"digest": self.digest} if self.digest else {}), **self.facts}


def histories(evaluations: Iterable[EvaluationRow]) -> list[History]:
    """Gather the evaluated rounds of each trial."""
    trials: dict[tuple[str, str, int], list[EvaluationRow]] = {}
    for row in evaluations:
        trials.setdefault((row.digest, row.algorithm, row.seed), []).append(row)
    made = []
    for (digest, algorithm, seed), rows in trials.items():
        key, measures = rows[0].metric, {}
        for measure in dict.fromkeys((key, ALL_MODELS + key, *CURVES)):
            values = [_short(mean_of(row.get(measure))) for row in rows]
            if any(value is not None for value in values):
                measures[measure] = values
        made.append(History(algorithm, seed, digest, [row.round for row in rows], measures))
    return made


def graph_facts(topology: Mapping[str, GraphTable]) -> list[GraphFacts]:
    """Return the facts of each point's and seed's graph."""
    made = []
    for name, graph in topology.items():
        facts = {key: value for key, value in graph["facts"].items() if value is not None}
        if graph.get("clusters"):
            facts |= cluster_facts(int(facts["nodes"]), graph["edges"], graph["clusters"] or [])
        made.append(GraphFacts(int(name.rpartition("/")[2]), str(graph.get("digest", "")), facts))
    return made


def cluster_facts(nodes: int, edges: Iterable[Iterable[int]], clusters: Sequence[int]) -> dict[str, int]:
    """Measure the subgraphs that the clients of one true cluster induce: over them alone a model can travel.

    Returns:
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
        known = [float(number) for number in value if number is not None]
        return sum(known) / len(known) if known else None
    return None if value is None else float(value)


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{DIGITS}g}")
