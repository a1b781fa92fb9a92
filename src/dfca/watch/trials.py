"""One trial as it is shown: the curve of its evaluations, the clusters of its clients, and what happened to them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dfca.report.wording import count
from dfca.runs.store.metric import ShownMetric, metric_named
from dfca.sim.metrics_table import metric_key
from dfca.watch.reading import finite, text, whole_numbers

MOST_LETTERS = 40


def read_metric(summary: Mapping[str, Any], config: Mapping[str, Any], keys: Iterable[str]) -> ShownMetric:
    """Return the metric of a run: as its first row that says one describes it, else by the keys of its lines.

    The unit is in the rows of finished trials, and before in the config.
    """
    rows = summary.get("runs")
    for row in rows if isinstance(rows, list) else ():
        facts = row.get("metric") if isinstance(row, Mapping) else None
        if isinstance(facts, Mapping) and text(facts.get("key")):
            return ShownMetric(
                text(facts.get("name"), MOST_LETTERS) or text(facts["key"], MOST_LETTERS),
                text(facts["key"], MOST_LETTERS),
                facts.get("higher_is_better") is not False,
                facts.get("percent") is True,
                text(facts.get("unit"), MOST_LETTERS),
            )
    key = next((key for key in keys if key != "accuracy"), "accuracy")
    metric, task = metric_named(key), config.get("task")
    unit = text(task.get("unit"), MOST_LETTERS) if isinstance(task, Mapping) else ""
    return metric._replace(name=text(metric.name, MOST_LETTERS), unit="" if metric.percent else unit)


def as_part(metric: ShownMetric) -> dict[str, Any]:
    """Return a metric as the page takes it."""
    return metric._asdict() | {"capitalised": metric.capitalised, "label": metric.label}


MOST_KEPT = 400  # evaluations of one trial; beyond, every second one is forgotten
MOST_LOGGED = 60
NAMED = 6  # clients named in a sentence, at most
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
"""A client's cluster is one letter: (N,) is a text of N letters, "." for none, "~" beyond the last letter."""
MOST_CLUSTERS = len(LETTERS)
MEASURES = ("score", "cluster_accuracy", "live_clusters", "traffic", "switches", "away", "staleness")


@dataclass
class Evaluation:
    """What one line of metrics says."""

    serial: int
    x: float  # virtual or real seconds, or the round
    round: int
    values: dict[str, float | None]  # by MEASURES
    clusters: str  # a letter per client
    away: list[int]
    by_cluster: list[float | None]  # mean scores


@dataclass
class TrialView:
    """A trial of the folder."""

    algorithm: str
    seed: int
    digest: str = ""
    asked_clusters: int | None = None  # how many clusters of clients there should be, None if it is unknown
    complete: bool = True  # all clients are seen, so a cluster without clients is lost
    names: list[str] = field(default_factory=list)  # of the clients; empty: their numbers
    state: str = "waiting"
    error: str = ""
    generation: int = 0  # grows when the trial begins anew
    version: int = 0  # grows with every change
    timed: bool = False
    models: int = 1
    metric: str = "accuracy"  # what lines call the score
    evaluations: list[Evaluation] = field(default_factory=list)
    by_client: list[float | None] = field(default_factory=list)
    log: deque[dict[str, str]] = field(default_factory=lambda: deque(maxlen=MOST_LOGGED))
    _serial: int = 0
    _folds: tuple[float, float] = (0.0, 0.0)
    _short_since: str = ""

    @property
    def key(self) -> str:
        """Identify the trial on the page."""
        return f"{self.algorithm}/{self.seed}/{self.digest[:12]}"

    @property
    def name(self) -> str:
        return f"{self.algorithm}, seed {self.seed}"

    @property
    def last(self) -> Evaluation | None:
        return self.evaluations[-1] if self.evaluations else None

    def begin_anew(self) -> None:
        """Forget what was read: the file was replaced."""
        self.generation, self.version = self.generation + 1, self.version + 1
        self.evaluations, self.by_client = [], []
        self.log.clear()
        self._folds, self._short_since = (0.0, 0.0), ""

    def add(self, line: Mapping[str, Any]) -> None:
        """Take in one line of metrics; what it lacks, or has in another form, is left out."""
        round_, time_s = finite(line.get("round")), finite(line.get("time_s"))
        if round_ is None:
            return
        self.timed = time_s is not None
        x = round_ if time_s is None else time_s
        if self.last is not None and x < self.last.x:
            return
        clusters = encode(line.get("assignments"), whole_numbers(line.get("without_models")) or [])
        away = sorted(set(whole_numbers(line.get("away_clients")) or []))
        traffic, clients = _traffic(line), finite(line.get("measured_clients")) or len(clusters)
        self.metric = metric_key(line)[:MOST_LETTERS]
        nobody = bool(clusters) and not clusters.strip(".")  # no client has a model yet: its scores would be 0
        values = {
            "score": None if nobody else finite(line.get(self.metric)),
            "cluster_accuracy": None if nobody else finite(line.get("cluster_accuracy")),
            "live_clusters": None if nobody else finite(line.get("live_clusters")),
            "traffic": None if traffic is None or not clients else traffic / clients,
            "switches": None,
            "away": finite(line.get("away")) if line.get("away") is not None else None,
            "staleness": self._staleness(line),
        }
        by_cluster = line.get(f"{self.metric}_by_cluster")
        means = [finite(value) for value in by_cluster[:MOST_CLUSTERS]] if isinstance(by_cluster, list) else []
        new = Evaluation(self._serial, x, int(round_), values, clusters, away, means)
        self.models = int(finite(line.get("models")) or 1)
        scores = line.get(f"{self.metric}_by_client")
        self.by_client = [finite(score) for score in scores[:100_000]] if isinstance(scores, list) else []
        self._compare(new)
        if self.last is not None and new.x == self.last.x:
            self.evaluations[-1] = new  # of two lines of one round the last one counts
        else:
            self.evaluations.append(new)
        self._serial, self.version = self._serial + 1, self.version + 1
        if len(self.evaluations) > MOST_KEPT:
            self.evaluations = [*self.evaluations[-2::-2][::-1], new]

    def _staleness(self, line: Mapping[str, Any]) -> float | None:
        """Average the age of the models that were folded since the line before."""
        folds, ages = finite(line.get("folds")), finite(line.get("fold_ages"))
        if folds is None or ages is None:
            return finite(line.get("staleness"))
        before, self._folds = self._folds, (folds, ages)
        number = folds - before[0]
        return (ages - before[1]) / number if number > 0 else None

    def _compare(self, new: Evaluation) -> None:
        """Note what has changed since the last evaluation."""
        when = place(new.x, new.round, self.timed)
        old = self.last
        if old is not None and len(old.clusters) == len(new.clusters):
            pairs = zip(old.clusters, new.clusters, strict=True)
            moved = [i for i, (a, b) in enumerate(pairs) if a != b and "." not in (a, b)]
            new.values["switches"] = float(len(moved)) if new.clusters else None
            if moved:
                shown = [f"{self._name(i)} ({old.clusters[i]}→{new.clusters[i]})" for i in moved[:NAMED]]
                self._note(when, "switch", f"{count(len(moved), 'client')} switched: {some(shown, len(moved))}")
        if old is not None:
            for kind, verb, who in (
                ("away", "left", sorted({*new.away} - {*old.away})),
                ("back", "came back", sorted({*old.away} - {*new.away})),
            ):
                if who:
                    names = [self._name(i) for i in who[:NAMED]]
                    self._note(when, kind, f"{count(len(who), 'client')} {verb}: {some(names, len(who))}")
        self._watch_clusters(new, when)

    def _name(self, client: int) -> str:
        return self.names[client] if 0 <= client < len(self.names) else str(client)

    def _watch_clusters(self, new: Evaluation, when: str) -> None:
        live, wanted = live_clusters(new), self._wanted(new)
        if live is None or wanted < 2:
            return
        if live < wanted and not self._short_since:
            self._short_since = when
            self._note(when, "lost", f"only {live} of {wanted} clusters have clients")
        elif live >= wanted and self._short_since:
            self._short_since = ""
            self._note(when, "found", f"all {wanted} clusters have clients again")

    def _wanted(self, new: Evaluation) -> int:
        """Return how many clusters should have clients: as many as asked for, or kept where that is unknown."""
        if not self.complete:
            return 1
        if new.values["cluster_accuracy"] is None or not new.values["score"]:
            return self.models
        return min(self.asked_clusters or self.models, MOST_CLUSTERS)

    def _note(self, when: str, kind: str, what: str) -> None:
        self.log.append({"when": when, "kind": kind, "what": what})

    def alarm(self) -> str:
        """Say that a cluster has been lost; "" while none is."""
        if self.last is None or not self._short_since:
            return ""
        live = live_clusters(self.last)
        empty = sorted({*LETTERS[: min(self.models, MOST_CLUSTERS)]} - {*self.last.clusters}, key=LETTERS.index)
        of = f"{live} of {self._wanted(self.last)} clusters have clients since {self._short_since}"
        return f"{self.name}: only {of}" + (f"; nobody uses {some(empty[:NAMED], len(empty))}" if empty else "")

    def curve(self, most: int) -> dict[str, Any]:
        """Return the curve for the page, with at most `most` evaluations, the last one among them."""
        step = -(-len(self.evaluations) // most) or 1
        shown = self.evaluations[::-1][::step][::-1]
        columns = {
            name: [short(evaluation.values[name]) for evaluation in shown]
            for name in MEASURES
            if any(evaluation.values[name] is not None for evaluation in shown)
        }
        return {
            "algorithm": self.algorithm,
            "seed": self.seed,
            "digest": self.digest[:12],
            "state": self.state,
            "error": self.error,
            "timed": self.timed,
            "models": self.models,
            "generation": self.generation,
            "version": self.version,
            "x": [short(evaluation.x) for evaluation in shown],
            "round": [evaluation.round for evaluation in shown],
            **columns,
        }

    def frames(self, after: int) -> dict[str, Any]:
        """Return the clusters of all clients at the evaluations after one of them, and what happened."""
        return {
            "generation": self.generation,
            "frames": [
                [
                    *(shown.serial, short(shown.x), shown.round, shown.clusters, shown.away),
                    [short(value) for value in shown.by_cluster],
                ]
                for shown in self.evaluations
                if shown.serial > after
            ],
            "by_client": [short(score) for score in self.by_client],
            "log": list(self.log),
        }


def live_clusters(evaluation: Evaluation) -> int | None:
    used = {*evaluation.clusters} - {".", "~"}
    known = evaluation.values["live_clusters"]
    return len(used) if used else None if known is None else int(known)


def encode(assignments: Any, without: Sequence[int] = ()) -> str:
    """Write the clusters of all clients as one letter each; "" where they are not known.

    >>> encode([0, 11, -1, 99], without=[0])
    '.b.~'
    """
    known = whole_numbers(assignments)
    if known is None:
        return ""
    none = set(without)
    return "".join(
        "." if own < 0 or i in none else LETTERS[own] if own < MOST_CLUSTERS else "~" for i, own in enumerate(known)
    )


def place(x: float, round_: int, timed: bool) -> str:
    """Say where in a trial something happened.

    >>> place(5, 5, False), place(12.25, 3, True)
    ('round 5', '12.2 s')
    """
    return f"{x:.1f} s" if timed else f"round {round_:,}"


def some(shown: Sequence[str], number: int) -> str:
    """List the first of some things.

    >>> some(["1", "4"], 2), some(["1", "4"], 5)
    ('1, 4', '1, 4 and 3 more')
    """
    return ", ".join(shown) + (f" and {number - len(shown):,} more" if number > len(shown) else "")


def short(value: float | None) -> float | int | None:
    """Write a number in few digits; large ones as they are.

    >>> short(0.912345), short(3.0), short(1234567.0), short(None)
    (0.9123, 3, 1234567, None)
    >>> short(0.000123456)
    0.0001235
    """
    if value is None:
        return None
    if value == int(value):
        return int(value)
    return round(value, 4) if abs(value) >= 0.1 else float(f"{value:.4g}")


def label(value: Any) -> str:
    """Return the name of an algorithm or a point as one short line."""
    return text(value, 80)


def _traffic(line: Mapping[str, Any]) -> float | None:
    """Add up what all clients sent and received, as `traffic_bytes` does, of a line that may be malformed."""
    sent, received = finite(line.get("bytes_sent")), finite(line.get("bytes_received"))
    if sent is None:
        return None
    return sent + ((finite(line.get("server_bytes_sent")) or sent) if received is None else received)
